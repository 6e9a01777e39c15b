# SPDX-License-Identifier: Apache-2.0
"""Errors of users' functions: one table for rewards, agent loops, tools and rows, with the expected words.

It imports only the standard library, because a reward process has no memory for more.
"""

from __future__ import annotations

import asyncio
import io
import json
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

WORDS = "the calculator is out of order"


class OwnError(Exception):
    """An exception of the user's own file."""


class NeedsTwo(Exception):
    """An exception that can be pickled but not unpickled, like errors of HTTP clients."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class NotPickled(Exception):
    def __reduce__(self) -> Any:
        raise RuntimeError("this one does not pickle")


class SaysNothing(Exception):
    def __str__(self) -> str:
        raise RuntimeError(WORDS)


class SaysExit(Exception):
    def __str__(self) -> str:
        raise SystemExit(WORDS)


class SaysNumber(Exception):
    def __str__(self) -> Any:  # type: ignore[override]
        return 7


class ShowsNothing(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def never_closed() -> Any:
    """A generator that continues when it is closed."""
    while True:
        try:
            yield 1
        except GeneratorExit:
            yield 2


class SubText(str):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Own(BaseException):
    """An exception that does not derive from `Exception`."""


class OddMeta(type):
    def __getattribute__(cls, name: str) -> Any:
        if name == "__name__":
            raise RuntimeError(WORDS)
        return super().__getattribute__(name)


class OddClass(Exception, metaclass=OddMeta):
    pass


class OddAttributes(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"{WORDS}: {name}")


class Falsy(Exception):
    def __bool__(self) -> bool:
        raise RuntimeError("neither")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")

    __hash__ = None  # type: ignore[assignment]


def throw(error: BaseException) -> NoReturn:
    raise error


def _local() -> None:
    class Local(Exception):
        pass

    raise Local(WORDS)


def _deep() -> None:
    _deep()


def _with_attribute(value: Any) -> None:
    error = ValueError(WORDS)
    error.attribute = value  # type: ignore[attr-defined]
    raise error


def _circle() -> None:
    first, second = ValueError(WORDS), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    raise first


def _own_cause() -> None:
    error = OwnError(WORDS)
    error.__cause__ = error
    raise error


def _with_cause() -> None:
    raise OwnError(WORDS) from ConnectionResetError("the line was cut")


def _long_chain() -> None:
    error: Exception = OwnError("the first")
    for number in range(2_000):
        following = ValueError(f"number {number}")
        following.__cause__ = error
        error = following
    raise error


def _of_itself() -> None:
    values: list[Any] = [WORDS]
    values.append(values)
    raise ValueError(WORDS, values)


def _noted() -> None:
    error = ValueError(WORDS)
    error.__notes__ = [object(), "x" * 1_000_000]  # type: ignore[list-item]
    raise error


def _without_trace() -> None:
    error = ValueError(WORDS)
    error.__traceback__ = None
    raise error.with_traceback(None) from None


def _warned() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.warn(WORDS, stacklevel=1)


def _in_finally() -> None:
    try:
        raise ValueError("lost")
    finally:
        raise OwnError(WORDS)


def _in_exit() -> None:
    class Context:
        def __enter__(self) -> None: ...

        def __exit__(self, *error: Any) -> None:
            raise OwnError(WORDS)

    with Context():
        raise ValueError("lost")


def _raises_no_exception() -> None:
    text: Any = "text"
    raise text


def _nested_group() -> None:
    error: Exception = OwnError(WORDS)
    for level in range(50):
        error = ExceptionGroup(f"level {level}", [error])
    raise error


SHOWN_NOT = "<its message cannot be shown: "
RAISING: dict[str, tuple[Callable[[], Any], str]] = {
    "ValueError": (lambda: throw(ValueError(WORDS)), WORDS),
    "its own class": (lambda: throw(OwnError(WORDS)), f"OwnError: {WORDS}"),
    "KeyError": (lambda: throw(KeyError(WORDS)), WORDS),
    "an index": (lambda: [][3], "IndexError: list index out of range"),
    "no attribute": (lambda: object().calculator, "no attribute 'calculator'"),  # type: ignore[attr-defined]
    "no name": (lambda: calculator, "name 'calculator' is not defined"),  # type: ignore[name-defined] # noqa: F821
    "a division": (lambda: 1 / 0, "ZeroDivisionError"),
    "an overflow": (lambda: 2.0**10_000, "OverflowError"),
    "no message": (lambda: throw(AssertionError()), "AssertionError"),
    "TypeError": (lambda: len(7), "object of type 'int' has no len"),  # type: ignore[arg-type]
    "no exception": (_raises_no_exception, "TypeError: exceptions must derive"),
    "an import": (lambda: __import__("calculator_of_nobody"), "calculator_of_nobody"),
    "OSError": (lambda: throw(OSError(28, WORDS)), WORDS),
    "no file": (lambda: open("/calculator"), "/calculator"),  # noqa: SIM115
    "a closed file": (lambda: _closed().read(), "I/O operation on closed file"),
    "TimeoutError": (lambda: throw(TimeoutError(WORDS)), WORDS),
    "asyncio's TimeoutError": (lambda: throw(asyncio.TimeoutError(WORDS)), WORDS),  # noqa: UP041
    "asyncio's InvalidStateError": (lambda: throw(asyncio.InvalidStateError(WORDS)), WORDS),
    "asyncio's IncompleteReadError": (lambda: throw(asyncio.IncompleteReadError(b"x", 7)), "IncompleteReadError"),
    "ConnectionResetError": (lambda: throw(ConnectionResetError(104, WORDS)), WORDS),
    "BrokenPipeError": (lambda: throw(BrokenPipeError(32, WORDS)), WORDS),
    "InterruptedError": (lambda: throw(InterruptedError(4, WORDS)), WORDS),
    "BlockingIOError": (lambda: throw(BlockingIOError(11, WORDS, 3)), WORDS),
    "EOFError": (lambda: throw(EOFError(WORDS)), WORDS),
    "MemoryError": (lambda: throw(MemoryError(WORDS)), WORDS),
    "BufferError": (lambda: throw(BufferError(WORDS)), WORDS),
    "ReferenceError": (lambda: throw(ReferenceError(WORDS)), WORDS),
    "SystemError": (lambda: throw(SystemError(WORDS)), WORDS),
    "NotImplementedError": (lambda: throw(NotImplementedError(WORDS)), WORDS),
    "PicklingError": (lambda: throw(pickle.PicklingError(WORDS)), WORDS),
    "UnpicklingError": (lambda: throw(pickle.UnpicklingError(WORDS)), WORDS),
    "a syntax error": (lambda: compile("1 +", "calculator", "eval"), "SyntaxError"),
    "text that is no JSON": (lambda: json.loads("{"), "JSONDecodeError"),
    "bytes that are no text": (lambda: b"\xff".decode(), "UnicodeDecodeError"),
    "text that is no bytes": (lambda: "\ud800".encode(), "UnicodeEncodeError"),
    "a program that fails": (lambda: subprocess.run(["false"], check=True), "CalledProcessError"),
    "a program that is not there": (lambda: subprocess.run(["calculator-of-nobody"], check=True), "FileNotFoundError"),
    "a warning": (_warned, WORDS),
    "a recursion": (_deep, "RecursionError"),
    "a group": (lambda: throw(ExceptionGroup(WORDS, [ValueError("one"), KeyError("two")])), WORDS),
    "a group of any": (lambda: throw(BaseExceptionGroup(WORDS, [KeyboardInterrupt("one")])), WORDS),
    "groups in groups": (_nested_group, "level 49"),
    "StopAsyncIteration": (lambda: throw(StopAsyncIteration(WORDS)), "StopAsyncIteration"),
    "StopIteration": (lambda: next(iter(())), "StopIteration"),
    "GeneratorExit": (lambda: throw(GeneratorExit(WORDS)), f"GeneratorExit|{WORDS}|[Cc]ancelled"),
    "SystemExit": (lambda: throw(SystemExit(WORDS)), WORDS),
    "SystemExit with success": (lambda: throw(SystemExit(0)), "SystemExit"),
    "exit": (lambda: sys.exit(WORDS), WORDS),
    "KeyboardInterrupt": (lambda: throw(KeyboardInterrupt(WORDS)), WORDS),
    "BaseException": (lambda: throw(BaseException(WORDS)), WORDS),
    "its own that is no Exception": (lambda: throw(Own(WORDS)), WORDS),
    "needs arguments": (lambda: throw(NeedsTwo(WORDS, status=429)), WORDS),
    "does not pickle": (lambda: throw(NotPickled(WORDS)), WORDS),
    "a class of a function": (_local, WORDS),
    "cannot say what it is": (lambda: throw(SaysNothing()), f"SaysNothing: {SHOWN_NOT}RuntimeError>"),
    "exits when it is asked": (lambda: throw(SaysExit()), f"SaysExit: {SHOWN_NOT}SystemExit>"),
    "says a number": (lambda: throw(SaysNumber()), f"SaysNumber: {SHOWN_NOT}TypeError>"),
    "cannot be shown": (lambda: throw(ShowsNothing(WORDS)), WORDS),
    "text of its own class": (lambda: throw(ValueError(SubText(WORDS))), "ValueError"),
    "a class without a name": (lambda: throw(OddClass(WORDS)), WORDS),
    "attributes that raise": (lambda: throw(OddAttributes(WORDS)), WORDS),
    "neither true nor equal": (lambda: throw(Falsy(WORDS)), WORDS),
    "ten megabytes of words": (lambda: throw(ValueError(WORDS + "x" * 10_000_000)), WORDS),
    "many lines": (lambda: throw(ValueError(WORDS + "\n" * 10_000)), WORDS),
    "half a character": (lambda: throw(ValueError(f"{WORDS} \ud800")), WORDS),
    "a character of zero": (lambda: throw(ValueError(f"{WORDS} \0")), WORDS),
    "a terminal's commands": (lambda: throw(ValueError(f"{WORDS} \x1b[2J\x1b[31m")), WORDS),
    "signs of formats": (lambda: throw(ValueError(f"{WORDS} %s %d {{}} {{0}} $x")), f"{WORDS} %s %d"),
    "bytes": (lambda: throw(ValueError(WORDS.encode())), WORDS),
    "a lock": (lambda: _with_attribute(threading.Lock()), WORDS),
    "a lambda": (lambda: _with_attribute(lambda: 1), WORDS),
    "a cause": (_with_cause, f"{WORDS}.*caused by ConnectionResetError: the line was cut"),
    "its own cause": (_own_cause, WORDS),
    "causes in a circle": (_circle, WORDS),
    "a chain of causes": (_long_chain, "number 1999.*caused by OwnError: the first"),
    "arguments in themselves": (_of_itself, WORDS),
    "odd notes": (_noted, WORDS),
    "no traceback": (_without_trace, WORDS),
    "an error in a finally": (_in_finally, WORDS),
    "an error in an exit": (_in_exit, WORDS),
}
"""By name: a function that raises, and a regular expression for the message about it."""


def _closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream

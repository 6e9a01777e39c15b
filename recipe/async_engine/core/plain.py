# SPDX-License-Identifier: Apache-2.0
"""Converts objects and exceptions of users' code to plain values and text before they are sent to another process.

Contract: a value from `plain` consists of None, bool, int, float, str, list and dict with text keys, all of exactly
these types, so every process can read it and JSON can express it. It has at most `MOST` values and characters in total.
Anything else raises `NotPlain`. `told` never raises, for any exception of any class. Shown by tests/core/test_plain.py.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from enum import Enum
from numbers import Number
from typing import Any

from recipe.async_engine.core.errors import RecipeError

MOST = 4 << 20
"""Largest total number of values and characters in one converted value."""
DEEPEST = 64
"""Largest allowed nesting depth of lists and dicts."""
LONGEST_MESSAGE, LONGEST_TRACE = 2000, 8000
"""Largest numbers of characters of an exception's message (the beginning is kept) and traceback (the end is kept)."""
LARGEST_BITS = 1024
"""Largest allowed size of an int in bits. The largest float, written as an int, has this size."""

# These are read from the built-in classes, so that a user's class or metaclass cannot override them.
_NAME, _CAUSE = type.__dict__["__name__"], BaseException.__dict__["__cause__"]


class NotPlain(RecipeError):
    """A value cannot be converted for another process; the message says where in the value the problem is."""


def plain(value: Any, what: str) -> Any:
    """Convert a value to None, bool, int, float, str, and lists and dicts of these.

    Enumerations become their values; tuples, sets, arrays and tensors become lists; all other numbers (numpy's,
    decimals, fractions) become floats. If a user's class raises while the value is read, its exception may propagate.
    ``what`` names the value in error messages.

    Raises:
        NotPlain: the value has a type that cannot be converted, contains itself, or is larger than `MOST`.
    """
    return _Converter().convert(value, what, 0)


Where = str | tuple[Any, str | int]
"""A location inside a value: the name of the whole value, or (location of the dict or list, key or index in it)."""


class _Converter:
    def __init__(self) -> None:
        self._left = MOST

    def convert(self, value: Any, where: Where, depth: int) -> Any:
        self._count(1, where)
        if value is None or isinstance(value, bool):
            return value
        if depth > DEEPEST:
            raise NotPlain(f"{_place(where)} is nested deeper than {DEEPEST} levels, or contains itself")
        if isinstance(value, Enum):
            return self.convert(value.value, where, depth + 1)
        if isinstance(value, str):
            self._count(len(value), where)
            return readable(str.__str__(value))
        if isinstance(value, int):
            if value.bit_length() > LARGEST_BITS:
                bits = value.bit_length()
                raise NotPlain(f"{_place(where)} is an int of {bits} bits; at most {LARGEST_BITS} bits are allowed")
            return int.__int__(value)
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, Mapping):
            named = {self._key(key, where): part for key, part in value.items()}
            return {key: self.convert(part, (where, key), depth + 1) for key, part in named.items()}
        if isinstance(value, list | tuple | AbstractSet):
            self._count(len(value), where)
            return [self.convert(part, (where, place), depth + 1) for place, part in enumerate(value)]
        return self._by_its_methods(value, where, depth)

    def _count(self, size: int, where: Where) -> None:
        self._left -= size
        if self._left < 0:
            raise NotPlain(f"{_place(where)} is too large: more than {MOST:,} values and characters together")

    def _key(self, key: Any, where: Where) -> str:
        if not isinstance(key, str | Number | None):
            raise NotPlain(f"{_place(where)} has a key of type {_type_name(key)}: keys are text or numbers")
        text = readable(str(key))
        self._count(len(text) + 1, where)
        return text

    def _by_its_methods(self, value: Any, where: Where, depth: int) -> Any:
        try:
            if hasattr(type(value), "tolist"):
                self._count(int(getattr(value, "nbytes", 0)) // 8, where)
                return self.convert(value.tolist(), where, depth + 1)
            if hasattr(type(value), "__float__"):
                return float(value)
        except NotPlain:
            raise
        except Exception as error:  # a user's method may raise anything
            words = f"{_place(where)}, of type {_type_name(value)}, cannot be converted: {told(error)}"
            raise NotPlain(words) from error
        raise NotPlain(
            f"{_place(where)} is of type {_type_name(value)}, which cannot be passed to another process: allowed "
            "are numbers, text, booleans, None, and lists and dicts of them"
        )


def _place(where: Where) -> str:
    if isinstance(where, str):
        return where
    outer, part = where
    return f"{_place(outer)}[{part!r}]"


def told(error: BaseException) -> str:
    """Return the class name and message of an exception, and those of its root cause if it has one. Never raise."""
    first = _first(error)
    words = _told_alone(error)
    return words if first is error else f"{words} (caused by {_told_alone(first)})"


def origin(error: BaseException) -> str:
    """Describe the root cause of an error in loading a user's file, with the file and line of the cause.

    Return "" if the error has no cause. If the file failed to load because it has a dataclass with postponed
    annotations, the text includes the advice of `postponed`.
    """
    first = _first(error)
    if first is error:
        return ""
    frames = traceback.extract_tb(first.__traceback__)
    own = [frame for frame in frames if "importlib" not in frame.filename and not frame.filename.startswith("<")]
    place = f", {own[-1].filename}:{own[-1].lineno}" if own else ""
    return f"{_told_alone(first)}{place}{postponed(traced(first))}"


def postponed(trace: str) -> str:
    """Return advice if a file of a user failed to load because it has a dataclass with postponed annotations; else "".

    ``trace`` is the traceback of the failure.
    """
    if "dataclasses.py" not in trace or "'NoneType' object has no attribute '__dict__'" not in trace:
        return ""
    return (
        " (verl loads such a file without entering it in sys.modules, where dataclasses look postponed annotations up: "
        "leave out `from __future__ import annotations` there, or move the class to a module that the file imports)"
    )


def traced(error: BaseException) -> str:
    """Return the end of an exception's traceback, or "" if it cannot be formatted."""
    try:
        return readable("".join(traceback.format_exception(error)))[-LONGEST_TRACE:].rstrip()
    except BaseException:  # a user's class may raise anything
        return ""


def readable(text: str) -> str:
    """Return ``text`` with lone surrogates and NUL characters escaped, so that any file or stream accepts it."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "\\x00")


def _first(error: BaseException) -> BaseException:
    """Return the root cause of an exception by following ``__cause__``, even if the chain of causes is circular."""
    seen = {id(error)}
    while (cause := _CAUSE.__get__(error)) is not None and id(cause) not in seen:
        error = cause
        seen.add(id(cause))
    return error


def _told_alone(error: BaseException) -> str:
    try:
        message = readable(str(error))
    except BaseException as inner:  # a user's class may raise anything
        message = f"<its message cannot be shown: {type(inner).__name__}>"
    if len(message) > LONGEST_MESSAGE:
        message = f"{message[:LONGEST_MESSAGE]}... ({len(message):,} characters)"
    name = _type_name(error)
    return f"{name}: {message}" if message else name


def _type_name(value: Any) -> str:
    return readable(_NAME.__get__(type(value)))

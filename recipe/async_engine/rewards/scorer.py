# SPDX-License-Identifier: Apache-2.0
"""The inside of a scoring process: loads the reward function once, then calls it.

Contract: imports nothing of verl, torch or Ray unless the reward function does, so that a process which was ended is
replaced in a moment. The processes are forks of one that has loaded the function already (`PRELOAD`), if its loading
succeeds there. A process leads a session of its own, so that what it has started ends with it, and what it prints goes
nowhere: an endless print would fill a disk. Of what the function gives or raises, only text and plain values leave the
process (`recipe.async_engine.core.plain`), one line of JSON for each call, whose first key says what it is (`RESULT`,
`RAISED`, `FULL`). Shown by tests/integration/test_reward_pool.py and test_odd_rewards.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import importlib.util
import inspect
import json
import os
import pickle
import resource
import select
import signal
import socket
from collections.abc import Callable
from typing import Any

from recipe.async_engine.core.plain import NotPlain, plain, told, traced

PRELOAD = "RECIPE_REWARD_FUNCTION"
"""Environment variable: a function's [module path, name] in JSON, loaded when this module is imported."""

HEADER = 8
"""Bytes before a call's pickled arguments: how many bytes these are."""
RESULT, RAISED, FULL = "result", "raised", "full"
"""Of a line: the function's result; the error's words, with `TRACE` its traceback; those of a MemoryError, which ends
the process."""
TRACE = "trace"
OUT_OF_MEMORY = 112
"""Exit status of a process that had no memory left to say so."""

# A reward function may put others in their places.
_exit, _getpid, _setitimer, _sendall = os._exit, os.getpid, signal.setitimer, socket.socket.sendall
_dumps, _loads = json.dumps, pickle.loads

_loaded: dict[tuple[str, str], Callable[..., Any]] = {}


def load(path: str, name: str) -> Callable[..., Any]:
    """A function of a Python file, or of a module named ``pkg://...``, loaded once in a process."""
    if (path, name) not in _loaded:
        if path.startswith("pkg://"):
            module = importlib.import_module(path.removeprefix("pkg://").replace("/", "."))
        else:
            spec = importlib.util.spec_from_file_location("reward_function", path.removeprefix("file://"))
            if spec is None or spec.loader is None:
                raise ImportError(f"{path} is no Python file")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        _loaded[path, name] = getattr(module, name)
    return _loaded[path, name]


def serve(
    channel: socket.socket, alive: Any, path: str, name: str, settings: dict[str, Any], memory_bytes: int | None
) -> None:
    """Make this process one that scores: greet with a line, None as its result, then answer each call with one.

    Args:
        channel: to the reward worker; calls are `HEADER` bytes and pickled keyword arguments.
        alive: the reading end of a pipe whose writing end closes with the reward worker.
        path, name: of the reward function, see `load`.
        settings: further arguments of each call, which win over the call's own.
        memory_bytes: of address space.
    """
    with contextlib.suppress(PermissionError):
        os.setsid()
    end_with(alive.fileno())
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    _answer(channel, lambda: (load(path, name), None)[1])
    calls = channel.makefile("rb")
    while header := calls.read(HEADER):
        arguments = calls.read(int.from_bytes(header, "big"))
        _answer(channel, lambda: score(load(path, name), {**_loads(arguments), **settings}))  # noqa: B023


def end_with(pipe: int) -> None:
    """SIGKILL, which ends a process whatever it is doing, when the last writing end of this pipe is closed."""
    # Opened anew: the owner of the signal belongs to the open file, which other processes share.
    own = os.open(f"/proc/self/fd/{pipe}", os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    # Closed before there was anyone to tell.
    if select.select([own], [], [], 0)[0]:
        _exit(1)


def score(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """What a synchronous reward function gives for these arguments, as `checked` has it."""
    return checked(function(**arguments))


def checked(result: Any) -> Any:
    """A reward function's result as plain values, if it is one that verl takes.

    Raises:
        NotPlain: it is none; the message names the place in it.
    """
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise NotPlain("the reward function gave a coroutine: one that awaits has to be an `async def` itself")
    given = plain(result, "what the reward function gave")
    if not isinstance(given, dict):
        return number_of(result, given)
    if "score" not in given:
        keys = ", ".join(list(given)[:10]) or "none"
        raise NotPlain(f"the reward function gave a dict without 'score'; its keys: {keys}")
    return {**given, "score": number_of(result["score"], given["score"])}


def number_of(value: Any, given: Any) -> Any:
    """A score as a plain value, ``given`` by `plain`; an array or tensor of one number is that number, as for verl."""
    while hasattr(value, "tolist") and isinstance(given, list) and len(given) == 1:
        given = given[0]
    return given


def _answer(channel: socket.socket, call: Callable[[], Any]) -> None:
    """Send what the call gives or raises; a fork of this process that comes back from it ends here."""
    own, answer = _getpid(), {}
    try:
        answer[RESULT] = call()
    except MemoryError as error:
        # What fills the memory may stay, as a leak does: the next call gets a process without it.
        _tell_and_end(channel, own, error.with_traceback(None))
    except BaseException as error:  # whatever a user's function raises costs its call alone
        answer = {RAISED: told(error), TRACE: traced(error)}
    if _getpid() != own:
        _exit(0)
    # An alarm that the call has left would end a later one.
    _setitimer(signal.ITIMER_REAL, 0)
    _sendall(channel, _dumps(answer).encode() + b"\n")


def _tell_and_end(channel: socket.socket, own: int, error: MemoryError) -> None:
    try:
        if _getpid() == own:
            _sendall(channel, _dumps({FULL: told(error)}).encode() + b"\n")
    finally:
        _exit(OUT_OF_MEMORY)


if PRELOAD in os.environ:
    # Its error is the scoring process's to raise, where someone can see it.
    with contextlib.suppress(BaseException):
        load(*json.loads(os.environ[PRELOAD]))

# SPDX-License-Identifier: Apache-2.0
"""Behaviours of users' agent loops and tools as a table: a loop by name, and what must be reported about it.

A loop here is a function of the agent loop that runs it (`OddLoop`), verl's sampling parameters and the data's row. The
second value is a regular expression for the error of its group, or None if its answers are trained. `LOOPS` do not
affect others, `DEADLY` end or block their process.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import gc
import json
import locale
import logging
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import numpy as np
import torch
from odd_errors import WORDS, never_closed
from odd_functions import INSTEAD, RAISING, RETURNED
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput


class OddLoop(Protocol):
    """The interface that a loop of the table needs."""

    async def sound(self, sampling_params: dict[str, Any]) -> AgentLoopOutput:
        """Return a correct output: two tokens of the engine's answer."""

    async def ask(self, sampling_params: dict[str, Any], prompt_ids: list[int]) -> Any:
        """Return the engine's answer."""

    def output(self, prompt_ids: list[int], response_ids: list[int]) -> AgentLoopOutput:
        """Return an output as if these tokens were an answer."""


Loop = Callable[[Any, dict[str, Any], dict[str, Any]], Awaitable[Any]]
Table = dict[str, tuple[Loop, str | None]]


def raising(function: Callable[[], Any], where: str = "before") -> Loop:
    """Return a loop that calls the function before its answer, after it, or in a thread."""

    async def run(loop: OddLoop, sampling_params: dict[str, Any], sample: dict[str, Any]) -> Any:
        if where == "after":
            await loop.sound(sampling_params)
        if where == "thread":
            await asyncio.get_running_loop().run_in_executor(None, function)
        function()
        return await loop.sound(sampling_params)

    return run


def returning(changes: dict[str, Any]) -> Loop:
    """Return a loop whose output has these fields."""

    async def run(loop: OddLoop, sampling_params: dict[str, Any], sample: dict[str, Any]) -> Any:
        return (await loop.sound(sampling_params)).model_copy(update=changes)

    return run


def returning_instead(made: Callable[[AgentLoopOutput], Any]) -> Loop:
    """Return a loop that returns ``made`` of a correct output."""

    async def run(loop: OddLoop, sampling_params: dict[str, Any], sample: dict[str, Any]) -> Any:
        return made(await loop.sound(sampling_params))

    return run


# Actions of a loop or a tool on its process.


def blocks() -> None:
    time.sleep(0.2)


def prints() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.write("x" * 1_000_000 + "\n")
    os.write(1, b"y" * 100_000 + b"\n")


def forks() -> None:
    if not (child := os.fork()):
        os._exit(3)
    os.waitpid(child, 0)


def forks_a_sleeper() -> None:
    if not os.fork():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)
        os._exit(3)


def leaves_a_program() -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)


def leaves_a_server() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=server.accept, daemon=True).start()


def leaves_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(3600,)).start()


def leaves_a_raising_thread() -> None:
    threading.Thread(target=lambda: 1 / 0).start()


def exits_in_a_thread() -> None:
    threading.Thread(target=sys.exit, args=(9,)).start()


def exits_in_a_task() -> None:
    async def run() -> None:
        sys.exit(WORDS)

    asyncio.get_running_loop().left = asyncio.create_task(run())  # type: ignore[attr-defined]


def fails_in_a_callback() -> None:
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)


def leaves_a_hook() -> None:
    atexit.register(time.sleep, 3600)


def a_process_of_multiprocessing() -> None:
    child = multiprocessing.get_context("fork").Process(target=os._exit, args=(3,))
    child.start()
    child.join()


def changes_folder() -> None:
    os.chdir("/")
    os.umask(0o777)


def changes_the_locale() -> None:
    locale.setlocale(locale.LC_ALL, "C")
    os.environ.update(LANG="xx", TZ="Nowhere/Else")
    time.tzset()


def replaces_handlers() -> None:
    # Only possible in the main thread.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        try:
            signal.signal(number, signal.SIG_IGN)
        except ValueError:
            return


def masks_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))


def changes_numbers() -> None:
    np.seterr(all="ignore")
    np.set_printoptions(precision=1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def stops_gradients() -> None:
    torch.set_grad_enabled(False)


def collects() -> None:
    gc.collect()
    gc.disable()


def silences() -> None:
    logging.disable()
    warnings.simplefilter("error")
    sys.stdout = sys.stderr = None  # type: ignore[assignment]


def other_hooks() -> None:
    sys.excepthook = sys.unraisablehook = threading.excepthook = None  # type: ignore[assignment]
    asyncio.get_running_loop().set_exception_handler(lambda *_: 1 / 0)


def sets_policies() -> None:
    asyncio.set_event_loop_policy(None)
    os.environ["CALCULATOR"] = "1"


def traces() -> None:
    sys.settrace(lambda *_: None)
    sys.setprofile(None)
    sys.setswitchinterval(0.1)


def a_deep_stack() -> None:
    sys.setrecursionlimit(100_000)


def swallows() -> None:
    try:
        raise SystemExit(WORDS)
    except BaseException:
        return


def finalizes_badly() -> None:
    class Finalized:
        def __del__(self) -> None:
            raise ValueError(WORDS)

    Finalized()


def ignores_a_close() -> None:
    next(never_closed())


def a_coroutine_of_nobody() -> None:
    asyncio.sleep(1)


def a_future_of_nobody() -> None:
    asyncio.get_running_loop().create_future().set_exception(ValueError(WORDS))


HARMLESS: dict[str, Callable[[], Any]] = {
    function.__name__.replace("_", " "): function
    for function in (
        *(blocks, prints, forks, forks_a_sleeper, leaves_a_program, leaves_a_server, leaves_a_thread),
        *(leaves_a_raising_thread, exits_in_a_thread, exits_in_a_task, fails_in_a_callback, leaves_a_hook),
        *(a_process_of_multiprocessing, changes_folder, changes_the_locale, replaces_handlers, masks_signals),
        *(changes_numbers, stops_gradients, collects, silences, other_hooks, sets_policies, traces, a_deep_stack),
        *(swallows, finalizes_badly, ignores_a_close, a_coroutine_of_nobody, a_future_of_nobody),
    )
}
"""Actions without any noticeable effect."""
OURSELVES = {function.__name__: function for function in (blocks, prints, forks, sets_policies, swallows)}
"""Those of them that tests may perform on their own process."""


# Actions of a loop on its own trajectory.


async def leaves_tasks(loop: OddLoop, sampling_params: dict[str, Any], sample: dict[str, Any]) -> Any:
    async def fails() -> None:
        raise ValueError(WORDS)

    loop.left = [asyncio.create_task(fails()), asyncio.create_task(asyncio.sleep(0.05))]  # type: ignore[attr-defined]
    return await loop.sound(sampling_params)


async def cancels_itself(loop: OddLoop, sampling_params: dict[str, Any], sample: dict[str, Any]) -> Any:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    return await loop.sound(sampling_params)


async def says_cancelled(loop: OddLoop, sampling_params: dict[str, Any], sample: dict[str, Any]) -> Any:
    raise asyncio.CancelledError(WORDS)


async def closes_the_loop(loop: OddLoop, sampling_params: dict[str, Any], sample: dict[str, Any]) -> Any:
    asyncio.get_running_loop().close()


async def runs_a_loop(loop: OddLoop, sampling_params: dict[str, Any], sample: dict[str, Any]) -> Any:
    coroutine = asyncio.sleep(0)
    try:
        asyncio.run(coroutine)
    finally:
        coroutine.close()


async def waits_in_the_loop(loop: OddLoop, sampling_params: dict[str, Any], sample: dict[str, Any]) -> Any:
    asyncio.get_running_loop().run_until_complete(asyncio.get_running_loop().create_future())


async def changes_its_arguments(loop: Any, sampling_params: dict[str, Any], sample: dict[str, Any]) -> Any:
    output = await loop.sound(sampling_params)
    sampling_params.clear()
    sample.clear()
    loop.server_manager = loop.client = loop.config = loop.tokenizer = None
    return output


async def asks_with_nonsense(loop: OddLoop, sampling_params: dict[str, Any], sample: dict[str, Any]) -> Any:
    return await loop.ask({"max_tokens": WORDS}, [1, 2])


async def never_asks(loop: OddLoop, sampling_params: dict[str, Any], sample: dict[str, Any]) -> Any:
    return loop.output([1, 2], [10, 11])


def no_coroutine(loop: OddLoop, sampling_params: dict[str, Any], sample: dict[str, Any]) -> Any:
    return 7


async def gives_parts(loop: OddLoop, sampling_params: dict[str, Any], sample: dict[str, Any]) -> Any:
    async def parts() -> Any:
        yield await loop.sound(sampling_params)

    return parts()


async def fails_in_a_group(loop: OddLoop, sampling_params: dict[str, Any], sample: dict[str, Any]) -> Any:
    async def fails() -> None:
        raise ValueError(WORDS)

    async with asyncio.TaskGroup() as group:
        group.create_task(fails())
        group.create_task(asyncio.sleep(60))


async def gathers_exits(loop: OddLoop, sampling_params: dict[str, Any], sample: dict[str, Any]) -> Any:
    async def exits() -> None:
        sys.exit(WORDS)

    await asyncio.gather(exits(), asyncio.sleep(0))


async def its_own_time(loop: OddLoop, sampling_params: dict[str, Any], sample: dict[str, Any]) -> Any:
    async with asyncio.timeout(0.01):
        await asyncio.sleep(60)


async def asks_twice_at_once(loop: OddLoop, sampling_params: dict[str, Any], sample: dict[str, Any]) -> Any:
    first, _ = await asyncio.gather(loop.sound(sampling_params), loop.sound(sampling_params))
    return first


async def asks_and_leaves(loop: OddLoop, sampling_params: dict[str, Any], sample: dict[str, Any]) -> Any:
    loop.left = asyncio.create_task(loop.sound(sampling_params))  # type: ignore[attr-defined]
    return await loop.sound(sampling_params)


async def gives_up_an_answer(loop: OddLoop, sampling_params: dict[str, Any], sample: dict[str, Any]) -> Any:
    task = asyncio.create_task(loop.sound(sampling_params))
    await asyncio.sleep(0)
    task.cancel()
    return await loop.sound(sampling_params)


BEHAVING: dict[str, tuple[Any, str | None]] = {
    "leaves tasks": (leaves_tasks, None),
    "cancels itself": (cancels_itself, "the agent loop was cancelled .*, but not by this package"),
    "says that it was cancelled": (says_cancelled, "the agent loop was cancelled .*, but not by this package"),
    "closes the event loop": (closes_the_loop, "Cannot close a running event loop"),
    "runs an event loop": (runs_a_loop, "asyncio.run.. cannot be called"),
    "waits in the event loop": (waits_in_the_loop, "[Tt]his event loop is already running"),
    "changes its arguments": (changes_its_arguments, None),
    "asks with nonsense": (asks_with_nonsense, WORDS),
    "never asks": (never_asks, "of no answer|VersionRecordError|sampled"),
    "is no coroutine": (no_coroutine, "await"),
    "gives parts": (gives_parts, "a async_generator"),
    "fails in a group": (fails_in_a_group, "unhandled errors in a TaskGroup"),
    "its own time": (its_own_time, "TimeoutError"),
    "asks twice at once": (asks_twice_at_once, None),
    "asks, and leaves": (asks_and_leaves, None),
    "gives up an answer": (gives_up_an_answer, None),
}

# For the event loop of an agent-loop worker.
IN_A_WORKER: Table = {"gathers exits": (gathers_exits, WORDS)}

LOOPS: Table = {
    **{f"raises {name}": (raising(function), words) for name, (function, words) in RAISING.items()},
    **{f"returns {name}": (returning(changes), words) for name, (changes, words) in RETURNED.items()},
    **{f"returns instead {name}": (returning_instead(made), words) for name, (made, words) in INSTEAD.items()},
    **{name: (raising(function), None) for name, function in HARMLESS.items()},
    **BEHAVING,
    **IN_A_WORKER,
}


# Actions that cost a process.


def _in_a_callback() -> None:
    asyncio.get_running_loop().call_soon(sys.exit, 3)


def _left_timer() -> None:
    threading.Timer(0.0, os._exit, [5]).start()
    time.sleep(1.0)


def _closes_files() -> None:
    os.closerange(3, 4096)


def _endless_expression() -> None:
    re.match(r"(a+)+$", "a" * 64 + "b")


def _deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _holds_the_interpreter() -> None:
    ctypes.PyDLL(None).pause()


def _endless_stack() -> None:
    sys.setrecursionlimit(1 << 30)
    json.loads("[" * 10_000_000)


def _kill(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


DEADLY: dict[str, Callable[[], Any]] = {
    "exits": lambda: os._exit(0),
    "exits with a status": lambda: os._exit(7),
    "kills itself": _kill(signal.SIGKILL),
    "quits": _kill(signal.SIGQUIT),
    "stops itself": _kill(signal.SIGSTOP),
    "crashes": lambda: ctypes.string_at(0),
    "aborts": os.abort,
    "exits in a callback": _in_a_callback,
    "exits in a timer": _left_timer,
    "closes files": _closes_files,
    "stops the event loop": lambda: asyncio.get_running_loop().stop(),
    "blocks for an hour": lambda: time.sleep(3600),
    "blocks in an expression": _endless_expression,
    "blocks in a lock": _deadlock,
    "holds the interpreter": _holds_the_interpreter,
}

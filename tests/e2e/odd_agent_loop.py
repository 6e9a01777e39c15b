# SPDX-License-Identifier: Apache-2.0
"""An agent loop that does something odd for every second prompt, in its order: see `WAYS`; tests ask by :func:`way`.

What only raises or returns is in tests/integration/test_users_loops.py; here is what ends a process, blocks it, or
takes it from others, and a few of each other kind, over real Ray actors.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import user_agent_loop
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

WORDS = "the calculator is out of order"


class NeedsTwo(Exception):
    """Pickles, and does not unpickle."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)


async def _waits() -> None:
    await asyncio.sleep(0.2)


def _raises(error: BaseException) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


def _forks() -> None:
    if not (child := os.fork()):
        os._exit(3)
    os.waitpid(child, 0)


def _prints() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.write("x" * 1_000_000 + "\n")


def _cancels_all() -> None:
    for task in asyncio.all_tasks():
        task.cancel()


def _exits_in_a_task() -> None:
    async def run() -> None:
        sys.exit(WORDS)

    asyncio.get_running_loop().left = asyncio.create_task(run())  # type: ignore[attr-defined]


def _signals_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _writes_where_nothing_is() -> None:
    ctypes.string_at(0)


def _leaves_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()


DEADLY: dict[str, Callable[[], Any]] = {
    "exits": lambda: os._exit(0),
    "exits with a status": lambda: os._exit(7),
    "kills itself": _signals_itself,
    "crashes": _writes_where_nothing_is,
    "aborts": os.abort,
    "blocks": lambda: time.sleep(3600),
    "stops the event loop": lambda: asyncio.get_running_loop().stop(),
}
FAILING: dict[str, Callable[[], Any]] = {
    "raises": _raises(ValueError(WORDS)),
    "raises what does not unpickle": _raises(NeedsTwo(WORDS, status=429)),
    "exits politely": lambda: sys.exit(WORDS),
    "interrupts": _raises(KeyboardInterrupt(WORDS)),
    "says that it is cancelled": _raises(asyncio.CancelledError(WORDS)),
    "cancels everything": _cancels_all,
    "raises ten megabytes": _raises(ValueError(WORDS + "x" * 10_000_000)),
    "returns nothing": lambda: None,
    "returns a lock": lambda: None,
    "hangs": lambda: None,
}
HARMLESS: dict[str, Callable[[], Any]] = {
    "forks": _forks,
    "prints": _prints,
    "exits in a task": _exits_in_a_task,
    "leaves a thread": _leaves_a_thread,
    "sets a policy": lambda: asyncio.set_event_loop_policy(None),
}
WAYS = {**FAILING, **HARMLESS, **DEADLY}


def way(index: int) -> str | None:
    """What the loop does for the prompt of this index, None if nothing odd."""
    return None if index % 2 else list(WAYS)[index // 2 % len(WAYS)]


class OddAgentLoop(user_agent_loop.UserAgentLoop):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        how = way(int(kwargs["extra_info"]["index"]))
        if how is not None:
            WAYS[how]()
            await _waits()
        if how == "hangs":
            await asyncio.sleep(3600)
        output = await super().run(sampling_params, **kwargs)
        if how == "returns a lock":
            output.extra_fields["mine"] = threading.Lock()
        return None if how == "returns nothing" else output  # type: ignore[return-value]

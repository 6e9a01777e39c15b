# SPDX-License-Identifier: Apache-2.0
"""Tests whether the process of an agent-loop worker can still run a trajectory after it has run users' code.

Contract: the test, called a rehearsal, runs a made-up trajectory. A rehearsal calls no server, no reward function and
no user's code, and has the same result each time if the process is intact. A rehearsal tests what the process does,
rather than which of its objects users' code has replaced, because libraries replace many objects without harm. Shown by
tests/integration/test_rehearsed_workers.py.
"""

import asyncio
import json
import logging
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import ray
from verl.workers.rollout.replica import TokenOutput

from recipe.async_engine.actors.worker_set import WorkerRestarted, WorkerSpoilt
from recipe.async_engine.core.deadlines import REHEARSED_S
from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.core.plain import told
from recipe.async_engine.engines.answers import COMPLETED
from recipe.async_engine.rollout.group_run import TrajectoryCancelled, TrajectoryDisturbed
from recipe.async_engine.rollout.kept_answers import TrajectoryRecorder
from recipe.async_engine.rollout.trajectory_codec import pack, unpack

logger = logging.getLogger(__name__)

MADE_UP = {"raw_prompt": [{"role": "user", "content": "1 + 1"}]}
DEEP = 400
"""Recursion depth that a rehearsal tries, to detect a lowered recursion limit. Python's default limit is 1,000."""
SOCKETS = 4
WHY = "look for what an agent loop or tool changes in its process"


class MadeUpAnswers(TrajectoryRecorder):
    """The recorder of a made-up trajectory: it answers each request itself, with fixed tokens, and asks no server."""

    def again(self, asked: bytes) -> TokenOutput:
        return TokenOutput(
            token_ids=[1, 2, 3],
            log_probs=[-0.5, -0.25, -0.125],
            stop_reason=COMPLETED,
            extra_fields={"global_steps": 0},
        )


class Rehearsal:
    """Runs a made-up trajectory before the first real one, and again after real ones failed, and compares the results.

    ``run`` is a function that runs one of verl's own agent loops on the row `MADE_UP`, with `MadeUpAnswers` in the
    place of servers. It returns a list with one element, the padded output of the agent loop.
    """

    def __init__(self, run: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self._run = run
        self._first: asyncio.Task[Any] | None = None

    async def begin(self) -> None:
        """Run the first rehearsal, unless it has been run already.

        If it fails, for example because of an unusual model, all later rehearsals are skipped.
        """
        if self._first is None:
            self._first = asyncio.create_task(self._attempt())
        if not self._first.done() and not (await asyncio.wait({self._first}, timeout=REHEARSED_S))[0]:
            self._first.cancel()
            await asyncio.wait({self._first}, timeout=REHEARSED_S)
            logger.debug("this worker cannot rehearse: %s", self._first)

    async def now(self) -> None:
        """Run a rehearsal, to find out whether the process is intact.

        Raises:
            WorkerSpoilt: the rehearsal failed, or its result differed from that of the first rehearsal.
        """
        if (what := await self._changed()) is not None:
            raise WorkerSpoilt(f"no trajectory can run in this worker any more ({what}): {WHY}")

    @asynccontextmanager
    async def after_a_failure(self) -> AsyncIterator[None]:
        """Run a rehearsal if the code in the ``async with`` block raises an error.

        Raises:
            WorkerSpoilt: the rehearsal failed too, or its result differed from that of the first rehearsal.
        """
        try:
            yield
        except (asyncio.CancelledError, TrajectoryCancelled, TrajectoryDisturbed, WorkerRestarted):
            raise
        except BaseException as error:
            if (what := await self._changed()) is None:
                raise
            said = error if isinstance(error, RecipeError) else told(error)
            raise WorkerSpoilt(f"{said}, and no trajectory can run in this worker any more ({what}): {WHY}") from error

    async def _changed(self) -> str | None:
        """Run a rehearsal; return what was wrong with it, or None if its result equals that of the first rehearsal.

        The result is also None if the first rehearsal failed, or if this one takes too long.
        """
        first = self._first
        if first is None or not first.done() or first.cancelled() or first.exception() is not None:
            return None
        try:
            async with asyncio.timeout(REHEARSED_S):
                now = await self._attempt()
        except TimeoutError:  # the process is probably only busy; the worker pool detects workers that hang
            return None
        except Exception as failure:
            return told(failure)
        return None if now == first.result() else "a made-up trajectory has another result than at the start"

    async def _attempt(self) -> list[tuple[str, str, bytes]]:
        _call_deeply(DEEP)
        for ends in [socket.socketpair() for _ in range(SOCKETS)]:
            for end in ends:
                end.close()
        random.uniform(time.time(), time.perf_counter())
        json.loads(json.dumps({"": [0.5]}))
        if ray.is_initialized():
            await ray.put(None)
        ran = asyncio.create_task(self._run())
        await asyncio.wait({ran})
        arrays = vars(unpack(pack(await ran))[0]).items()
        return [
            (name, str(value.dtype), np.asarray(value).tobytes()) for name, value in arrays if hasattr(value, "dtype")
        ]


def _call_deeply(depth: int) -> None:
    if depth:
        _call_deeply(depth - 1)

# SPDX-License-Identifier: Apache-2.0
"""Synchronous reward functions in processes of their own, each call with a time limit.

Contract. `ScoringPool.score` gives what the function returns, or raises what it raised. A call that does not return in
time, or whose process dies (memory, a crash in native code), raises an error that says so; the process is ended with
everything that it has started, and replaced. Other calls are not affected, and the event loop never waits for one.
Shown by tests/integration/test_reward_pool.py.
"""

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from pebble import ProcessExpired, ProcessPool

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.platform.sockets import sockets_folder
from recipe.async_engine.rewards import scorer


class RewardTimeout(RecipeError):
    """A reward function did not return within ``async_training.timeouts.reward``; its process was ended."""


class RewardProcessDied(RecipeError):
    """The process of a reward function ended without an answer."""


COUNTS = ("pending", "scored", "failed", "timed_out", "died", "seconds")
"""Of one pool: calls under way, what became of the others, and their seconds, the wait for a process included."""


class ScoringPool:
    """Processes that call one reward function.

    Args:
        path, name: of the function: its file, or ``pkg://module``.
        settings: further keyword arguments of every call; they win over the call's own, as in verl.
        processes: how many calls run at the same time.
        timeout_s: for one call, its wait for a process included: who asked has given it up then.
        memory_bytes: of address space for each process; None for no limit.
    """

    def __init__(
        self,
        path: str,
        name: str,
        settings: Mapping[str, Any],
        processes: int,
        timeout_s: float,
        memory_bytes: int | None = None,
    ) -> None:
        self.stats: dict[str, float] = dict.fromkeys(COUNTS, 0)
        self._what = f"{name} of {path}"
        self._settings = dict(settings)
        self._timeout_s = timeout_s
        self._pids: set[int] = set()
        # Else multiprocessing runs the main script again in every child, which under Ray is Ray's worker.
        sys.modules["__main__"].__dict__.pop("__file__", None)
        os.environ[scorer.PRELOAD] = json.dumps([path, name])
        # In a local run what a process spawns would be a fork of the whole stack (`prefork`): too large for a limit of
        # memory, and past the import at which the function is loaded for all.
        multiprocessing.set_executable(sys.executable)
        if (folder := sockets_folder()) is not None:
            # As its `get_temp_dir` would (multiprocessing/util.py:142).
            temporary = tempfile.mkdtemp(prefix="pymp-", dir=folder)
            multiprocessing.current_process()._config["tempdir"] = temporary  # type: ignore[attr-defined]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([scorer.__name__])
        self._started = context.SimpleQueue()
        alive, self._alive = context.Pipe(duplex=False)
        arguments = [path, name, memory_bytes, self._started, alive]
        self._pool = ProcessPool(processes, initializer=scorer.begin, initargs=arguments, context=context)

    async def score(self, **arguments: Any) -> Any:
        """What the reward function gives for verl's arguments; RewardTimeout, RewardProcessDied, or what it raised."""
        began = time.monotonic()
        self.stats["pending"] += 1
        future = self._pool.schedule(scorer.score, args=[self._settings, arguments], timeout=self._timeout_s)
        try:
            # Its end cancels the call, which ends its process, or takes it out of the queue.
            async with asyncio.timeout(self._timeout_s):
                result = await asyncio.wrap_future(future)
        except TimeoutError:
            self.stats["timed_out"] += 1
            self._sweep()
            raise RewardTimeout(
                f"the reward function {self._what} gave nothing within {self._timeout_s:g} s "
                "(async_training.timeouts.reward): its process was ended, or none was free"
            ) from None
        except ProcessExpired as error:
            self.stats["died"] += 1
            self._sweep()
            why = "out of memory (async_training.reward_memory_gib)"
            if error.exitcode != scorer.OUT_OF_MEMORY:
                why = f"exit status {error.exitcode}: {why}, or a crash in native code"
            raise RewardProcessDied(f"the process of the reward function {self._what} ended, {why}") from None
        except Exception:
            self.stats["failed"] += 1
            raise
        finally:
            self.stats["pending"] -= 1
            self.stats["seconds"] += time.monotonic() - began
        self.stats["scored"] += 1
        return result

    def close(self) -> None:
        """End every process."""
        self._pool.stop()
        self._pool.join(timeout=10)
        self._sweep()

    def _sweep(self) -> None:
        """Kill what ended scoring processes have left: each one led a session of its own."""
        while not self._started.empty():
            self._pids.add(self._started.get())
        for pid in list(self._pids):
            if not _is_alive(pid):
                self._pids.discard(pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

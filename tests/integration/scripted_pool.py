# SPDX-License-Identifier: Apache-2.0
"""A pool of agent-loop workers whose trajectories end when a test says so."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from recipe.async_engine.core.gate import GateSettings
from recipe.async_engine.core.ledger import SampleLedger
from recipe.async_engine.record.events import Tell, ignore
from recipe.async_engine.record.timeline import Timeline
from recipe.async_engine.rollout.group_run import (
    SchedulerSettings,
    TrajectoryCancelled,
    TrajectoryRun,
    TrajectoryScored,
)
from recipe.async_engine.rollout.kept_answers import TokenAccount, TrajectoryRecord
from recipe.async_engine.rollout.prompts import PromptSource
from recipe.async_engine.rollout.scheduler import RolloutScheduler

SOON = 10.0


class ScriptedCall:
    """One attempt at a trajectory, which generates and then waits for its reward until a test ends either."""

    def __init__(self, pool: ScriptedPool, run: TrajectoryRun) -> None:
        group, self.avoid = run.of.group, run.worker_id if run.errors else None
        run.key = self.key = f"{group.id}-{run.n}-{len(run.errors)}"
        self.group, self.n, self.attempt, self.alone = group, run.n, len(run.errors), run.is_suspect
        run.worker_id = self.worker_id = next(name for name in ("worker-0", "worker-1") if name != self.avoid)
        run.under_way = True
        self.version = group.start
        self.metric: float | None = None
        self.asked_s = self.tool_s = 0.0
        self.cancelled = False
        self._pool = pool
        self._generated: asyncio.Future = pool.loop.create_future()
        self._rewarded: asyncio.Future = pool.loop.create_future()

    async def go(self, run: TrajectoryRun, sampled: Callable[[], None]) -> None:
        try:
            self._pool.note(self)
            await self._generated
            sampled()
            await self._rewarded
            scored = TrajectoryScored(1.0, self.version, self.version, True, 0, 0, 6, filter_metric=self.metric)
            times = {"asked_s": self.asked_s, "tool_s": self.tool_s}
            run.scored = replace(scored, sampled_tokens=6, received_tokens=6, **times)
            run.payload = f"payload-{self.key}"
        finally:
            run.under_way = False

    def generate(self, version: int | None = None) -> None:
        """Mark its last token as sampled."""
        self.version = self.version if version is None else version
        self._set(self._generated, None)

    def reward(self) -> None:
        self._set(self._rewarded, None)

    def finish(self, version: int | None = None, metric: float | None = None) -> None:
        self.metric = metric
        self.generate(version)
        self.reward()

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` from whatever it waits for next."""
        self._set(self._generated, error)
        self._set(self._rewarded, error)

    def _set(self, future: asyncio.Future, error: BaseException | None) -> None:
        self._pool.loop.call_soon_threadsafe(settle, future, error)


def settle(future: asyncio.Future, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
        future.exception()  # marks the error as retrieved, in case nobody awaits it


class ScriptedPool:
    """Stands for the scheduler's pool of workers; ``answer`` is called with every call that begins.

    ``records`` has what each call was started with; ``kept``, ``over`` and ``account`` are what workers export. Without
    ``cancels_reach``, trajectories do not end when they are cancelled, as if they had ended otherwise before.
    """

    def __init__(self, answer: Callable[[ScriptedCall], None] | None = None) -> None:
        self.alive = 2
        self.cancels_reach = True
        self.calls: list[ScriptedCall] = []
        self.records: dict[str, Any] = {}
        self._assigned: dict[str, ScriptedCall] = {}
        self.kept: dict[str, TrajectoryRecord | None] = {}
        self.over: set[str] = set()
        self.account = TokenAccount()
        self.loop: Any = None
        self._answer = answer
        self._changed = threading.Condition()

    @property
    def lost(self) -> bool:
        return self.alive == 0

    def metrics(self) -> dict[str, float]:
        return {}

    async def close(self, keys: Iterable[str]) -> None:
        await self.cancel(keys)

    def assign(self, run: TrajectoryRun) -> None:
        self.loop = asyncio.get_running_loop()
        call = ScriptedCall(self, run)
        self._assigned[call.key] = call
        self.records[call.key] = run.record

    async def attempt(self, run: TrajectoryRun, sampled: Callable[[], None]) -> None:
        await self._assigned.pop(run.key).go(run, sampled)

    async def export(self, timeout_s: float) -> tuple[dict[str, TrajectoryRecord | None], set[str], TokenAccount]:
        return self.kept, self.over, self.account

    async def close_books(self, timeout_s: float) -> TokenAccount:
        """End what runs, counting 6 tokens for each complete answer and 2 for each unfinished one."""
        under_way = [call for call in self.calls if not call._rewarded.done()]
        complete = [call for call in self.calls if call._rewarded.done() and call._rewarded.exception() is None]
        await self.cancel([call.key for call in under_way])
        unfinished = 2 * len(under_way)
        return TokenAccount(received=6 * len(complete) + unfinished, unfinished=unfinished)

    async def cancel(self, keys: Iterable[str]) -> None:
        named = set(keys)
        for call in self.calls:
            if call.key in named:
                if self.cancels_reach:
                    call.fail(TrajectoryCancelled(call.key))
                with self._changed:
                    call.cancelled = True
                    self._changed.notify_all()

    def note(self, call: ScriptedCall) -> None:
        with self._changed:
            self.calls.append(call)
            self._changed.notify_all()
        if self._answer is not None:
            self._answer(call)

    def began(self, count: int) -> list[ScriptedCall]:
        """Return the calls so far, after waiting for at least ``count``."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.calls) >= count, SOON), f"{len(self.calls)} calls began"
            return list(self.calls)

    def of(self, group_id: int, n: int = 0, attempt: int = 0) -> ScriptedCall:
        with self._changed:
            found = self._changed.wait_for(lambda: self._find(group_id, n, attempt), SOON)
        assert found, f"no call {group_id}-{n}-{attempt} in {[call.key for call in self.calls]}"
        return found

    def saw_cancel(self, call: ScriptedCall) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: call.cancelled, SOON)

    def _find(self, group_id: int, n: int, attempt: int) -> ScriptedCall | None:
        return next((call for call in self.calls if call.key == f"{group_id}-{n}-{attempt}"), None)


def new_ledger(
    b: int = 1, k: int = 1, bound: int = 1, depth: float = 1, target: int | None = None, policy: Any = None
) -> SampleLedger:
    return SampleLedger(GateSettings(b, k, bound, depth), target_groups=target, policy=policy)


def new_scheduler(
    ledger: SampleLedger,
    source: PromptSource,
    pool: ScriptedPool,
    *,
    slots: int = 16,
    group_size: int = 1,
    retries: int = 1,
    failures: int = 2,
    tell: Tell = ignore,
    group_ended: Any = lambda error: None,
    **filtering: Any,
) -> RolloutScheduler:
    ticks = iter(range(10**9))
    settings = SchedulerSettings(group_size, slots, retries, failures, **filtering)
    timeline = Timeline(lambda: float(next(ticks)), slots)
    timeline.listener = tell
    return RolloutScheduler(ledger, source, pool, settings, timeline, group_ended=group_ended)


def settled(scheduler: RolloutScheduler) -> None:
    """Return when the scheduler has processed everything that it was told before."""
    for _ in range(5):
        scheduler.snapshot(SOON)


def wait_until(scheduler: RolloutScheduler, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while True:
        # The scheduler does not notify about every change that a test waits for.
        with scheduler._changed:
            if condition():
                return
            assert time.monotonic() < deadline, scheduler.ledger.counts()
        time.sleep(0.005)

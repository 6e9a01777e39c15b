# SPDX-License-Identifier: Apache-2.0
"""The rollout scheduler of generation in turns.

Contract: as :class:`RolloutScheduler`, with the prompt manager deciding which trajectory generates next. Trajectories
outlive a turn: closing one interrupts them, they keep their tokens, and the next turn lets them go on, oldest deadline
first, before it begins new ones. Taking a batch closes the turn under the same lock, so nothing begins after it.

Shown by tests/integration/test_turn_scheduler.py and tests/e2e/test_partial_rollout.py.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.core.groups import OVERDUE_REASON, Group
from recipe.async_engine.core.ledger import SampleLedger
from recipe.async_engine.core.prompt_manager import PromptManager, Trajectory, TrajectoryState
from recipe.async_engine.core.timeline import Timeline
from recipe.async_engine.rollout.agent_worker import TrajectoryCancelled
from recipe.async_engine.rollout.group_run import GroupRun, SchedulerSettings, Slot
from recipe.async_engine.rollout.kept_answers import TokenAccount
from recipe.async_engine.rollout.prompts import PromptSource
from recipe.async_engine.rollout.scheduler import RolloutScheduler
from recipe.async_engine.rollout.soundness import RewardError
from recipe.async_engine.rollout.workers import TrajectoryCall, WorkerPool


@dataclass
class TurnRun(GroupRun):
    """A live group and the state of its trajectories' attempts.

    attempts: failed ones, by trajectory. avoid: the worker of the last failed one.
    """

    attempts: Counter[int] = field(default_factory=Counter)
    avoid: dict[int, str] = field(default_factory=dict)


class TurnScheduler(RolloutScheduler):
    """See the module's contract. The trainer's thread calls the public methods."""

    def __init__(
        self,
        ledger: SampleLedger,
        source: PromptSource,
        pool: WorkerPool,
        settings: SchedulerSettings,
        timeline: Timeline,
    ) -> None:
        super().__init__(ledger, source, pool, settings, timeline)
        self.manager = PromptManager(ledger, settings.group_size, settings.slots)
        self.interruptions = 0
        self.turn_occupancy = 0.0
        self._turn_began = (0.0, 0.0)
        self._timeline.rollout.set_capacity(0)

    # The trainer's side.

    def open_turn(self) -> None:
        """Begin a generation turn: interrupted trajectories go on, then new ones begin."""
        with self._changed:
            self.manager.open_turn()
            rollout = self._timeline.rollout
            rollout.set_capacity(self._settings.places or self._settings.slots)
            self._turn_began = rollout.offered_seconds, rollout.used_seconds
        self._poke()

    def take_batch(self, timeout_s: float) -> list[GroupRun] | None:
        """As :meth:`RolloutScheduler.take_batch`; the turn is over when it returns."""
        with self._changed:
            try:
                return super().take_batch(timeout_s)
            finally:
                self.interruptions += len(self.manager.close_turn())
                self._account()
                rollout = self._timeline.rollout
                rollout.set_capacity(0)
                offered, used = self._turn_began
                offered, used = rollout.offered_seconds - offered, rollout.used_seconds - used
                self.turn_occupancy = used / offered if offered else 0.0

    def end_turn(self, timeout_s: float) -> Future[TokenAccount]:
        """Have every worker hold its trajectories at their next requests; done when each one does.

        Its result is the account of the turns before: what this one cuts may be on its way still.
        """
        holding = self._pool.end_turn(self.manager.turns, timeout_s)
        return asyncio.run_coroutine_threadsafe(holding, self._loop)

    def _go_on(self, run: TurnRun) -> None:
        self.manager.adopt(run.group, [self._restored(run, n) for n in range(self._settings.group_size)])

    @staticmethod
    def _restored(run: TurnRun, n: int) -> TrajectoryState:
        if run.payloads[n] is not None:
            return TrajectoryState.SAMPLED
        return TrajectoryState.INTERRUPTED if n in run.records else TrajectoryState.PENDING

    def metrics(self) -> dict[str, float]:
        """What the prompt manager holds at this moment, beside the other modes' metrics."""
        with self._changed:
            counts = self.manager.counts()
            turns = {
                "partial_rollout/groups_pending": counts.pending,
                "partial_rollout/groups_interrupted": counts.interrupted,
                "partial_rollout/groups_complete": counts.complete,
                "partial_rollout/trajectories_interrupted": counts.interrupted_trajectories,
                "partial_rollout/interruptions": self.interruptions,
                "partial_rollout/turn_occupancy": self.turn_occupancy,
            }
        return {**super().metrics(), **turns}

    # The event loop's side.

    async def _issue_forever(self) -> None:
        while True:
            self._drop_overdue()
            going_on = []
            while (picked := self._pick()) is not None:
                run, n = picked
                if n in run.calls:
                    going_on.append(run.calls[n])
                else:
                    self._begin(run, n)
            self._pool.resume(going_on, self.manager.turns)
            await self._wake.wait()
            self._wake.clear()

    def _pick(self) -> tuple[TurnRun, int] | None:
        """The next trajectory that may generate now, of a new prompt if none waits."""
        with self._changed:
            trajectory = self.manager.next()
            if trajectory is None and self.manager.wants_prompt():
                prompt = self._next_prompt()
                if prompt is None:
                    return None
                self._new_run(self.manager.issue(prompt.reference), prompt.row)
                trajectory = self.manager.next()
            self._account()
            return None if trajectory is None else (self._runs[trajectory.group_id], trajectory.index)

    def _new_run(self, group: Group, row: dict[str, Any]) -> TurnRun:
        size = self._settings.group_size
        return self._register(TurnRun(group, row, scored=[None] * size, payloads=[None] * size))

    def _begin(self, run: TurnRun, n: int) -> None:
        try:
            call = self._pool.call(
                run.row, run.group, n, run.attempts[n], run.avoid.get(n), run.records.get(n), self.manager.turns
            )
        except RecipeError as error:
            self._trajectory_failed(run, n, error, None)
            return
        run.calls[n] = call
        self._spawn(self._run_call(run, n, call))

    async def _run_call(self, run: TurnRun, n: int, call: TrajectoryCall) -> None:
        """One attempt at a trajectory; its slot is free as soon as its last token is sampled."""
        try:
            await self._follow(call, run, n, Slot(lambda change: self._sampled(run, n)))
        except RecipeError as error:
            self._trajectory_failed(run, n, error, call.worker_id)
        else:
            if not run.unfinished and not run.failed:
                self._failures_in_a_row = 0
                self._change(lambda: self._complete(run))

    def _trajectory_failed(self, run: TurnRun, n: int, error: RecipeError, worker_id: str | None) -> None:
        if run.failed:
            return
        final = isinstance(error, TrajectoryCancelled | RewardError) or worker_id is None
        if not final and run.attempts[n] < self._settings.max_retries and not run.dropped:
            run.attempts[n] += 1
            run.avoid[n] = worker_id
            run.scored[n] = None
            self._change(lambda: self.manager.begin_again(Trajectory(run.group.id, n)))
            return
        run.failed = True
        self._spawn(self._pool.cancel(set(run.keys)))
        if run.dropped:
            self._change(lambda: self._end(run, lambda: self.ledger.filter(run.group.id, OVERDUE_REASON)))
        else:
            self._give_up(run, error)

    def _ready(self, run: GroupRun) -> None:
        oldest = max(run.group.start, run.oldest_version)
        run.group = self.manager.complete(run.group.id, oldest)

    def _end(self, run: GroupRun, transition: Callable[[], Group]) -> None:
        self.manager.forget(run.group.id)
        super()._end(run, transition)
        self._account()

    def _sampled(self, run: TurnRun, n: int) -> None:
        if run.failed:
            return

        def update() -> None:
            self.manager.sampled(Trajectory(run.group.id, n))
            self._account()

        self._change(update)

    # Under the condition variable.

    def _account(self) -> None:
        self._generating = self.manager.running
        self._timeline.rollout.set_running(self._generating)

# SPDX-License-Identifier: Apache-2.0
"""The rollout scheduler: issues prompt groups, spreads their trajectories, hands complete batches to the trainer.

Contract: it decides nothing about staleness. It asks the ledger what may start and what may be trained, and obeys. It
runs in one event loop on a thread of its own, beside the trainer's thread; both reach the ledger under one condition
variable that is never held across a wait for anything else, the data loader included. Everything is driven by events: a
prompt that came, a finished trajectory, a taken batch, a published version. A group gets its generation slots together
with its prompt, so a drain sees every group that was issued; a trajectory frees its slot with its last sampled token,
so rewards never hold one. A failed trajectory is retried on another worker and its siblings are kept; past its retries
the whole group counts as failed, and the run ends when no group has succeeded for ``max_consecutive_failures`` of them.
Payloads stay object references until the trainer fetches its batch. A snapshot, taken while generation goes on, holds
what every unfinished trajectory has been answered; restored from it, no such token is sampled again.

Shown by tests/integration/test_scheduler.py (workers faked below the actor seam) and tests/e2e/test_fully_async.py.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.core.group_filter import FilterCount
from recipe.async_engine.core.groups import (
    NON_FINITE_REASON,
    OVERDUE_REASON,
    UNIFORM_REASON,
    Group,
    GroupState,
    OnNonFinite,
    OnOverdue,
)
from recipe.async_engine.core.ledger import LedgerCounts, SampleLedger
from recipe.async_engine.core.overlap import RewardOverlap
from recipe.async_engine.core.timeline import Timeline
from recipe.async_engine.rollout.agent_worker import (
    TrajectoryCancelled,
    TrajectoryGenerated,
    TrajectoryScored,
)
from recipe.async_engine.rollout.group_run import BatchTimeout, GroupRun, RolloutFailed, SchedulerSettings, Slot
from recipe.async_engine.rollout.kept_answers import InterruptedTokens, TrajectoryRecord
from recipe.async_engine.rollout.prompts import Prompt, PromptFeed, PromptSource
from recipe.async_engine.rollout.soundness import NonFinite, RewardError
from recipe.async_engine.rollout.workers import TrajectoryCall, WorkerPool
from recipe.async_engine.run.stacks import waits
from recipe.async_engine.run.watch import CannotGoOn

logger = logging.getLogger(__name__)

LOOP_S = 60.0
# A worker ends a trajectory that was cancelled, whatever it does, in less (`agent_worker.LAST_MOMENT_S`).
CANCELLED_S = 30.0
# A payload that its worker has handed over is here in less, or lost.
LAST_WORDS_S = 5.0


class RolloutScheduler:
    """See the module's contract. The trainer's thread calls the public methods."""

    def __init__(
        self,
        ledger: SampleLedger,
        source: PromptSource,
        pool: WorkerPool,
        settings: SchedulerSettings,
        timeline: Timeline,
        rescore: bool = False,
    ) -> None:
        """``rescore``: have log-prob servers score each group that waits by the newest version."""
        self.ledger = ledger
        self._prompts = PromptFeed(source, settings.prompt_timeout_s)
        self._pool = pool
        self._settings = settings
        self._timeline = timeline
        self._rescore = rescore
        self._overlap = RewardOverlap(time.monotonic)
        self._changed = threading.Condition()
        self._runs: dict[int, GroupRun] = {}
        self._waiting: deque[GroupRun] = deque()
        self._generating = 0
        self._issuing = self._ending = self._taking = False
        self._failures_in_a_row = 0
        self._filter = FilterCount(ledger.settings.batch_groups, settings.filter_limit)
        self._error: BaseException | None = None
        self.interrupted_trajectories = 0
        self.reprefilled_tokens = 0
        self.recovered_tokens = 0
        self.restored_tokens = 0
        self.tokens = InterruptedTokens()
        self._ends: dict[str, asyncio.Future[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._wake = asyncio.Event()
        self._going_on = asyncio.Event()
        self._tasks: set[asyncio.Task] = set()
        self._thread = threading.Thread(target=self._run_loop, name="rollout-scheduler", daemon=True)

    # The trainer's side.

    def start(self) -> None:
        """Begin to issue groups; restored ones go first."""
        with self._changed:
            self._score(self.ledger.in_state(GroupState.READY))
        self._issuing = True
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End every trajectory and the scheduler's thread."""
        if self._thread.is_alive():
            self._ask(self._stop(), timeout_s)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout_s)

    def take_batch(self, timeout_s: float) -> list[GroupRun] | None:
        """Lease the next batch, oldest groups first; None when no further batch can form, or none is wanted.

        Raises:
            RolloutFailed: generation cannot go on.
            BatchTimeout: nothing was ready in time; the message says what runs and for what version.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._raise_error()
                if self._ending:
                    return None
                if self.ledger.next_batch() is not None:
                    batch = [self._runs[group.id] for group in self.ledger.take()]
                    break
                if self._over():
                    return None
                if (remaining := deadline - time.monotonic()) <= 0:
                    raise BatchTimeout(self._diagnosis(timeout_s))
                self._overlap.wait(True)
                self._changed.wait(remaining)
            self._overlap.wait(False)
        self._poke()
        return batch

    def want_no_more(self) -> None:
        """Whoever waits for a batch, or asks for one from now on, gets None; callable from any thread."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def payloads_lost(self, group_ids: Iterable[int]) -> None:
        """The leased batch cannot be trained: answers of these groups of it are lost, and are generated again."""
        with self._changed:
            self.ledger.return_batch()
            for group_id in group_ids:
                run = self._runs[group_id]
                self.tokens.lost += run.cut_tokens
                run.group = self.ledger.restart(group_id)
                run.scored, run.payloads, run.scores = [None] * len(run.scored), [None] * len(run.payloads), []
                self._go_on(run)
        self._poke()

    def batch_trained(self) -> Any:
        """The leased batch is in the weights; returns the staleness of its groups."""
        with self._changed:
            for group in self.ledger.leased():
                self.tokens.trained += self._runs.pop(group.id).cut_tokens
            staleness = self.ledger.mark_trained()
        self._poke()
        return staleness

    def version_published(self) -> int:
        """Every live replica has committed the next version. Returns it."""
        return self._ask(self._published(), LOOP_S)

    def pause_until_drained(self, timeout_s: float, fill: bool = False) -> None:
        """Wait until no trajectory generates, and issue nothing from then on.

        Args:
            timeout_s: deadline.
            fill: go on issuing while the ledger admits groups, so that the batch under way is complete at this
                version; otherwise issue nothing any more. Where groups are filtered their rewards are waited for, which
                decide whether another one is needed.

        Raises:
            RolloutFailed: generation failed meanwhile.
            BatchTimeout: trajectories still generate after ``timeout_s`` seconds.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._issuing = fill
            while self._generating or (fill and self._may_be_filled()):
                self._raise_error()
                if (remaining := deadline - time.monotonic()) <= 0:
                    raise BatchTimeout(
                        f"{self._generating} trajectories still generate after {timeout_s:g} s of draining before a "
                        f"weight sync, and {self.ledger.counts().running} groups are not complete; raise "
                        "async_training.timeouts.drain, or set async_training.partial_rollout=True "
                        "so that a sync interrupts and resumes them"
                    )
                self._changed.wait(remaining)
            self._issuing = False

    def resume_issuing(self) -> None:
        with self._changed:
            self._issuing = True
        self._poke()

    def snapshot(self, timeout_s: float) -> dict[str, Any]:
        """Ledger, prompt position and live groups as of one moment; payloads are object references.

        Read on the scheduler's own thread while no prompt is taken. What unfinished trajectories have been answered is
        of the moment before, when their workers were asked; generation goes on meanwhile.
        """
        return self._ask(self._snapshot(timeout_s / 2), timeout_s)

    def restore_groups(self, groups: dict[int, dict[str, Any]]) -> None:
        """Adopt the live groups of a checkpoint; call it before :meth:`start`.

        Args:
            groups: by group id, ``row``, ``scored``, ``payloads`` (object references) and ``kept`` (records of
                unfinished trajectories); the last three by trajectory, None where there is nothing.
        """
        for state in (GroupState.READY, GroupState.RUNNING):
            for group in self.ledger.in_state(state):
                saved = groups[group.id]
                run = self._new_run(group, saved["row"])
                run.scored, run.payloads = list(saved["scored"]), list(saved["payloads"])
                run.records = {n: record for n, record in enumerate(saved["kept"]) if record is not None}
                if state is GroupState.RUNNING:
                    self._go_on(run)
                    if not run.unfinished:
                        # Its last payload came as the checkpoint was taken.
                        self._complete(run)

    def _go_on(self, run: GroupRun) -> None:
        """Let what is unfinished of a group that was begun before go on."""
        if run.unfinished:
            self._waiting.append(run)

    def counts(self) -> LedgerCounts:
        """The ledger's counts; callable from any thread."""
        with self._changed:
            return self.ledger.counts()

    def idle_share(self) -> float:
        """Share of the rollout's time so far in which no trajectory generated."""
        with self._changed:
            return self._timeline.rollout_idle_share

    def metrics(self) -> dict[str, float]:
        """What the rollout side does at this moment, and how idle it was since the timeline began."""
        with self._changed:
            counts = self.ledger.counts()
            return {
                "fully_async/rollouter/generating_trajectories": self._generating,
                "fully_async/rollouter/groups_running": counts.running,
                "fully_async/rollouter/groups_ready": counts.ready,
                **self._pool.metrics(),
                "fully_async/rollouter/idle_ratio": self._timeline.rollout_idle_share,
                "fully_async/rollouter/occupancy": self._timeline.rollout_occupancy,
                "fully_async/rewards/scoring": self._overlap.scoring,
                "fully_async/rewards/seconds": self._overlap.seconds,
                "fully_async/rewards/hidden_share": self._overlap.hidden_share,
                "fully_async/partial/interrupted_trajectories": self.interrupted_trajectories,
                "fully_async/partial/reprefilled_tokens": self.reprefilled_tokens,
                "fully_async/partial/recovered_tokens": self.recovered_tokens,
                "fully_async/partial/restored_tokens": self.restored_tokens,
                "fully_async/ledger/filtered_uniform": counts.filtered_by_reason.get(UNIFORM_REASON, 0),
                "fully_async/ledger/non_finite": counts.filtered_by_reason.get(NON_FINITE_REASON, 0)
                + counts.failed_by_reason.get(NON_FINITE_REASON, 0),
            }

    # The event loop's side.

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._spawn(self._issue_forever())
        self._loop.run_forever()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.fail(task.exception())

    def describe(self) -> list[str]:
        """Lines: what runs, and where the coroutines wait. Without the lock: whoever stands still may have it."""
        return [self._state(), *(f"tasks: {line}" for line in waits(self._loop))]

    def fail(self, error: BaseException) -> None:
        """Whoever waits for a batch gets this error; callable from any thread."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _poke(self) -> None:
        """Something changed that may let a group start, or an attempt; callable from any thread."""
        self._loop.call_soon_threadsafe(self._wake.set)
        self._loop.call_soon_threadsafe(self._going_on.set)

    def _ask(self, work: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        """What ``work`` returns, done on the scheduler's thread; callable from any other."""
        answer = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            answer.cancel()
            raise RolloutFailed(
                f"the rollout scheduler did not answer within {timeout_s:g} s: {self._state()}"
            ) from None

    def _change(self, update: Callable[[], Any]) -> Any:
        """Apply ``update`` to the ledger, then tell both threads."""
        with self._changed:
            result = update()
            self._changed.notify_all()
        self._wake.set()
        return result

    async def _issue_forever(self) -> None:
        while True:
            self._drop_overdue()
            while (run := self._next_run()) is not None:
                self._spawn(self._run_group(run))
            await self._wake.wait()
            self._wake.clear()

    def _next_run(self) -> GroupRun | None:
        """The next group that may start now, its slots taken: restored ones first, then the next prompt."""
        with self._changed:
            wanted = len(self._waiting[0].unfinished) if self._waiting else self._settings.group_size
            if not self._issuing or self._settings.slots - self._generating < wanted:
                return None
            if self._waiting:
                run = self._waiting.popleft()
            elif self.ledger.can_issue() and (prompt := self._next_prompt()) is not None:
                run = self._new_run(self.ledger.issue(prompt.reference), prompt.row)
            else:
                return None
            self._count_generating(wanted)
            return run

    def _next_prompt(self) -> Prompt | None:
        """The next prompt if it is here; otherwise it is taken, and whoever issues is woken."""
        prompt = self._prompts.pop()
        if prompt is None and self._prompts.left and not self._taking:
            self._taking = True
            self._spawn(self._take_prompt())
        return prompt

    async def _take_prompt(self) -> None:
        try:
            await self._prompts.take()
        finally:
            self._taking = False
        self._change(lambda: None)

    def _new_run(self, group: Group, row: dict[str, Any]) -> GroupRun:
        size = self._settings.group_size
        return self._register(GroupRun(group, row, scored=[None] * size, payloads=[None] * size))

    def _register(self, run: Any) -> Any:
        self._runs[run.group.id] = run
        if run.group.state is GroupState.RUNNING:
            self._filter.issued(run.group.id)
        return run

    async def _run_group(self, run: GroupRun) -> None:
        tasks = [asyncio.create_task(self._run_trajectory(run, n)) for n in run.unfinished]
        try:
            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            raise
        error = next((task.exception() for task in done if task.exception() is not None), None)
        if error is None:
            self._failures_in_a_row = 0
            self._change(lambda: self._complete(run))
            return
        run.failed = True
        self._going_on.set()
        await self._pool.cancel(run.keys)
        if pending:
            _, pending = await asyncio.wait(pending, timeout=CANCELLED_S)
        if pending:
            logger.error("%d trajectories of prompt group %s do not end: they are given up", len(pending), run.group.id)
            for task in pending:
                task.cancel()
            await asyncio.wait(pending)
        if run.dropped:
            self._change(lambda: self._end(run, lambda: self.ledger.filter(run.group.id, OVERDUE_REASON)))
            return
        self._give_up(run, error)

    def _give_up(self, run: GroupRun, error: BaseException) -> None:
        logger.error("prompt group %s failed for good", run.group.prompt, exc_info=error)
        reason = NON_FINITE_REASON if isinstance(error, NonFinite) else type(error).__name__
        drops = reason == NON_FINITE_REASON and self._settings.on_non_finite is OnNonFinite.DROP
        end = self.ledger.filter if drops else self.ledger.fail
        self._change(lambda: self._end(run, lambda: end(run.group.id, reason)))
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= self._settings.max_consecutive_failures or self._pool.lost:
            failed = RolloutFailed(
                f"{self._failures_in_a_row} prompt groups failed in a row and none succeeded, the last one "
                f"({run.group.prompt}) with: {error}"
            )
            failed.__cause__ = error
            self.fail(failed)

    def _complete(self, run: GroupRun) -> None:
        """Every answer of the group is there, with its reward."""
        self._count_parts(run)
        kept = not (self._settings.filter_groups and run.is_uniform)
        self._filter.ended(run.group.id, kept)
        if kept:
            self._ready(run)
        else:
            self._end(run, lambda: self.ledger.filter(run.group.id, UNIFORM_REASON))
        if self._filter.exceeded:
            self.fail(
                RolloutFailed(
                    f"{self._settings.filter_limit} prompt groups were filtered for one batch "
                    "(algorithm.filter_groups.max_num_gen_batches): "
                    "the answers to each prompt all got the same reward. Look at the reward and at how hard the "
                    "prompts are, or raise the setting; 0 is for no limit"
                )
            )

    def _ready(self, run: GroupRun) -> None:
        run.group = self.ledger.mark_ready(run.group.id, max(run.group.start, run.oldest_version))
        self._score([run.group])

    def _count_parts(self, run: GroupRun) -> None:
        for scored in run.scored:
            self.interrupted_trajectories += scored.interruptions > 0
            self.reprefilled_tokens += scored.reprefilled_tokens
            self.recovered_tokens += scored.recovered_tokens
            self.restored_tokens += scored.restored_tokens

    def _end(self, run: GroupRun, transition: Callable[[], Group]) -> None:
        transition()
        self._filter.forget(run.group.id)
        del self._runs[run.group.id]
        # Of the trajectories under way, their workers count them.
        waiting = [record.cut_tokens for n, record in run.records.items() if n not in run.calls]
        self.tokens.lost += run.cut_tokens + sum(waiting)

    async def _run_trajectory(self, run: GroupRun, n: int) -> None:
        """One trajectory with its retries; its generation slot is free as soon as its last token is sampled."""
        slot = Slot(self._count_generating)
        avoid: str | None = None
        try:
            for attempt in range(1 + self._settings.max_retries):
                await self._hold(slot, run)
                call = self._pool.call(run.row, run.group, n, attempt, avoid, run.records.get(n))
                try:
                    await self._follow(call, run, n, slot)
                    return
                except (TrajectoryCancelled, RewardError):
                    raise
                except RecipeError as error:
                    if attempt == self._settings.max_retries or run.dropped or run.failed:
                        raise
                    avoid = call.worker_id
                    logger.warning("trajectory %s failed and is tried again: %s", call.key, error)
        finally:
            slot.free()

    async def _hold(self, slot: Slot, run: GroupRun) -> None:
        """Have the slot for the next attempt. One that gave it back waits, like a new group, while a drain goes on."""
        while True:
            with self._changed:
                if run.failed or run.dropped:
                    raise TrajectoryCancelled(f"group {run.group.id} was given up")
                if self._issuing or slot.held:
                    slot.hold()
                    return
                self._going_on.clear()
            await self._going_on.wait()

    async def _follow(self, call: TrajectoryCall, run: GroupRun, n: int, slot: Slot) -> None:
        """Take in what a trajectory yields."""
        scoring = False
        run.calls[n] = call
        self._ends[call.key] = self._loop.create_future()
        try:
            async for event, payload in call.events():
                self._timeline.note("a trajectory's event")
                if event is None:
                    run.payloads[n] = payload
                    continue
                slot.free()
                if isinstance(event, TrajectoryGenerated):
                    scoring = True
                    self._count_scoring(1)
                elif isinstance(event, TrajectoryScored):
                    run.scored[n] = event
        finally:
            if scoring:
                self._count_scoring(-1)
            del run.calls[n]
            # The worker has counted its tokens, whatever became of them.
            run.records.pop(n, None)
            self._ends.pop(call.key).set_result(None)

    def _count_scoring(self, change: int) -> None:
        with self._changed:
            self._overlap.change(scoring=change)

    def _count_generating(self, change: int) -> None:
        with self._changed:
            self._generating += change
            self._overlap.change(generating=change)
            self._timeline.rollout.set_running(self._generating)
            self._changed.notify_all()
        self._wake.set()

    def _drop_overdue(self) -> None:
        if self._settings.on_overdue is not OnOverdue.DROP:
            return
        with self._changed:
            overdue = [self._runs[group.id] for group in self.ledger.overdue()]
        for run in overdue:
            if not run.dropped:
                run.dropped = True
                self._going_on.set()
                self._spawn(self._pool.cancel(run.keys))

    async def _snapshot(self, timeout_s: float) -> dict[str, Any]:
        told = await self._pool.export(timeout_s)
        # Payloads that their workers had handed over already.
        last_words = [self._ends[key] for key in told.over if key in self._ends]
        if last_words:
            await asyncio.wait(last_words, timeout=LAST_WORDS_S)
        async with self._prompts.standstill() as position:
            with self._changed:
                groups = {
                    group_id: {
                        "row": run.row,
                        "scored": list(run.scored),
                        "payloads": list(run.payloads),
                        "kept": self._kept(run, told.records),
                    }
                    for group_id, run in self._runs.items()
                }
                records = [record for saved in groups.values() for record in saved["kept"] if record is not None]
                tokens = self.tokens.with_workers(told.account)
                tokens.cut += sum(record.under_way_tokens for record in records)
                complete = sum(run.cut_tokens for run in self._runs.values())
                cached = complete + sum(record.cut_tokens for record in records)
                return {
                    "ledger": self.ledger.snapshot(),
                    "source": position,
                    "groups": groups,
                    "interrupted_tokens": vars(tokens) | {"cached": cached},
                }

    @staticmethod
    def _kept(run: GroupRun, told: dict[str, TrajectoryRecord | None]) -> list[TrajectoryRecord | None]:
        """What is kept of each trajectory of a group, None if it is complete or nothing is.

        One that no worker told of keeps what it began with.
        """
        keys = {n: call.key for n, call in run.calls.items()}
        known = {n: told[keys[n]] if keys.get(n) in told else run.records.get(n) for n in run.unfinished}
        return [known.get(n) for n in range(len(run.payloads))]

    async def _published(self) -> int:
        with self._changed:
            version = self.ledger.publish()
            self._score(self.ledger.in_state(GroupState.READY))
        self._wake.set()
        return version

    async def _stop(self) -> None:
        with self._changed:
            self._issuing = False
        self._prompts.close()
        keys = {key for run in self._runs.values() for key in run.keys}
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(self._pool.close(keys), *tasks, return_exceptions=True)

    # Under the condition variable.

    def _score(self, groups: Iterable[Group]) -> None:
        """Have the log-prob servers score ready groups by the newest version, those first that are trained first."""
        if not self._rescore:
            return
        for group in sorted(groups, key=lambda group: (group.start, group.id)):
            run = self._runs[group.id]
            run.scores = [self._pool.rescore(payload, self.ledger.version, group.start) for payload in run.payloads]

    def _raise_error(self) -> None:
        if self._error is not None:
            if isinstance(self._error, RolloutFailed | CannotGoOn):
                raise self._error
            raise RolloutFailed(f"the rollout ended with {type(self._error).__name__}: {self._error}") from self._error

    def _may_be_filled(self) -> bool:
        """Whether the batch under way is missing groups, or may turn out to."""
        if self._waiting or (self.ledger.can_issue() and self._prompts.left):
            return True
        return self._settings.filter_groups and bool(self.ledger.in_state(GroupState.RUNNING))

    def _over(self) -> bool:
        """Whether no further batch can form."""
        return not self.ledger.batch_possible(self._prompts.left)

    def _diagnosis(self, timeout_s: float) -> str:
        return (
            f"no training batch became ready within {timeout_s:g} s (async_training.timeouts.batch_wait) at version "
            f"{self.ledger.version}: {self._state()}"
        )

    def _state(self) -> str:
        counts = self.ledger.counts()
        running = self.ledger.in_state(GroupState.RUNNING)
        oldest = min(running, key=lambda group: (group.start, group.id), default=None)
        return (
            f"{counts.running} groups run ({self._generating} trajectories generate, "
            f"the others wait for their reward), {counts.ready} are ready, {len(self._waiting)} wait for a slot; "
            f"the oldest running group is {oldest}; agent-loop workers alive: {self._pool.alive}"
        )

# SPDX-License-Identifier: Apache-2.0
"""The rollout scheduler: issues prompt groups, spreads their trajectories, hands complete batches to the trainer.

Contract: it decides nothing about staleness. It asks the ledger what may start and what may be trained, and obeys. It
runs in one event loop on a thread of its own, beside the trainer's thread; both reach the ledger under one lock, which
is never held across a wait for anything else, the data loader included. Everything is driven by events: a prompt that
came, a finished trajectory, a taken batch, a published version. An event costs the same whatever is live, and wakes the
trainer's thread only when there is what it waits for. A trajectory frees its slot with its last
sampled token, so rewards never hold one. A failed trajectory is retried on another worker and its siblings are kept;
past its retries the whole group counts as failed, and the run ends when no group has succeeded for
``max_consecutive_failures`` of them. Payloads stay object references until the trainer fetches its batch. A snapshot,
taken while generation goes on, holds what every unfinished trajectory has been answered; restored from it, no such
token is sampled again.

Which prompt begins, which trajectory generates next and which batch is taken is the admission policy's to say. In
turns, taking a batch closes the turn under the same lock, so nothing begins after it; trajectories outlive the turn,
keep their slots and their tokens, wait at their client, and go on in the next one.

Shown by tests/integration/test_scheduler.py and test_turn_scheduler.py (workers faked below the actor seam),
tests/e2e/test_fully_async.py and test_partial_rollout.py.
"""

import asyncio
import copy
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from operator import attrgetter
from typing import Any

from recipe.async_engine.actors.stacks import waits
from recipe.async_engine.core.alarms import AlarmLimit
from recipe.async_engine.core.deadlines import HANDED_OVER_S, SCHEDULER_S
from recipe.async_engine.core.errors import CannotGoOn, RecipeError
from recipe.async_engine.core.groups import (
    NON_FINITE_REASON,
    UNIFORM_REASON,
    FilterCount,
    Group,
    GroupState,
    LedgerCounts,
    OnNonFinite,
    Prompt,
)
from recipe.async_engine.core.ledger import SampleLedger
from recipe.async_engine.core.prompt_manager import PromptManager, Slots, Trajectory
from recipe.async_engine.record.events import Event, TokenBooks
from recipe.async_engine.record.timeline import Timeline
from recipe.async_engine.rollout.group_run import (
    GroupRun,
    RolloutFailed,
    SchedulerSettings,
    TrajectoryRun,
)
from recipe.async_engine.rollout.kept_answers import TokenAccount, TokenFlow
from recipe.async_engine.rollout.loop_output import NonFinite
from recipe.async_engine.rollout.loop_thread import Changes, LoopThread
from recipe.async_engine.rollout.prompts import PromptFeed, PromptSource, failure_of
from recipe.async_engine.rollout.run_events import of_attempt, of_group
from recipe.async_engine.rollout.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

PORTION, PAUSE_S = 1_024, 0.001
"""How many trajectories begin before whoever waits for the scheduler has its turn, and for how long."""
TRAINED_FIRST = attrgetter("start", "id")
"""Key by which groups are sorted."""


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
        group_ended: Callable[[BaseException | None], AlarmLimit | None] = lambda error: None,
    ) -> None:
        """``rescore``: have log-prob servers score each group that waits by the newest version.

        ``timeline``: is told what becomes of trajectories and groups. ``group_ended``: is told of each group that is
        complete (None) or failed for good (its error), and returns what the run is to end with, if anything.
        """
        self.ledger = ledger
        self.manager = PromptManager(ledger, settings.group_size, settings.slots, stream=not settings.turns)
        self._slots = Slots(settings.slots, settings.slots_with_tools or settings.slots)
        self._prompts = PromptFeed(source, settings.prompt_timeout_s, ledger.policy)
        self._pool = pool
        self._settings = settings
        self._timeline = timeline
        self._books = timeline.rollout
        if settings.turns:
            self._books.wait_for_turns()
        self._rescore = rescore
        self._group_ended = group_ended
        self._closing = False
        self._changed = Changes()
        self._runs: dict[int, GroupRun] = {}
        self._ending = self._taking = False
        self._failures_in_a_row = 0
        self._filter = FilterCount(ledger.settings.batch_groups, settings.filter_limit)
        self._error: BaseException | None = None
        self.tokens = TokenAccount()
        self._ends: dict[str, asyncio.Future[None]] = {}
        self._wake = asyncio.Event()
        self._thread = LoopThread("rollout-scheduler", self.fail)

    # The trainer's side.

    def start(self) -> None:
        """Begin, a stream with issuing groups; restored ones go first."""
        with self._changed:
            self._score(self.ledger.in_state(GroupState.READY))
            if self.manager.stream:
                self.manager.open_turn()
            self._account()
        self._thread.start(self._issue_forever())

    def stop(self, timeout_s: float) -> None:
        """End every trajectory and the scheduler's thread."""
        if self._thread.is_alive:
            self._ask(self._stop(), timeout_s)
            self._thread.stop(timeout_s)

    def close_books(self, engine_tokens: Callable[[], dict[str, int] | None], timeout_s: float) -> TokenBooks:
        """End every trajectory, for good, and say what became of every token of this start.

        ``engine_tokens``: counts of all engines together, of now; None if one of them cannot say.
        """
        before = engine_tokens()
        workers = self._ask(self._end_trajectories(timeout_s / 2), timeout_s) if self._thread.is_alive else None
        engines = engine_tokens()
        with self._changed:
            live = sum(run.sampled_tokens for run in self._runs.values())
            return self._books.close(live, None if workers is None else vars(workers), before, engines)

    def open_turn(self) -> None:
        """Begin a generation turn: interrupted trajectories go on, then new ones begin. A drained stream goes on."""
        with self._changed:
            self.manager.open_turn()
            if self._settings.turns:
                self._books.begin_turn()
        if self._settings.turns:
            self._thread.submit(self._pool.go_on())
        self._poke()

    def take_batch(self, timeout_s: float) -> list[GroupRun] | None:
        """Lease the next batch, oldest groups first; None when no further batch can form, or none is wanted.

        A turn is over when it returns.

        Raises:
            RolloutFailed: generation cannot go on, or nothing was ready in time; the message says what runs.
        """
        with self._changed:
            try:
                batch = self._wait_for_batch(timeout_s)
            finally:
                self._books.set(waiting=False)
                if self._settings.turns:
                    self._books.end_turn(self.manager.close_turn())
                self._account()
        self._poke()
        return batch

    def _wait_for_batch(self, timeout_s: float) -> list[GroupRun] | None:
        if not self._batch_is_decided():
            self._books.set(waiting=True)
            self._account()
        in_time = self._changed.wait_until(self._batch_is_decided, time.monotonic() + timeout_s)
        self._raise_error()
        if self._ending:
            return None
        if self.ledger.may_take():
            return [self._runs[group.id] for group in self.ledger.take()]
        if not in_time:
            raise RolloutFailed(self._diagnosis(timeout_s))
        return None

    def _batch_is_decided(self) -> bool:
        """Whether a batch may be taken, or none will come; on whichever thread something has changed."""
        try:
            return self._error is not None or self._ending or self.ledger.may_take() or self._over()
        except RecipeError as error:  # of the admission policy
            self._error = error
            return True

    def end_turn(self, timeout_s: float) -> Future[TokenAccount]:
        """Have every worker hold its trajectories' requests from now on; done when each one does.

        Its result is the account of the turns before: what this one cuts may be on its way still.
        """
        return self._thread.submit(self._pool.hold(timeout_s))

    def want_no_more(self) -> None:
        """Whoever waits for a batch, or asks for one from now on, gets None; callable from any thread."""
        with self._changed:
            self._ending = True
            self._changed.made()

    def payloads_lost(self, group_ids: Iterable[int]) -> None:
        """The leased batch cannot be trained: answers of these groups of it are lost, and are generated again."""
        with self._changed:
            self.ledger.return_batch()
            for group_id in group_ids:
                run = self._runs[group_id]
                self.tokens.lost += run.cut_tokens
                self._books.tokens["cut"] += run.sampled_tokens
                run.group = self.ledger.restart(group_id)
                run.begin_anew()
                self.manager.adopt(run.group, run.states)
        self._poke()

    def batch_trained(self) -> Any:
        """The leased batch is in the weights; returns the staleness of its groups."""
        with self._changed:
            for group in self.ledger.leased():
                run = self._runs.pop(group.id)
                self.tokens.trained += run.cut_tokens
                self._tell_all(of_group(run, group, self.ledger.version))
            staleness = self.ledger.mark_trained()
        self._poke()
        return staleness

    def version_sealed(self) -> int:
        """The trainer goes on from the next version. Returns it."""
        with self._changed:
            version = self.ledger.seal()
        self._poke()
        return version

    def version_announced(self) -> int:
        """Every live replica has committed the sealed version. Returns it."""
        return self._ask(self._announced(), SCHEDULER_S)

    def pause_until_drained(self, timeout_s: float, fill: bool = False) -> None:
        """Wait until no trajectory of a stream generates, and issue nothing from then on, until :meth:`open_turn`.

        Args:
            timeout_s: deadline.
            fill: go on issuing while the ledger admits groups, so that the batch under way is complete at this
                version; otherwise issue nothing any more. Where groups are filtered their rewards are waited for, which
                decide whether another one is needed.

        Raises:
            RolloutFailed: generation failed meanwhile, or trajectories still generate after ``timeout_s`` seconds.
        """

        def drained() -> bool:
            return not (self.manager.running or (fill and self._may_be_filled()))

        with self._changed:
            if not fill:
                self.manager.drain()
                self._account()
            deadline = time.monotonic() + timeout_s
            in_time = self._changed.wait_until(lambda: self._error is not None or drained(), deadline)
            if not drained():
                self._raise_error()
            if not in_time:
                raise RolloutFailed(
                    f"{self.manager.running} trajectories still generate after {timeout_s:g} s of draining before "
                    f"a weight sync, and {self.ledger.counts().running} groups are not complete; raise "
                    "async_training.timeouts.trajectory, or set async_training.weights.at_swap=interrupt "
                    "so that a sync interrupts and resumes them"
                )
            self.manager.drain()
            self._account()

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
                run = self._register(group, saved["row"])
                of_each = zip(run.trajectories, saved["scored"], saved["payloads"], saved["kept"], strict=True)
                for each, scored, payload, record in of_each:
                    each.scored, each.payload, each.record = scored, payload, record
                self._books.tokens["restored"] += run.sampled_tokens
                if state is GroupState.RUNNING:
                    self.manager.adopt(group, run.states)
                    if run.is_complete:
                        # Its last payload came as the checkpoint was taken.
                        self._complete(run)

    def counts(self) -> LedgerCounts:
        """The ledger's counts; callable from any thread."""
        with self._changed:
            return self.ledger.counts()

    def metrics(self) -> dict[str, float]:
        """What the rollout side does at this moment, and how idle it was since the timeline began."""
        with self._changed:
            did = self._books.metrics(self.ledger.counts(), self.manager.counts())
            return {"fully_async/rollouter/slots": self.manager.slots, **self._pool.metrics(), **did}

    # The event loop's side.

    def describe(self) -> list[str]:
        """Lines: what runs, and where the coroutines wait. Without the lock: whoever stands still may have it."""
        return [self._state(), *(f"tasks: {line}" for line in waits(self._thread.loop))]

    def fail(self, error: BaseException) -> None:
        """Whoever waits for a batch gets this error; callable from any thread."""
        with self._changed:
            self._error = self._error or error
            self._changed.made()

    def _poke(self) -> None:
        """Something changed that may let a trajectory begin or go on; callable from any thread."""
        self._thread.loop.call_soon_threadsafe(self._wake.set)

    def _ask(self, work: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        """What ``work`` returns, done on the scheduler's thread; callable from any other."""
        answer = self._thread.submit(work)
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            answer.cancel()
            raise RolloutFailed(
                f"the rollout scheduler did not answer within {timeout_s:g} s: {self._state()}"
            ) from None

    def _change(self, update: Callable[[], Any]) -> Any:
        """Apply ``update`` to the ledger, then tell this thread, and others for which it makes a difference."""
        with self._changed:
            result = update()
            self._account()
            self._changed.made()
        self._wake.set()
        return result

    async def _issue_forever(self) -> None:
        while True:
            while self._issue_some():
                # Whoever waits for this loop, or for the lock, which is not a fair one, has its turn.
                await asyncio.sleep(PAUSE_S)
            await self._wake.wait()
            self._wake.clear()

    def _issue_some(self) -> bool:
        """Let about `PORTION` trajectories begin; returns whether there may be more."""
        with self._changed:
            picks = self.manager.picks(self._issue_next, PORTION)
            picked = [self._runs[trajectory.group_id].trajectories[trajectory.index] for trajectory in picks]
            self._account()
            self._changed.made()
        for each in picked:
            if not each.of.given_up:
                self._begin(each)
        return len(picked) >= PORTION

    def _issue_next(self) -> bool:
        """Issue a group for the next prompt, if that is here."""
        prompt = self._next_prompt()
        if prompt is not None:
            self._register(self.manager.issue(prompt.reference), prompt.row)
        return prompt is not None

    def _next_prompt(self) -> Prompt | None:
        """The next prompt if it is here; others are taken, and whoever issues is woken."""
        prompt = self._prompts.pop()
        if self._prompts.is_short and not self._taking:
            self._taking = True
            self._thread.spawn(self._take_prompts())
        return prompt

    async def _take_prompts(self) -> None:
        try:
            while self._prompts.is_short:
                await self._prompts.take()
                self._change(lambda: None)
        finally:
            self._taking = False

    def _register(self, group: Group, row: dict[str, Any]) -> GroupRun:
        run = self._runs[group.id] = GroupRun(group, row, self._settings.group_size)
        if group.state is GroupState.RUNNING:
            self._filter.issued(group.id)
        return run

    def _begin(self, each: TrajectoryRun) -> None:
        """Make the next attempt at a trajectory, which has a slot."""
        try:
            if (failed := failure_of(each.of.row)) is not None:
                raise failed
            self._pool.assign(each)
        except RecipeError as error:
            self._give_up(each.of, error)
        else:
            self._thread.spawn(self._attempt(each))

    async def _attempt(self, each: TrajectoryRun) -> None:
        run = each.of
        try:
            await self._follow(each)
        except RecipeError as error:
            self._attempt_failed(each, error)
        else:
            if run.is_complete and not run.given_up:
                self._failures_in_a_row = 0
                self._group_ended(None)
                self._change(lambda: self._complete(run))

    def _attempt_failed(self, each: TrajectoryRun, error: RecipeError) -> None:
        if each.of.given_up or self._closing:
            return
        each.errors.append(error)
        if not each.may_try_again(self._settings.max_retries):
            self._give_up(each.of, error)
            return
        logger.warning("trajectory %s failed and is tried again: %s", each.key, error)
        if self._change(lambda: self.manager.begin_again(Trajectory(each.of.group.id, each.n))):
            self._begin(each)

    def _give_up(self, run: GroupRun, error: BaseException) -> None:
        logger.error("prompt group %s failed for good", run.group.prompt, exc_info=error)
        reason = NON_FINITE_REASON if isinstance(error, NonFinite) else type(error).__name__
        drops = reason == NON_FINITE_REASON and self._settings.on_non_finite is OnNonFinite.DROP
        self._abandon(run, self.ledger.filter if drops else self.ledger.fail, reason)
        self._failures_in_a_row += 1
        if not drops and (past := self._group_ended(error)) is not None:
            self.fail(past)
        if self._pool.lost or self._nothing_succeeds(run.group.id):
            failed = RolloutFailed(
                f"{self._failures_in_a_row} prompt groups failed in a row and none succeeded, the last one "
                f"({run.group.prompt}) with: {error}"
            )
            failed.__cause__ = error
            self.fail(failed)

    def _nothing_succeeds(self, last: int) -> bool:
        """Whether as many groups as may have failed in a row, and none from before the last of them still runs.

        What fails at once would else be ahead of all that takes its time to succeed.
        """
        if self._failures_in_a_row < self._settings.max_consecutive_failures:
            return False
        return not any(not (run.is_complete or run.given_up) for group, run in self._runs.items() if group < last)

    def _abandon(self, run: GroupRun, end: Callable[[int, str], Group], reason: str) -> None:
        """Leave a group out that is not complete; what is under way of it is ended."""
        run.given_up = True
        self._thread.spawn(self._pool.cancel(run.keys))
        self._change(lambda: self._end(run, end, reason))

    def _complete(self, run: GroupRun) -> None:
        """Every answer of the group is there, with its reward."""
        self._books.completed(run.complete)
        kept = not (self._settings.filter_groups and run.is_uniform)
        self._filter.ended(run.group.id, kept)
        run.ready_at = time.monotonic()
        if kept:
            run.group = self.manager.complete(run.group.id, max(run.group.start, run.oldest_version))
            self._score([run.group])
        else:
            self._end(run, self.ledger.filter, UNIFORM_REASON)
        if self._filter.exceeded:
            self.fail(
                RolloutFailed(
                    f"{self._settings.filter_limit} prompt groups were filtered for one batch "
                    "(algorithm.filter_groups.max_num_gen_batches): "
                    "the answers to each prompt all got the same reward. Look at the reward and at how hard the "
                    "prompts are, or raise the setting; 0 is for no limit"
                )
            )

    def _end(self, run: GroupRun, end: Callable[[int, str], Group], reason: str) -> None:
        self.manager.forget(run.group.id)
        group = end(run.group.id, reason)
        self._filter.forget(run.group.id)
        del self._runs[run.group.id]
        self._tell_all(of_group(run, group, self.ledger.version, reason))
        # Of the trajectories under way, their workers count them.
        records = [each.record for each in run.trajectories if not each.under_way]
        self.tokens.lost += run.cut_tokens + sum(record.cut_tokens for record in records if record is not None)

    async def _follow(self, each: TrajectoryRun) -> None:
        """Make an attempt and take in what it brings; its slot is free as soon as its last token is sampled."""
        run, began = each.of, time.monotonic()
        sampled_at: float | None = None
        scoring = False
        self._ends[each.key] = over = self._thread.loop.create_future()

        def is_sampled() -> None:
            nonlocal sampled_at
            sampled_at = time.monotonic()
            if not run.given_up:
                self._change(lambda: self.manager.sampled(Trajectory(run.group.id, each.n)))

        def is_scored_now() -> None:
            nonlocal scoring
            scoring = True
            is_sampled()
            self._count_scoring(1)

        try:
            await self._pool.attempt(each, is_scored_now)
            self._timeline.note("a trajectory's end")
            if sampled_at is None:
                is_sampled()
            self._take_in(each)
        finally:
            if scoring:
                self._count_scoring(-1)
            self._tell_all(of_attempt(run, each.n, began, sampled_at))
            # The worker has counted its tokens, whatever became of them.
            each.record = None
            del self._ends[each.key]
            over.set_result(None)

    def _use_slots(self, count: int) -> None:
        if count != self.manager.slots:
            self._change(lambda: setattr(self.manager, "slots", count))

    def _take_in(self, each: TrajectoryRun) -> None:
        """The trajectory is complete, with its reward."""
        scored = each.scored
        assert scored is not None
        self._use_slots(self._slots.ended(scored.asked_s, scored.tool_s))
        with self._changed:
            self._books.arrived(scored, not each.of.given_up)
            if each.of.given_up:
                # It was complete before its worker heard that its group is not wanted.
                self.tokens.lost += scored.cut_tokens

    def _count_scoring(self, change: int) -> None:
        with self._changed:
            self._books.set(scoring=self._books.scoring + change)
            self._account()

    async def _snapshot(self, timeout_s: float) -> dict[str, Any]:
        told = await self._pool.export(timeout_s)
        # Payloads that their workers had handed over already.
        last_words = [self._ends[key] for key in told.over if key in self._ends]
        if last_words:
            await asyncio.wait(last_words, timeout=HANDED_OVER_S)
        async with self._prompts.standstill() as position:
            with self._changed:
                kept = {
                    group_id: [each.kept(told.records) for each in run.trajectories]
                    for group_id, run in self._runs.items()
                }
                groups = {
                    group_id: {
                        "row": run.row,
                        "scored": [each.scored for each in run.trajectories],
                        "payloads": run.payloads,
                        "kept": kept[group_id],
                    }
                    for group_id, run in self._runs.items()
                }
                records = [record for of_group in kept.values() for record in of_group if record is not None]
                tokens = self.tokens + told.account
                tokens.cut += sum(record.under_way_tokens for record in records)
                complete = sum(run.cut_tokens for run in self._runs.values())
                cached = complete + sum(record.cut_tokens for record in records)
                return {
                    "ledger": self.ledger.snapshot(),
                    # The loader may go on with what it has told.
                    "source": copy.deepcopy(position),
                    "groups": groups,
                    "interrupted_tokens": {
                        "cut": tokens.cut,
                        "trained": tokens.trained,
                        "lost": tokens.lost,
                        "cached": cached,
                    },
                }

    async def _announced(self) -> int:
        with self._changed:
            version = self.ledger.announce()
            self._books.end_version()
            ready = self.ledger.in_state(GroupState.READY) if self._rescore else ()
        self._wake.set()
        # Whoever announces a version waits for this, and takes no batch meanwhile.
        for group in sorted(ready, key=TRAINED_FIRST):
            with self._changed:
                self._score([group])
            await asyncio.sleep(0)
        return version

    async def _end_trajectories(self, timeout_s: float) -> TokenFlow | None:
        """What all workers say of their tokens; None if one cannot, or has died before."""
        self._closing = True
        with self._changed:
            self.manager.drain()
        flow = await self._pool.close_books(timeout_s)
        if self._ends:
            await asyncio.wait(list(self._ends.values()), timeout=HANDED_OVER_S)
        return flow

    async def _stop(self) -> None:
        with self._changed:
            self.manager.drain()
        keys = {key for run in self._runs.values() for key in run.keys}
        await asyncio.gather(self._pool.close(keys), self._thread.end_tasks(), return_exceptions=True)

    # Under the condition variable.

    def _account(self) -> None:
        self._books.set(running=self.manager.generating)
        waits = self._books.waits_for_rewards
        self._books.lane.turn_to(self.manager.why(bool(self._prompts.left), waits))

    def _tell_all(self, events: Iterable[Event]) -> None:
        for event in events:
            self._timeline.tell(event)

    def _score(self, groups: Iterable[Group]) -> None:
        """Have the log-prob servers score ready groups by the newest version, those first that are trained first."""
        if not self._rescore:
            return
        for group in sorted(groups, key=TRAINED_FIRST):
            run = self._runs[group.id]
            run.scores = [self._pool.rescore(payload, self.ledger.announced, group.start) for payload in run.payloads]

    def _raise_error(self) -> None:
        if self._error is not None:
            if isinstance(self._error, RolloutFailed | CannotGoOn | AlarmLimit):
                raise self._error
            raise RolloutFailed(f"the rollout ended with {type(self._error).__name__}: {self._error}") from self._error

    def _may_be_filled(self) -> bool:
        """Whether the batch under way is missing groups, or may turn out to."""
        if self.manager.anything_waits() or (self.ledger.can_issue() and self._prompts.left):
            return True
        return self._settings.filter_groups and self.ledger.count(GroupState.RUNNING) > 0

    def _over(self) -> bool:
        """Whether no further batch can form."""
        return not self.ledger.batch_possible(self._prompts.left)

    def _diagnosis(self, timeout_s: float) -> str:
        return (
            f"no training batch became ready within {timeout_s:g} s (async_training.timeouts.batch_wait) at version "
            f"{self.ledger.version}: {self._state()}"
        )

    def _state(self) -> str:
        counts, prompts = self.ledger.counts(), self.manager.counts()
        running = self.ledger.in_state(GroupState.RUNNING)
        oldest = min(running, key=TRAINED_FIRST, default=None)
        return (
            f"{counts.running} groups run ({self.manager.running} trajectories generate, "
            f"the others wait for their reward), {counts.ready} are ready, "
            f"{prompts.pending + prompts.interrupted} wait for a slot; "
            f"the oldest running group is {oldest}; agent-loop workers alive: {self._pool.alive}"
        )

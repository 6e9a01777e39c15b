# SPDX-License-Identifier: Apache-2.0
"""The rollout scheduler starts prompt groups, assigns their trajectories to workers, and gives batches to the trainer.

A group consists of a prompt and several trajectories for it. Contract: the scheduler does not decide about staleness,
but asks the sample ledger (`core.ledger`) which groups may start and which may be trained. The scheduler runs in one
event loop on its own thread. This thread and the trainer's thread share one lock for the ledger, and neither holds the
lock while it waits for something else, such as the data loader. The scheduler acts when a prompt arrives, a trajectory
finishes, a batch is taken, or a version is published. The cost of each such event does not depend on the number of
groups. An event wakes the trainer's thread only if the condition for which the trainer waits has become true.

A trajectory frees its generation slot when its last token is sampled, so no slot waits for a reward. A failed
trajectory is retried on another worker, and the other trajectories of its group are kept. If the last retry fails, the
whole group fails, and the run ends when ``max_consecutive_failures`` groups in a row have failed. The scheduler has
only a Ray object reference to a finished trajectory's payload (the packed trajectory), which the trainer fetches with
its batch. A snapshot for a checkpoint is taken while generation continues. The snapshot contains the answers of all
unfinished trajectories, so that a resumed run does not sample their tokens again.

The admission policy chooses which prompt begins, which trajectory generates next and which batch is taken. A place is
room for one sequence in an engine. The number of places changes when replicas wake or go to sleep. While there are no
places, trajectories that have begun keep their slots and tokens, and their next requests wait in the client
(`TurnGate`). Shown by tests/integration/test_scheduler.py and test_turn_scheduler.py (with fake worker actors),
tests/e2e/test_fully_async.py and test_partial_rollout.py.
"""

import asyncio
import copy
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import suppress
from operator import attrgetter
from typing import Any, TypeVar

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
from recipe.async_engine.core.lending import Demand, LendingPolicy, PlaceMeter, Places, look
from recipe.async_engine.core.prompt_manager import PromptManager, Slots, Trajectory
from recipe.async_engine.record.events import Event, TokenBooks
from recipe.async_engine.record.timeline import Timeline
from recipe.async_engine.rollout.group_run import (
    GroupRun,
    RolloutFailed,
    SchedulerSettings,
    TrajectoryRun,
    attempt_events,
    group_events,
)
from recipe.async_engine.rollout.kept_answers import TokenAccount
from recipe.async_engine.rollout.loop_output import NonFinite
from recipe.async_engine.rollout.loop_thread import Changes, LoopThread
from recipe.async_engine.rollout.prompts import PromptFailed, PromptFeed, PromptSource, failure_of, group_size
from recipe.async_engine.rollout.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

Decided = TypeVar("Decided")

PORTION, PAUSE_S = 1_024, 0.001
"""The scheduler begins about `PORTION` trajectories at a time. Then it releases its lock for `PAUSE_S` seconds, so that
other threads can get the lock.
"""
TRAINED_FIRST = attrgetter("start", "id")
"""Sort key of groups in the order of training: by start version, then by id."""


class RolloutScheduler:
    """The rollout scheduler. The trainer's thread calls its public methods."""

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
        """Create a scheduler, which does nothing before :meth:`start`.

        Args:
            timeline: receives the events of trajectories and groups for the run record.
            rescore: whether log-prob servers score each ready group with each new version until the group is trained.
            group_ended: a function that is called with None for each complete group, and with the error of each failed
                group. If it returns an error, the run ends with that error.
        """
        self.ledger = ledger
        self.manager = PromptManager(ledger, settings.group_size, settings.slots)
        self._slots = Slots(settings.slots, settings.slots_with_tools or settings.slots)
        self._prompts = PromptFeed(source, settings.prompt_timeout_s, ledger.policy)
        self._pool = pool
        self._settings = settings
        self._timeline = timeline
        self._books = timeline.rollout
        self.lending, self.places = LendingPolicy(), PlaceMeter(time.monotonic, settings.places or settings.slots)
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

    # The trainer's thread calls the following methods.

    def start(self) -> None:
        """Start the scheduler's thread, which begins trajectories, first those of restored groups, then new ones."""
        with self._changed:
            self._score(self.ledger.in_state(GroupState.READY))
            self.manager.open()
            self._account()
        self._thread.start(self._issue_forever())

    def stop(self, timeout_s: float) -> None:
        if self._thread.is_alive:
            self._ask(self._stop(), timeout_s)
            self._thread.stop(timeout_s)

    def close_books(self, engine_tokens: Callable[[], dict[str, int] | None], timeout_s: float) -> TokenBooks:
        """Cancel all trajectories, and return what became of all tokens that were sampled since the launch of the run.

        Args:
            engine_tokens: a function that returns the sums of all engines' token counts, or None if an engine does not
                answer.
            timeout_s: seconds for ending all trajectories. The agent-loop workers have to answer in half of this time.
        """
        before = engine_tokens()
        workers = self._ask(self._end_trajectories(timeout_s / 2), timeout_s) if self._thread.is_alive else None
        engines = engine_tokens()
        with self._changed:
            live = sum(run.sampled_tokens for run in self._runs.values())
            return self._books.close(live, None if workers is None else vars(workers), before, engines)

    def end_drain(self) -> None:
        """Let trajectories begin again, after `pause_until_drained`."""
        with self._changed:
            self.manager.open()
        self._poke()

    def take_batch(self, timeout_s: float) -> list[GroupRun] | None:
        """Wait until a batch is ready, and take its groups from the ledger for training.

        `batch_trained` or `payloads_lost` has to be called for the batch later.

        Returns:
            The groups of the batch in the order of training, or None if no further batch can form or
                :meth:`want_no_more` was called.

        Raises:
            RolloutFailed: generation cannot continue, or no batch was ready in time. The message lists what is running.
        """
        with self._changed:
            may_take = self.wait_for(lambda: self.ledger.may_take() or None, timeout_s)
            batch = [self._runs[group.id] for group in self.ledger.take()] if may_take else None
            self._account()
        self._poke()
        return batch

    def wait_for(self, decide: Callable[[], Decided | None], timeout_s: float) -> Decided | None:
        """Wait until ``decide`` returns a decision. The trainer calls this while it needs a batch.

        Args:
            decide: a cheap function that returns a decision or None. It is called at each change, under the lock.
            timeout_s: deadline in seconds.

        Returns:
            The decision. It is None if no further batch can form, if :meth:`want_no_more` was called, or if there was
                no decision in time although a batch may be taken.

        Raises:
            RolloutFailed: generation cannot continue, or there was no decision in time and no batch may be taken.
        """
        found: Decided | None = None

        def decided() -> bool:
            nonlocal found
            found = None
            try:
                if self._error is not None or self._ending or self._over():
                    return True
                found = decide()
                return found is not None
            except RecipeError as error:  # raised by the admission policy
                self._error = error
                return True

        with self._changed:
            self._books.set(waiting=True)
            self._account()
            try:
                in_time = self._changed.wait_until(decided, time.monotonic() + timeout_s)
            finally:
                self._books.set(waiting=False)
                self._account()
            self._raise_error()
            if not in_time and not self.ledger.may_take():
                raise RolloutFailed(self._diagnosis(timeout_s))
            return found

    def use_places(self, places: int, share: float, timeout_s: float) -> Future[TokenAccount] | None:
        """Set how many sequences the engines can generate at once from now on (``places``).

        The number of generation slots becomes ``share`` times the usual number. With 0 places, the workers hold their
        trajectories' requests. When there are places again, these requests continue before new trajectories begin.

        Returns:
            With 0 places, a future of the token counts, summed over all workers; otherwise None. The future is done
                when every worker that answers within ``timeout_s`` seconds holds its requests. The counts may lack
                the tokens of answers that were just interrupted and have not reached their workers yet.
        """
        with self._changed:
            before = self.manager.slots
            self._slots.share = share
            self.manager.slots = self._slots.count
            self.places.use(places)
            self._books.use_places(places, self.manager.running)
            self._account()
        held = None
        if places == 0 and self._thread.is_alive:
            held = self._thread.submit(self._pool.hold(timeout_s))
        elif places and before == 0:
            self._thread.submit(self._pool.go_on())
        self._poke()
        return held

    def look(self, standalone: int, hybrid: int, is_awake: bool) -> tuple[Places, Demand]:
        """Return the input of the lending policy (`recipe.async_engine.core.lending.look`).

        The caller must hold the scheduler's lock. `wait_for` holds it whenever it calls ``decide``.
        """
        return look(self.manager, self.places.spent, standalone, hybrid, is_awake, bool(self._prompts.left))

    def want_no_more(self) -> None:
        """Make all present and later calls of :meth:`take_batch` return None. Any thread may call this."""
        with self._changed:
            self._ending = True
            self._changed.made()

    def payloads_lost(self, group_ids: Iterable[int]) -> None:
        """Give the batch of the last `take_batch` back to the ledger, because some of its payloads are lost.

        A payload is a packed trajectory. The groups ``group_ids``, to which the lost payloads belong, are generated
        again.
        """
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
        """Count the batch of the last `take_batch` as trained, and return the staleness of its groups."""
        with self._changed:
            for group in self.ledger.leased():
                run = self._runs.pop(group.id)
                self.tokens.trained += run.cut_tokens
                self._tell_all(group_events(run, group, self.ledger.version))
            staleness = self.ledger.mark_trained()
        self._poke()
        return staleness

    def version_sealed(self) -> int:
        """Make the trainer's present weights the next version, and return its number."""
        with self._changed:
            version = self.ledger.seal()
        self._poke()
        return version

    def version_announced(self) -> int:
        """Record that all live replicas have the version of the last `version_sealed` call, and return its number."""
        return self._ask(self._announced(), SCHEDULER_S)

    def pause_until_drained(self, timeout_s: float, fill: bool = False) -> None:
        """Wait until no trajectory generates. From then on begin no trajectory until :meth:`end_drain`.

        Args:
            timeout_s: deadline in seconds.
            fill: whether trajectories may begin during the wait, as long as the ledger admits groups, so that the
                present version generates the whole current batch. If the run filters groups, the wait includes the
                rewards, because they decide whether another group is needed.

        Raises:
            RolloutFailed: generation failed, or trajectories still generate after ``timeout_s`` seconds.
        """

        def drained() -> bool:
            return not (self.manager.running or (fill and not self._ending and self._may_be_filled()))

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
        """Return a consistent state of the ledger and its groups, and of the position in the data, for a checkpoint.

        Payloads (packed trajectories) are returned as Ray object references. The answers of unfinished trajectories
        come from the workers. Generation continues during the call.
        """
        return self._ask(self._snapshot(timeout_s / 2), timeout_s)

    def restore_groups(self, groups: dict[int, dict[str, Any]]) -> None:
        """Restore the groups of a checkpoint. This has to be called before :meth:`start`.

        Args:
            groups: a dict for each group id, with the prompt's ``row``, and with three lists that have an item or None
                for each trajectory: ``scored``, ``payloads`` (object references) and ``kept`` (the answers of
                unfinished trajectories).
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
                        # The checkpoint was taken after the group's last payload arrived, but before `_complete` was
                        # called for the group.
                        self._complete(run)

    def counts(self) -> LedgerCounts:
        """Return the ledger's counts. Any thread may call this."""
        with self._changed:
            return self.ledger.counts()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the rollout, which docs/metrics.md explains."""
        with self._changed:
            did = self._books.metrics(self.ledger.counts(), self.manager.counts())
            return {"fully_async/rollouter/slots": self.manager.slots, **self._pool.metrics(), **did}

    # The event loop runs the following methods, unless a docstring says otherwise.

    def describe(self) -> list[str]:
        # Do not take the lock, because a stuck thread may hold it.
        return [self._state(), *(f"tasks: {line}" for line in waits(self._thread.loop))]

    def fail(self, error: BaseException) -> None:
        """Make all present and later calls of :meth:`take_batch` raise ``error``. Any thread may call this."""
        with self._changed:
            self._error = self._error or error
            self._changed.made()

    def _poke(self) -> None:
        """Wake the task that begins trajectories, so that it checks if any may begin. Any thread may call this."""
        self._thread.loop.call_soon_threadsafe(self._wake.set)

    def _ask(self, work: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        """Run ``work`` on the scheduler's thread and return its result. Any other thread may call this."""
        answer = self._thread.submit(work)
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            answer.cancel()
            raise RolloutFailed(
                f"the rollout scheduler did not answer within {timeout_s:g} s: {self._state()}"
            ) from None

    def _change(self, update: Callable[[], Any]) -> Any:
        """Call ``update`` under the lock, and wake the scheduler and the threads whose conditions have become true."""
        with self._changed:
            result = update()
            self._account()
            self._changed.made()
        self._wake.set()
        return result

    async def _issue_forever(self) -> None:
        while True:
            while self._issue_some():
                # Pause, so that other tasks can run and other threads can get the lock. Without a pause this thread
                # could take the lock again before a waiting thread gets it.
                await asyncio.sleep(PAUSE_S)
            await self._wake.wait()
            self._wake.clear()

    def _issue_some(self) -> bool:
        """Begin up to about `PORTION` trajectories, and return whether more may be able to begin."""
        if self._error is not None or self._ending:
            # No further batch will be trained, so leave the remaining prompts for the next launch of the run.
            return False
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
        """Start a group for the next buffered prompt, and return whether there was such a prompt."""
        prompt = self._next_prompt()
        if prompt is not None:
            self._register(self.manager.issue(prompt.reference, self._size_of(prompt.row)), prompt.row)
        return prompt is not None

    def _next_prompt(self) -> Prompt | None:
        """Return the next buffered prompt or None, and start to refill the buffer if necessary."""
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
        run = self._runs[group.id] = GroupRun(group, row, self._size_of(row))
        if group.state is GroupState.RUNNING:
            self._filter.issued(group.id)
        return run

    def _size_of(self, row: dict[str, Any]) -> int:
        """Return the number of trajectories for a prompt. If the row has an invalid number, return the usual number.

        In that case `_begin` makes the group fail.
        """
        usual = self._settings.group_size
        with suppress(PromptFailed):
            return group_size(row, usual)
        return usual

    def _begin(self, each: TrajectoryRun) -> None:
        try:
            if (failed := failure_of(each.of.row)) is not None:
                raise failed
            group_size(each.of.row, self._settings.group_size)
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
        """Return whether too many groups have failed in a row, and no group with a lower id than ``last`` still runs.

        The second condition keeps groups that fail quickly from ending a run whose earlier groups may still succeed.
        """
        if self._failures_in_a_row < self._settings.max_consecutive_failures:
            return False
        with self._changed:
            return not any(not (run.is_complete or run.given_up) for group, run in self._runs.items() if group < last)

    def _abandon(self, run: GroupRun, end: Callable[[int, str], Group], reason: str) -> None:
        run.given_up = True
        self._thread.spawn(self._pool.cancel(run.keys))
        self._change(lambda: self._end(run, end, reason))

    def _complete(self, run: GroupRun) -> None:
        self._books.completed(run.complete)
        kept = not (self._settings.filter_groups and run.is_uniform)
        self._filter.ended(run.group.id, kept)
        run.ready_at = time.monotonic()
        if run.sampled_at is not None:
            self.lending.group_place_s.add(self.places.end(run.group.id))
            self.lending.reward_s.add(run.ready_at - run.sampled_at)
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
                    "prompts are, or raise the setting; 0 means no limit"
                )
            )

    def _end(self, run: GroupRun, end: Callable[[int, str], Group], reason: str) -> None:
        self.manager.forget(run.group.id)
        self.places.end(run.group.id)
        group = end(run.group.id, reason)
        self._filter.forget(run.group.id)
        del self._runs[run.group.id]
        self._tell_all(group_events(run, group, self.ledger.version, reason))
        # Leave out running trajectories, because their workers count the lost tokens of these.
        records = [each.record for each in run.trajectories if not each.under_way]
        self.tokens.lost += run.cut_tokens + sum(record.cut_tokens for record in records if record is not None)

    async def _follow(self, each: TrajectoryRun) -> None:
        """Make one attempt to generate a trajectory, and record the result.

        The trajectory's generation slot is freed as soon as its last token is sampled.
        """
        run, began = each.of, time.monotonic()
        with self._changed:
            place_began = self.places.begin()
        sampled_at: float | None = None
        scoring = False
        self._ends[each.key] = over = self._thread.loop.create_future()

        def is_sampled() -> None:
            nonlocal sampled_at
            sampled_at = time.monotonic()
            self._change(lambda: self._sampled(each, place_began))

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
            if sampled_at is None:
                with self._changed:
                    self.places.leave(place_began, None if run.given_up else run.group.id)
            if scoring:
                self._count_scoring(-1)
            self._tell_all(attempt_events(run, each.n, began, sampled_at))
            # Drop the answers that came from a checkpoint, because the worker has counted their tokens by now.
            each.record = None
            del self._ends[each.key]
            over.set_result(None)

    def _sampled(self, each: TrajectoryRun, place_began: float) -> None:
        if each.of.given_up:
            self.places.leave(place_began, None)
            return
        self.places.leave(place_began, each.of.group.id)
        each.of.sampled_at = time.monotonic()
        self.manager.sampled(Trajectory(each.of.group.id, each.n))
        if self.manager.is_sampled(each.of.group.id):
            self.places.sampled(each.of.group.id)

    def _take_in(self, each: TrajectoryRun) -> None:
        scored = each.scored
        assert scored is not None
        with self._changed:
            if (slots := self._slots.ended(scored.asked_s, scored.tool_s)) != self.manager.slots:
                self.manager.slots = slots
                self._changed.made()
                self._wake.set()
            self._books.arrived(scored, not each.of.given_up)
            if each.of.given_up:
                # The trajectory ended before the cancellation of its group reached the worker, so the worker has not
                # counted these tokens as lost.
                self.tokens.lost += scored.cut_tokens

    def _count_scoring(self, change: int) -> None:
        with self._changed:
            self._books.set(scoring=self._books.scoring + change)
            self._account()

    async def _snapshot(self, timeout_s: float) -> dict[str, Any]:
        told, over, account = await self._pool.export(timeout_s)
        # Wait for results that are in transit from workers.
        last_words = [self._ends[key] for key in over if key in self._ends]
        if last_words:
            await asyncio.wait(last_words, timeout=HANDED_OVER_S)
        async with self._prompts.standstill() as position:
            with self._changed:
                kept = {
                    group_id: [each.kept(told) for each in run.trajectories] for group_id, run in self._runs.items()
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
                tokens = self.tokens + account
                tokens.cut += sum(record.under_way_tokens for record in records)
                complete = sum(run.cut_tokens for run in self._runs.values())
                return {
                    "ledger": self.ledger.snapshot(),
                    # Copy the position, because the data loader may change the object that it returned.
                    "source": copy.deepcopy(position),
                    "groups": groups,
                    "interrupted_tokens": {
                        "cut": tokens.cut,
                        "trained": tokens.trained,
                        "lost": tokens.lost,
                        "cached": complete + sum(record.cut_tokens for record in records),
                    },
                }

    async def _announced(self) -> int:
        with self._changed:
            version = self.ledger.announce()
            self._books.end_version()
            self._changed.made()
            ready = self.ledger.in_state(GroupState.READY) if self._rescore else ()
        self._wake.set()
        # The trainer takes no batch until this method returns, so all of these groups stay ready until then.
        for group in sorted(ready, key=TRAINED_FIRST):
            with self._changed:
                self._score([group])
            await asyncio.sleep(0)
        return version

    async def _end_trajectories(self, timeout_s: float) -> TokenAccount | None:
        """Cancel all trajectories, and return the sum of the workers' token counts.

        The result is None if a worker does not answer or has died, because its counts are then unknown.
        """
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

    # The following methods are called while the lock is held.

    def _account(self) -> None:
        self._books.set(running=self.manager.generating)
        waits = self._books.waits_for_rewards
        self._books.lane.turn_to(self.manager.why(bool(self._prompts.left), waits))

    def _tell_all(self, events: Iterable[Event]) -> None:
        for event in events:
            self._timeline.tell(event)

    def _score(self, groups: Iterable[Group]) -> None:
        """If the run rescores groups, have log-prob servers score ``groups``, which are ready, with the newest version.

        The groups that will be trained first are scored first.
        """
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
        """Return whether the current batch needs more groups, or may need more because the filter may drop some."""
        if self.manager.anything_waits() or (self.ledger.can_issue() and self._prompts.left):
            return True
        return self._settings.filter_groups and self.ledger.count(GroupState.RUNNING) > 0

    def _over(self) -> bool:
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

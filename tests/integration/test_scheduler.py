# SPDX-License-Identifier: Apache-2.0
"""The scheduler over the real ledger and real prompts; the workers' trajectories end when a test says so."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from remote_fakes import Rows, make_loader, make_source
from scripted_pool import SOON, ScriptedCall, ScriptedPool, new_ledger, new_scheduler, settled, wait_until

from recipe.async_engine.core.alarms import AlarmLimit, Alarms
from recipe.async_engine.core.gate import GateSettings
from recipe.async_engine.core.groups import UNIFORM_REASON, GroupState, OnNonFinite
from recipe.async_engine.core.ledger import SampleLedger
from recipe.async_engine.core.policy import OldestReady, WholeBatches
from recipe.async_engine.rollout.group_run import TrajectoryDisturbed
from recipe.async_engine.rollout.kept_answers import TokenAccount, TrajectoryRecord
from recipe.async_engine.rollout.loop_output import NonFinite, NonFiniteReward, RewardError
from recipe.async_engine.rollout.prompts import PromptSource
from recipe.async_engine.rollout.scheduler import RolloutFailed, RolloutScheduler
from recipe.async_engine.rollout.worker_pool import TrajectoryFailed


@pytest.fixture
def start() -> Iterator[Any]:
    """Start a scheduler and stop it after the test."""
    running: list[RolloutScheduler] = []

    def begin(scheduler: RolloutScheduler) -> RolloutScheduler:
        running.append(scheduler)
        scheduler.start()
        return scheduler

    yield begin
    for scheduler in running:
        scheduler.stop(SOON)


def finish_at_once(call: ScriptedCall) -> None:
    call.finish()


def train(scheduler: RolloutScheduler) -> list[int] | None:
    """Take, train and publish one batch; its group ids."""
    batch = scheduler.take_batch(SOON)
    if batch is None:
        return None
    scheduler.batch_trained()
    if scheduler.ledger.batches_left == 0:
        scheduler.version_sealed()
        scheduler.version_announced()
    return [run.group.id for run in batch]


def test_slot_is_free_when_the_last_token_is_sampled_while_the_reward_is_pending(start: Any) -> None:
    pool = ScriptedPool()
    scheduler = start(new_scheduler(new_ledger(b=4), make_source(8), pool, slots=2))
    first, second = pool.began(2)
    settled(scheduler)
    assert len(pool.calls) == 2, "both slots are held"
    first.generate()
    second.generate()
    assert [call.group.id for call in pool.began(4)] == [0, 1, 2, 3]
    assert scheduler.ledger.counts().running == 4
    assert scheduler.ledger.counts().ready == 0


def test_trajectories_at_tools_leave_slots_to_others_up_to_what_may_be_under_way(start: Any) -> None:
    pool = ScriptedPool()
    scheduler = start(new_scheduler(new_ledger(b=8), make_source(16), pool, slots=2, slots_with_tools=5))
    assert len(pool.began(2)) == 2
    first = pool.of(0, 0)
    first.asked_s, first.tool_s = 1.0, 1.0
    first.finish()
    # Half of its time was at tools: of four, two are at engines.
    assert len(pool.began(5)) == 5
    second = pool.of(1, 0)
    second.asked_s, second.tool_s = 1.0, 9.0
    second.finish()
    assert len(pool.began(7)) == 7
    settled(scheduler)
    assert (len(pool.calls), scheduler.manager.slots, scheduler.manager.running) == (7, 5, 5)


def test_group_starts_only_when_all_its_trajectories_have_a_slot(start: Any) -> None:
    pool = ScriptedPool()
    scheduler = start(new_scheduler(new_ledger(b=4), make_source(8), pool, slots=5, group_size=3))
    assert [call.key for call in pool.began(3)] == ["0-0-0", "0-1-0", "0-2-0"]
    pool.of(0, 0).generate()
    pool.of(0, 1).generate()
    settled(scheduler)
    assert {call.group.id for call in pool.began(6)} == {0, 1}
    assert len(pool.calls) == 6


def test_batch_is_taken_oldest_first_with_the_payloads_in_trajectory_order(start: Any) -> None:
    pool = ScriptedPool()
    scheduler = start(new_scheduler(new_ledger(b=2), make_source(8), pool, group_size=2))
    for group in (3, 2, 1, 0):
        for n in (1, 0):
            pool.of(group, n).finish()
    wait_until(scheduler, lambda: scheduler.ledger.counts().ready == 4)
    batch = scheduler.take_batch(SOON)
    assert [run.group.id for run in batch] == [0, 1]
    assert [run.payloads for run in batch] == [
        ["payload-0-0-0", "payload-0-1-0"],
        ["payload-1-0-0", "payload-1-1-0"],
    ]
    assert [run.row["dataset_index"][0] for run in batch] == [0, 1]


def test_group_starts_at_the_oldest_version_of_its_trajectories(start: Any) -> None:
    pool = ScriptedPool()
    scheduler = start(new_scheduler(new_ledger(b=1, bound=3, depth=3), make_source(9), pool, group_size=2))
    pool.began(8)
    pool.of(0, 0).finish()
    pool.of(0, 1).finish()
    assert train(scheduler) == [0]
    pool.of(1, 0).finish(version=1)
    pool.of(1, 1).finish(version=0)
    wait_until(scheduler, lambda: scheduler.ledger.find(1).state == "ready")
    assert scheduler.ledger.find(1).start == 0
    pool.of(2, 0).finish(version=1)
    pool.of(2, 1).finish(version=1)
    wait_until(scheduler, lambda: scheduler.ledger.find(2).state == "ready")
    assert scheduler.ledger.find(2).start == 1


def test_failed_trajectory_is_tried_again_on_another_worker_and_its_siblings_are_kept(start: Any) -> None:
    pool = ScriptedPool()
    scheduler = start(new_scheduler(new_ledger(bound=0, depth=0), make_source(8), pool, group_size=3))
    pool.of(0, 0).finish()
    pool.of(0, 1).fail(TrajectoryFailed("no luck"))
    retried = pool.of(0, 1, attempt=1)
    assert retried.avoid == pool.of(0, 1).worker_id != retried.worker_id
    retried.finish()
    pool.of(0, 2).finish()
    (run,) = scheduler.take_batch(SOON)
    assert run.payloads == ["payload-0-0-0", "payload-0-1-1", "payload-0-2-0"]
    assert len(pool.calls) == 4


def test_group_that_fails_for_good_is_counted_and_replaced_and_its_siblings_are_ended(start: Any) -> None:
    pool = ScriptedPool()
    scheduler = start(new_scheduler(new_ledger(bound=0, depth=0), make_source(8), pool, group_size=2))
    pool.of(0, 0).fail(TrajectoryFailed("first"))
    pool.of(0, 0, attempt=1).fail(TrajectoryFailed("second"))
    for n in (0, 1):
        pool.of(1, n).finish()
    (run,) = scheduler.take_batch(SOON)
    assert run.group.id == 1
    assert pool.of(0, 1).cancelled
    counts = scheduler.ledger.counts()
    assert (counts.failed, counts.failed_by_reason) == (1, {"TrajectoryFailed": 1})
    scheduler.ledger.check_identity()


def test_deaths_of_a_worker_cost_nothing_until_they_come_to_the_only_one_under_suspicion(start: Any) -> None:
    pool = ScriptedPool()
    scheduler = start(new_scheduler(new_ledger(bound=0, depth=0), make_source(8), pool, group_size=2, retries=0))
    for attempt in range(3):
        pool.of(0, 0, attempt=attempt).fail(TrajectoryDisturbed("its worker died"))
    last = pool.of(0, 0, attempt=3)
    assert [pool.of(0, 0, attempt=n).alone for n in range(4)] == [False, False, True, True]
    assert not pool.of(0, 1).alone
    last.fail(TrajectoryDisturbed("its worker died"))
    for n in (0, 1):
        pool.of(1, n).finish()
    assert [run.group.id for run in scheduler.take_batch(SOON)] == [1]
    assert scheduler.ledger.counts().failed_by_reason == {"TrajectoryDisturbed": 1}


def test_trajectory_of_a_group_that_failed_is_not_tried_again(start: Any) -> None:
    pool = ScriptedPool()
    pool.cancels_reach = False
    scheduler = start(new_scheduler(new_ledger(bound=0, depth=0), make_source(1), pool, group_size=2, retries=3))
    pool.of(0, 0).fail(RewardError("no reward"))
    assert pool.saw_cancel(pool.of(0, 1))
    pool.of(0, 1).fail(TrajectoryFailed("ended in its own way"))
    wait_until(scheduler, lambda: scheduler.ledger.counts().failed == 1)
    assert len(pool.calls) == 2


def test_answer_whose_reward_failed_is_not_generated_again(start: Any) -> None:
    pool = ScriptedPool()
    scheduler = start(new_scheduler(new_ledger(bound=0, depth=0), make_source(2), pool, retries=5))
    pool.of(0).generate()
    pool.of(0).fail(RewardError("no reward"))
    pool.of(1).finish()
    assert [run.group.id for run in scheduler.take_batch(SOON)] == [1]
    assert scheduler.ledger.counts().failed_by_reason == {"RewardError": 1}
    assert [call.key for call in pool.calls] == ["0-0-0", "1-0-0"]


@pytest.mark.parametrize(("drops", "counted"), [(OnNonFinite.FAIL, "failed"), (OnNonFinite.DROP, "filtered")])
def test_group_with_a_number_that_is_none_is_counted_by_that_reason_and_never_trained(
    start: Any, drops: OnNonFinite, counted: str
) -> None:
    """A reward that is none is not asked for again; an engine's log-prob that is none may be one the second time."""
    pool, ledger = ScriptedPool(), new_ledger(bound=0, depth=0)
    scheduler = start(new_scheduler(ledger, make_source(8), pool, on_non_finite=drops, failures=2))
    pool.of(0).fail(NonFiniteReward("the reward function gave reward=nan"))
    pool.of(1).fail(NonFinite("of token 3"))
    pool.of(1, attempt=1).finish()
    assert [run.group.id for run in scheduler.take_batch(SOON)] == [1]
    counts = ledger.counts()
    assert getattr(counts, f"{counted}_by_reason") == {"non_finite": 1}
    assert (counts.failed, counts.filtered) == ((1, 0) if counted == "failed" else (0, 1))
    assert scheduler.metrics()["fully_async/ledger/non_finite"] == 1
    ledger.check_identity()


@pytest.mark.parametrize("drops", OnNonFinite)
def test_run_ends_when_a_batch_of_groups_in_a_row_had_numbers_that_are_none(start: Any, drops: OnNonFinite) -> None:
    pool = ScriptedPool(lambda call: call.fail(NonFiniteReward("the reward function gave reward=nan")))
    scheduler = start(new_scheduler(new_ledger(), make_source(8), pool, on_non_finite=drops, failures=3))
    with pytest.raises(RolloutFailed, match=r"3 prompt groups failed in a row .* gave reward=nan"):
        scheduler.take_batch(SOON)


def test_group_whose_answers_are_all_as_good_is_filtered_and_replaced(start: Any) -> None:
    pool, ledger = ScriptedPool(), new_ledger(bound=0, depth=0)
    scheduler = start(new_scheduler(ledger, make_source(8), pool, group_size=2, filter_groups=True))
    for group, metrics in enumerate([(1.0, 1.0), (0.0, 0.0), (0.0, 1.0)]):
        for n, metric in enumerate(metrics):
            pool.of(group, n).finish(metric=metric)
    (run,) = scheduler.take_batch(SOON)
    assert run.group.id == 2
    assert ledger.counts().filtered_by_reason == {UNIFORM_REASON: 2}
    assert scheduler.metrics()["fully_async/ledger/filtered_uniform"] == 2
    ledger.check_identity()


def test_without_a_filter_such_a_group_is_trained(start: Any) -> None:
    pool = ScriptedPool(lambda call: call.finish(metric=1.0))
    scheduler = start(new_scheduler(new_ledger(bound=0, depth=0), make_source(8), pool, group_size=2))
    assert train(scheduler) == [0]


def test_run_ends_when_a_batch_takes_more_groups_than_its_filter_may_have(start: Any) -> None:
    pool = ScriptedPool(lambda call: call.finish(metric=float(call.group.id == 1 and call.n)))
    filtering = {"filter_groups": True, "filter_limit": 3}
    scheduler = start(new_scheduler(new_ledger(bound=0, depth=0), make_source(20), pool, group_size=2, **filtering))
    assert train(scheduler) == [1]
    with pytest.raises(RolloutFailed, match=r"3 prompt groups were filtered.*max_num_gen_batches"):
        scheduler.take_batch(SOON)


def test_run_ends_with_the_causes_text_when_groups_fail_one_after_the_other(start: Any) -> None:
    pool = ScriptedPool(lambda call: call.fail(TrajectoryFailed(f"disk of {call.key} is full")))
    scheduler = start(new_scheduler(new_ledger(), make_source(20), pool, failures=3))
    with pytest.raises(RolloutFailed, match=r"groups failed in a row.*disk of \d-0-1 is full") as caught:
        scheduler.take_batch(SOON)
    assert isinstance(caught.value.__cause__, TrajectoryFailed)


def test_groups_that_fail_at_once_do_not_end_a_run_whose_first_group_takes_its_time(start: Any) -> None:
    pool = ScriptedPool(lambda call: call.fail(TrajectoryFailed("at once")) if call.group.id else None)
    ledger = new_ledger()
    scheduler = start(new_scheduler(ledger, make_source(20), pool, failures=3))
    deadline = time.monotonic() + SOON
    while ledger.counts().failed < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    pool.of(0).finish()
    assert [run.group.id for run in scheduler.take_batch(SOON)] == [0]
    assert ledger.counts().failed >= 6


def test_run_ends_at_the_first_failed_group_when_no_worker_is_left(start: Any) -> None:
    pool = ScriptedPool()
    scheduler = start(new_scheduler(new_ledger(), make_source(20), pool, failures=100, retries=0))
    pool.alive = 0
    pool.of(0).fail(TrajectoryFailed("the last worker died"))
    with pytest.raises(RolloutFailed, match="the last worker died"):
        scheduler.take_batch(SOON)


def test_run_ends_when_more_of_its_groups_fail_than_may_though_others_succeed_in_between(start: Any) -> None:
    def answer(call: ScriptedCall) -> None:
        call.fail(RewardError("429: too many requests")) if call.group.id % 5 in (0, 2, 4) else call.finish()

    alarms = Alarms({"failed_groups": 0.5})
    pool, heard = ScriptedPool(answer), alarms.group_ended
    scheduler = start(new_scheduler(new_ledger(), make_source(200), pool, failures=4, group_ended=heard))
    with pytest.raises(AlarmLimit, match=r"429: too many requests.*failed_groups=0\.5 allows"):
        while train(scheduler) is not None:
            """It trains what there is."""
    assert alarms.counts["failed_groups"] > 0 and scheduler.ledger.counts().trained < 40


def test_success_in_between_forgives_earlier_failures(start: Any) -> None:
    pool = ScriptedPool()
    ledger = new_ledger(bound=0, depth=0)
    scheduler = start(new_scheduler(ledger, make_source(20), pool, failures=2, retries=0))
    for failing in (0, 2, 4):
        pool.of(failing).fail(TrajectoryFailed("odd"))
        pool.of(failing + 1).finish()
        assert train(scheduler) == [failing + 1]
    assert (ledger.counts().failed, ledger.counts().trained) == (3, 3)


def test_defect_in_the_scheduler_ends_the_run(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_source(4)
    monkeypatch.setattr(source, "take", lambda: 1 / 0)
    scheduler = start(new_scheduler(new_ledger(), source, ScriptedPool()))
    with pytest.raises(RolloutFailed, match="ZeroDivisionError"):
        scheduler.take_batch(SOON)


class HangingSource(PromptSource):
    """Gives ``prompts`` and then does not answer until it is let go."""

    def __init__(self, prompts: int) -> None:
        super().__init__(make_loader(20), epochs=1)
        self.go_on = threading.Event()
        self._before = prompts

    def take(self) -> Any:
        if self._before == 0:
            self.go_on.wait(SOON)
        self._before -= 1
        return super().take()


def in_time(call: Any, *arguments: Any) -> Any:
    """What a call of the trainer's thread gives or raises, which it must within seconds."""
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(call(*arguments))
        except Exception as error:  # it is what the test is about
            outcome.append(error)

    trainer = threading.Thread(target=work, daemon=True)
    trainer.start()
    trainer.join(SOON / 2)
    assert outcome, "the call does not return"
    return outcome[0]


def test_data_loader_that_hangs_holds_up_nobody_and_ends_the_run_by_its_deadline(start: Any) -> None:
    source, pool = HangingSource(1), ScriptedPool()
    scheduler = start(new_scheduler(new_ledger(b=2), source, pool, prompt_timeout_s=1.0))
    pool.of(0).finish()
    assert isinstance(in_time(scheduler.take_batch, 0.05), RolloutFailed)
    assert in_time(scheduler.counts).issued == 1
    assert in_time(scheduler.metrics)
    said = str(in_time(scheduler.take_batch, SOON))
    source.go_on.set()
    assert "DataFailed: the training data's loader gave no prompt within 1 s" in said
    assert "async_training.timeouts.prompt" in said


def test_data_loader_that_is_slow_holds_up_no_other_group(start: Any) -> None:
    source, pool = HangingSource(2), ScriptedPool()
    scheduler = start(new_scheduler(new_ledger(), source, pool))
    pool.of(0).fail(TrajectoryFailed("odd"))
    pool.of(0, attempt=1).finish()
    pool.of(1).finish()
    assert in_time(train, scheduler) == [0]
    assert in_time(train, scheduler) == [1]
    source.go_on.set()
    pool.of(2).finish()
    assert train(scheduler) == [2]


def test_prompts_that_were_taken_and_not_issued_are_in_the_snapshot(start: Any) -> None:
    source, pool, ledger = HangingSource(1), ScriptedPool(), new_ledger(b=1)
    scheduler = start(new_scheduler(ledger, source, pool, slots=1))
    pool.of(0).generate()
    wait_until(scheduler, lambda: scheduler._taking)
    scheduler.pause_until_drained(SOON)
    source.go_on.set()
    for _ in range(3):
        snapshot = scheduler.snapshot(SOON)
    assert scheduler._prompts.left == 19
    put_back = [prompt.index for prompt in snapshot["source"]["put_back"]]
    assert put_back and put_back == list(range(1, 1 + len(put_back)))
    restored = make_source(20)
    restored.restore(snapshot["source"])
    assert restored.prompts_left == 19
    resumed = new_scheduler(SampleLedger.restore(snapshot["ledger"], ledger.settings), restored, ScriptedPool())
    assert resumed._prompts.left == 19
    pool.of(0).reward()
    scheduler.end_drain()
    assert [pool.of(group).group.prompt.index for group in (1,)] == [1], "the run itself goes on with it too"


def drained_run(groups: int, seed: int, size: int = 1, **settings: Any) -> RolloutScheduler:
    """Issue ``groups`` groups through one group's slots, with a drained weight sync at random moments.

    Every trajectory notes the version at its beginning and at its end, which must be that of its group's issue.
    """
    rng = random.Random(seed)
    late: list[tuple[int, int, int]] = []

    def answer(call: ScriptedCall) -> None:
        begun = ledger.version

        def end() -> None:
            if not call.group.start == begun == ledger.version:
                late.append((call.group.start, begun, ledger.version))
            call.finish()

        pool.loop.call_later(rng.random() / 2000, end) if rng.random() < 0.05 else pool.loop.call_soon(end)

    k = groups // 40
    ledger = new_ledger(b=1, k=k, bound=1, depth=1, target=groups)
    pool = ScriptedPool(answer)
    source = make_source(groups)
    scheduler = new_scheduler(ledger, source, pool, slots=size, group_size=size, **settings)
    scheduler.start()
    try:
        while (batch := scheduler.take_batch(SOON)) is not None:
            scheduler.batch_trained()
            if rng.random() < 0.2 or ledger.batches_left == 0:
                scheduler.pause_until_drained(SOON)
                if ledger.batches_left == 0:
                    scheduler.version_sealed()
                    scheduler.version_announced()
                assert scheduler.manager.running == 0, batch
                scheduler.end_drain()
            pool.calls.clear()
    finally:
        scheduler.stop(SOON)
    assert not late, f"{len(late)} trajectories generated across a weight sync: {late[:3]}"
    return scheduler


@pytest.mark.parametrize("groups", [2_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_no_group_generates_across_a_drained_weight_sync(groups: int) -> None:
    scheduler = drained_run(groups, seed=groups)
    counts = scheduler.ledger.counts()
    assert (counts.issued, counts.trained, counts.failed) == (groups, groups, 0)


def test_attempt_that_gave_its_slot_back_begins_again_after_the_weight_sync(start: Any) -> None:
    pool = ScriptedPool()
    scheduler = start(new_scheduler(new_ledger(), make_source(20), pool, slots=1))
    pool.of(0).generate()
    pool.of(1).generate()
    scheduler.pause_until_drained(SOON)
    pool.of(0).fail(TrajectoryFailed("its worker died while it was scored"))
    settled(scheduler)
    assert len(pool.calls) == 2
    assert scheduler.manager.running == 0
    scheduler.end_drain()
    pool.of(0, attempt=1).finish()
    assert train(scheduler) == [0]


def test_attempt_that_waits_for_the_weight_sync_ends_with_its_group(start: Any) -> None:
    pool = ScriptedPool()
    scheduler = start(new_scheduler(new_ledger(), make_source(1), pool, group_size=2))
    pool.of(0, 0).generate()
    pool.of(0, 1).generate()
    scheduler.pause_until_drained(SOON)
    pool.of(0, 0).fail(TrajectoryFailed("its worker died while it was scored"))
    settled(scheduler)
    pool.of(0, 1).fail(RewardError("no reward"))
    wait_until(scheduler, lambda: scheduler.ledger.counts().failed == 1)
    assert len(pool.calls) == 2


def test_drain_that_fills_the_batch_waits_for_the_rewards_that_may_filter_its_groups(start: Any) -> None:
    pool = ScriptedPool()
    ledger = SampleLedger(GateSettings(2, 1, 1, 1), policy=WholeBatches())
    scheduler = start(new_scheduler(ledger, make_source(20), pool, group_size=2, filter_groups=True))
    for group in range(4):
        for n in (0, 1):
            pool.of(group, n).finish(metric=float(n))
    assert [run.group.id for run in scheduler.take_batch(SOON)] == [0, 1]
    scheduler.batch_trained()
    wait_until(scheduler, lambda: ledger.counts().ready == 2)
    assert ledger.seal() == ledger.announce() == 1
    scheduler._poke()
    drained = threading.Event()
    for n in (0, 1):
        pool.of(4, n).finish(metric=float(n))
        pool.of(5, n).generate()
    assert [run.group.id for run in scheduler.take_batch(SOON)] == [2, 3]
    scheduler.batch_trained()
    drain = threading.Thread(target=lambda: (scheduler.pause_until_drained(SOON, fill=True), drained.set()))
    drain.start()
    wait_until(scheduler, lambda: scheduler.manager.running == 0 and ledger.counts().running == 1)
    assert not drained.wait(0.05)
    for n in (0, 1):
        pool.of(5, n).metric = 1.0
        pool.of(5, n).reward()
    for n in (0, 1):
        pool.of(6, n).finish(metric=float(n))
    drain.join(SOON)
    assert drained.is_set()
    assert ledger.counts().ready == 2, "the batch of the next step is complete, and of one version"
    assert {group.start for group in ledger.in_state(GroupState.READY)} == {1}


@pytest.mark.parametrize("seed", range(4))
def test_filter_ends_no_run_that_synchronous_training_would_finish(start: Any, seed: int) -> None:
    """A pipeline of four batches: filtered groups end first, and those of all four would count for one batch."""
    rng = random.Random(seed)

    def answer(call: ScriptedCall) -> None:
        kept = call.group.id % 4 == 3
        seconds = rng.random() / 50 if kept else 0.0
        call._pool.loop.call_later(seconds, call.finish, None, float(kept and call.n))

    filtering = {"filter_groups": True, "filter_limit": 7}
    ledger = new_ledger(b=2, bound=4, depth=4, target=40)
    source = make_source(400)
    scheduler = start(
        new_scheduler(ledger, source, ScriptedPool(answer), slots=32, group_size=2, failures=1, **filtering)
    )
    while train(scheduler) is not None:
        pass
    assert ledger.counts().trained == 40
    assert ledger.counts().filtered >= 100


def test_trajectory_that_does_not_end_when_its_sibling_failed_is_given_up(start: Any) -> None:
    pool = ScriptedPool()
    pool.cancels_reach = False
    scheduler = start(new_scheduler(new_ledger(bound=0, depth=0), make_source(4), pool, group_size=2, slots=2))
    pool.of(0, 0).fail(RewardError("no reward"))
    for n in (0, 1):
        pool.of(1, n).finish()
    assert train(scheduler) == [1]
    assert scheduler.ledger.counts().failed == 1


@pytest.mark.parametrize("whole", [False, True])
def test_batch_whose_answers_are_lost_is_returned_and_its_group_is_generated_again(start: Any, whole: bool) -> None:
    pool = ScriptedPool()
    ledger = SampleLedger(GateSettings(2, 1, 1, 1), policy=WholeBatches() if whole else OldestReady())
    scheduler = start(new_scheduler(ledger, make_source(8), pool, group_size=2))
    for group in range(2):
        for n in (0, 1):
            pool.of(group, n).finish()
    assert [run.group.id for run in scheduler.take_batch(SOON)] == [0, 1]
    pool.began(8)
    scheduler.payloads_lost([1])
    counts = ledger.counts()
    assert (counts.taken, counts.ready, counts.live) == (0, 1, 4)
    ledger.check_identity()
    again = [call for call in pool.began(10) if call.group.id == 1][2:]
    assert [call.group.attempts for call in again] == [2, 2]
    for call in again:
        call.finish()
    batch = scheduler.take_batch(SOON)
    assert [run.group.id for run in batch] == [0, 1]
    assert all(payload is not None for run in batch for payload in run.payloads)
    scheduler.batch_trained()
    assert scheduler.version_sealed() == scheduler.version_announced() == 1
    assert ledger.staleness.max == 0


def test_drain_waits_for_generation_issues_nothing_and_goes_on_after_it(start: Any) -> None:
    pool = ScriptedPool()
    scheduler = start(new_scheduler(new_ledger(b=2), make_source(20), pool, slots=2))
    first, second = pool.began(2)
    drained = threading.Event()
    drain = threading.Thread(target=lambda: (scheduler.pause_until_drained(SOON), drained.set()))
    drain.start()
    wait_until(scheduler, lambda: not scheduler.manager.is_open)
    first.finish()
    settled(scheduler)
    assert not drained.is_set()
    second.generate()
    assert drained.wait(SOON), "a pending reward does not hold up a weight sync"
    drain.join(SOON)
    settled(scheduler)
    assert len(pool.calls) == 2
    scheduler.end_drain()
    assert len(pool.began(4)) == 4


@pytest.mark.parametrize("fill", [True, False])
def test_no_prompt_begins_once_the_run_is_to_stop_and_a_drain_ends_with_what_generates(start: Any, fill: bool) -> None:
    pool = ScriptedPool()
    scheduler = start(new_scheduler(new_ledger(b=4), make_source(20), pool, slots=2))
    first, second = pool.began(2)
    scheduler.want_no_more()
    first.finish()
    settled(scheduler)
    second.finish()
    scheduler.pause_until_drained(SOON, fill=fill)
    assert len(pool.calls) == 2 and scheduler.ledger.counts().failed == 0


def test_no_prompt_begins_after_the_error_that_ends_the_run(start: Any) -> None:
    pool = ScriptedPool()
    scheduler = start(new_scheduler(new_ledger(b=4), make_source(20), pool, slots=1))
    (first,) = pool.began(1)
    scheduler.fail(RolloutFailed("the disk is full"))
    first.finish()
    settled(scheduler)
    assert len(pool.calls) == 1


def test_drain_that_takes_too_long_names_its_settings(start: Any) -> None:
    pool = ScriptedPool()
    scheduler = start(new_scheduler(new_ledger(), make_source(20), pool, slots=1))
    pool.began(1)
    with pytest.raises(RolloutFailed, match=r"1 trajectories still.*timeouts\.trajectory.*at_swap=interrupt"):
        scheduler.pause_until_drained(0.02)


def test_group_at_its_bound_is_waited_for(start: Any) -> None:
    pool = ScriptedPool()
    scheduler = start(new_scheduler(new_ledger(b=1, bound=1, depth=1), make_source(20), pool))
    pool.of(0)
    pool.of(1).finish()
    assert train(scheduler) == [1]
    pool.of(2).finish()
    with pytest.raises(RolloutFailed):
        scheduler.take_batch(0.05)
    assert not pool.of(0).cancelled
    pool.of(0).finish()
    assert train(scheduler) == [0]


def test_batch_timeout_says_what_runs_and_for_which_version(start: Any) -> None:
    pool = ScriptedPool()
    scheduler = start(new_scheduler(new_ledger(b=2), make_source(20), pool, slots=3))
    pool.of(0).generate()
    pool.began(4)
    settled(scheduler)
    said = r"timeouts\.batch_wait\) at version 0: 4 groups run \(3 traj.*0 are ready.*uid='0-0'.*workers alive: 2"
    with pytest.raises(RolloutFailed, match=said):
        scheduler.take_batch(0.02)


def test_a_trainer_that_waits_decides_by_what_it_needs_and_by_what_waits_for_a_place(start: Any) -> None:
    pool = ScriptedPool()
    scheduler = start(new_scheduler(new_ledger(b=2), make_source(20), pool, slots=1))
    pool.of(0).generate()
    settled(scheduler)
    seen = []

    def decide() -> str | None:
        places, demand = scheduler.look(1, 1, is_awake=False)
        running = scheduler.manager.running
        seen.append((demand.ready, running, places.waiting))
        return "take" if demand.may_take else "lend" if places.waiting and running < 2 else None

    assert scheduler.wait_for(decide, SOON) == "lend"
    assert seen[-1][:2] == (0, 1)
    scheduler.use_places(2, 2.0, SOON)
    pool.began(2)
    settled(scheduler)
    assert scheduler.manager.slots == 2
    pool.of(0).finish()
    pool.of(1).finish()
    assert scheduler.wait_for(decide, SOON) == "take"
    # What runs keeps its place when places go, and nothing begins until it has ended.
    settled(scheduler)
    scheduler.use_places(1, 1.0, SOON)
    assert (scheduler.manager.slots, scheduler.manager.running) == (1, 2)
    assert scheduler.places.spent > 0
    assert scheduler.lending.group_place_s.value is not None
    assert train(scheduler) == [0, 1]


def test_a_trainer_that_waits_at_the_end_of_the_data_decides_nothing_and_is_late_with_its_own_error(start: Any) -> None:
    pool = ScriptedPool()
    scheduler = start(new_scheduler(new_ledger(b=2), make_source(2), pool, slots=1, retries=0, failures=9))
    pool.began(1)
    with pytest.raises(RolloutFailed, match=r"timeouts\.batch_wait"):
        scheduler.wait_for(lambda: None, 0.05)
    pool.of(0).fail(TrajectoryFailed("odd"))
    assert scheduler.wait_for(lambda: None, SOON) is None
    assert scheduler.wait_for(lambda: "lend", SOON) is None


@pytest.mark.parametrize(("prompts", "target", "trained"), [(5, None, [[0, 1], [2, 3]]), (20, 4, [[0, 1], [2, 3]])])
def test_no_batch_is_left_at_the_end_of_the_data_and_at_the_target(
    start: Any, prompts: int, target: int | None, trained: list[list[int]]
) -> None:
    scheduler = start(new_scheduler(new_ledger(b=2, target=target), make_source(prompts), ScriptedPool(finish_at_once)))
    assert [train(scheduler) for _ in trained] == trained
    assert scheduler.take_batch(SOON) is None


def test_waiting_trainer_is_told_when_the_last_groups_fail(start: Any) -> None:
    pool = ScriptedPool()
    scheduler = start(new_scheduler(new_ledger(b=2), make_source(2), pool, retries=0, failures=9))
    outcome: list[Any] = []
    trainer = threading.Thread(target=lambda: outcome.append(scheduler.take_batch(SOON)))
    trainer.start()
    pool.of(0).finish()
    pool.of(1).fail(TrajectoryFailed("odd"))
    trainer.join(SOON)
    assert outcome == [None]


class Torn(Rows):
    """Each third row cannot be had."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index % 3 == 0:
            raise ValueError(f"row {index} is torn")
        return super().__getitem__(index)


def test_row_that_cannot_be_had_costs_its_group_and_no_attempt(start: Any) -> None:
    pool = ScriptedPool(finish_at_once)
    scheduler = start(new_scheduler(new_ledger(b=2), make_source(9, kind=Torn), pool, group_size=2))
    while train(scheduler) is not None:
        pass
    assert {call.group.prompt.index for call in pool.calls} == {1, 2, 4, 5, 7, 8}
    counts = scheduler.ledger.counts()
    assert (counts.issued, counts.trained, counts.failed) == (9, 6, 3)


class AllTorn(Rows):
    def __getitem__(self, index: int) -> dict[str, Any]:
        raise ValueError("all torn")


def test_rows_none_of_which_can_be_had_end_the_run_with_their_words(start: Any) -> None:
    scheduler = start(new_scheduler(new_ledger(b=2), make_source(9, kind=AllTorn), ScriptedPool(finish_at_once)))
    with pytest.raises(RolloutFailed, match=r"failed in a row.*row [0-9] of the data set: ValueError: all torn"):
        scheduler.take_batch(SOON)


def test_snapshot_keeps_ready_groups_runs_running_ones_again_and_loses_no_prompt(start: Any) -> None:
    pool = ScriptedPool()
    ledger = new_ledger(b=2, bound=1, depth=1)
    first = new_scheduler(ledger, make_source(10, epochs=2, seed=3), pool)
    start(first)
    for group in (0, 1, 3):
        pool.of(group).finish()
    wait_until(first, lambda: ledger.counts().ready == 3)
    assert train(first) == [0, 1]
    pool.began(6)
    settled(first)
    snapshot = first.snapshot(SOON)
    first.stop(SOON)

    resumed_pool = ScriptedPool()
    source = make_source(10, epochs=2, seed=3)
    source.restore(snapshot["source"])
    resumed = SampleLedger.restore(snapshot["ledger"], ledger.settings)
    second = new_scheduler(resumed, source, resumed_pool)
    second.restore_groups(snapshot["groups"])
    start(second)
    assert [call.group.id for call in resumed_pool.began(3)] == [2, 4, 5], "restored groups go first"
    assert resumed.find(3).state == "ready"
    resumed_pool.of(2).finish()
    batch = second.take_batch(SOON)
    assert {run.group.id: run.payloads for run in batch} == {2: ["payload-2-0-0"], 3: ["payload-3-0-0"]}
    second.batch_trained()
    second.version_sealed()
    second.version_announced()
    resumed_pool._answer = finish_at_once
    for call in list(resumed_pool.calls):
        call.finish()
    while train(second) is not None:
        pass
    assert resumed.trained_prompts() == [[0, 0, 10], [1, 0, 10]]
    resumed.check_identity()


def test_restored_group_goes_on_with_what_is_unfinished_from_its_records_and_keeps_its_start(start: Any) -> None:
    pool, ledger = ScriptedPool(), new_ledger(b=1, bound=2, depth=2)
    first = start(new_scheduler(ledger, make_source(9), pool, group_size=2, slots=4))
    pool.began(4)
    pool.of(0, 0).finish()
    pool.of(0, 1).finish()
    assert train(first) == [0]
    pool.of(1, 0).finish(version=0)
    pool.of(2)
    wait_until(first, lambda: first._runs[1].trajectories[0].payload is not None)
    kept, under_way = TrajectoryRecord(b"cut once", 5, 0), TrajectoryRecord(b"under way", 7, 3)
    pool.kept = {"1-1-0": kept, "2-0-0": under_way, "2-1-0": None}
    pool.account = TokenAccount(cut=9)
    saved = first.snapshot(SOON)
    assert saved["interrupted_tokens"] == {"cut": 12, "trained": 0, "lost": 0, "cached": 12}
    first.stop(SOON)

    again = ScriptedPool()
    source = make_source(9)
    source.restore(saved["source"])
    resumed = SampleLedger.restore(saved["ledger"], ledger.settings)
    second = new_scheduler(resumed, source, again, group_size=2, slots=3)
    second.restore_groups(saved["groups"])
    start(second)
    # One slot for the group that has an answer, two for the next: no group of two fits beside them.
    assert [call.key for call in again.began(3)] == ["1-1-0", "2-0-0", "2-1-0"]
    settled(second)
    assert again.records == {"1-1-0": kept, "2-0-0": under_way, "2-1-0": None}
    assert [resumed.find(group).start for group in (1, 2)] == [0, ledger.find(2).start]
    # What no worker has told of since is as it was.
    assert second.snapshot(SOON)["groups"][2]["kept"] == [under_way, None]
    again.of(1, 1).finish(version=0)
    assert [run.payloads for run in second.take_batch(SOON)] == [["payload-1-0-0", "payload-1-1-0"]]
    assert second.batch_trained().max == 1


def test_attempt_that_fails_with_a_record_begins_again_without_it(start: Any) -> None:
    pool, ledger = ScriptedPool(), new_ledger(bound=0, depth=0)
    first = start(new_scheduler(ledger, make_source(9), pool))
    pool.of(0)
    pool.kept = {"0-0-0": TrajectoryRecord(b"", 5, 0)}
    saved = first.snapshot(SOON)
    first.stop(SOON)
    again, source = ScriptedPool(), make_source(9)
    source.restore(saved["source"])
    second = new_scheduler(SampleLedger.restore(saved["ledger"], ledger.settings), source, again)
    second.restore_groups(saved["groups"])
    start(second)
    again.of(0).fail(TrajectoryFailed("it cannot go on"))
    again.of(0, attempt=1).finish()
    assert train(second) == [0]
    assert again.records == {"0-0-0": pool.kept["0-0-0"], "0-0-1": None}


def test_stop_ends_trajectories_in_flight_at_once(start: Any) -> None:
    pool = ScriptedPool()
    pool.cancels_reach = False
    scheduler = start(new_scheduler(new_ledger(b=4), make_source(20), pool, group_size=2))
    calls = pool.began(8)
    began = time.monotonic()
    scheduler.stop(SOON)
    assert time.monotonic() - began < SOON / 2
    assert not scheduler._thread.is_alive
    assert asyncio.all_tasks(scheduler._thread.loop) == set()
    assert all(call.cancelled for call in calls)


def test_metrics_tell_what_runs_and_what_interruptions_cost(start: Any) -> None:
    pool = ScriptedPool()
    scheduler = start(new_scheduler(new_ledger(b=2), make_source(4), pool, slots=4))
    pool.of(0).finish()
    pool.of(1).generate()
    wait_until(scheduler, lambda: scheduler.ledger.counts().ready == 1 and scheduler.manager.running == 2)
    pool.began(4)
    metrics = scheduler.metrics()
    assert metrics["fully_async/rollouter/generating_trajectories"] == 2
    assert (metrics["fully_async/rollouter/groups_running"], metrics["fully_async/rollouter/groups_ready"]) == (3, 1)
    assert 0 < metrics["fully_async/rollouter/occupancy"] <= 1


class Sized(Rows):
    """Rows that say how many trajectories their groups have, from 1 to 9, and one that does not."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "__rollout_n__": float(index) if 0 < index < 10 else float("nan")}


@pytest.mark.parametrize("kind", [Rows, Sized])
@pytest.mark.parametrize("seed", range(8))
def test_random_schedule_trains_every_prompt_exactly_once_or_counts_its_failure(
    start: Any, seed: int, kind: type[Rows]
) -> None:
    rng = random.Random(seed)
    b, k, bound = rng.randint(1, 3), rng.randint(1, 3), rng.randint(0, 3)
    failing = rng.choice((0.0, 0.0, 0.1))

    def answer(call: ScriptedCall) -> None:
        generated, rewarded = rng.random() / 100, rng.random() / 100
        if rng.random() < failing:
            call._pool.loop.call_later(generated, call.fail, TrajectoryFailed("odd"))
            return
        version = rng.randint(call.group.start, ledger.version)
        call._pool.loop.call_later(generated, call.generate, version)
        call._pool.loop.call_later(generated + rewarded, call.reward)

    ledger = new_ledger(b=b, k=k, bound=bound, depth=rng.random() * bound)
    pool = ScriptedPool(answer)
    size = rng.randint(1, 3)
    source = make_source(10 * b, epochs=2, seed=seed, kind=kind)
    scheduler = start(
        new_scheduler(ledger, source, pool, slots=size * rng.randint(1, 8), group_size=size, failures=1000)
    )
    while train(scheduler) is not None:
        pass
    counts = ledger.counts()
    ledger.check_identity()
    assert counts.trained + counts.failed + counts.live == counts.issued
    assert ledger.staleness.max <= bound
    assert counts.live < b
    if not failing:
        assert ledger.trained_prompts() == [[0, 0, 10 * b], [1, 0, 10 * b]]
    trained = [(epoch, index) for epoch, first, end in ledger.trained_prompts() for index in range(first, end)]
    assert len(trained) == len(set(trained)) == counts.trained
    of_groups: dict[int, set[int]] = {}
    for call in pool.calls:
        of_groups.setdefault(call.group.prompt.index, set()).add(call.n)
    if not failing:
        usual = {index: index if kind is Sized and 0 < index < 10 else size for index in range(10 * b)}
        assert of_groups == {index: set(range(count)) for index, count in usual.items()}


def test_groups_of_other_sizes_are_in_a_snapshot_and_go_on(start: Any) -> None:
    pool, ledger = ScriptedPool(), new_ledger(b=4, bound=2, depth=1)
    first = start(new_scheduler(ledger, make_source(9, kind=Sized), pool, group_size=2, slots=8))
    pool.of(1).finish()
    for n in range(2):
        pool.of(2, n).finish()
    settled(first)
    saved = first.snapshot(SOON)
    first.stop(SOON)
    assert [len(saved["groups"][group]["payloads"]) for group in range(4)] == [2, 1, 2, 3]
    assert [len([each for each in saved["groups"][group]["payloads"] if each]) for group in range(4)] == [0, 1, 2, 0]

    again, source = ScriptedPool(finish_at_once), make_source(9, kind=Sized)
    source.restore(saved["source"])
    resumed = SampleLedger.restore(saved["ledger"], ledger.settings)
    second = new_scheduler(resumed, source, again, group_size=2, slots=8)
    second.restore_groups(saved["groups"])
    start(second)
    batch = second.take_batch(SOON)
    assert {run.group.id: len(run.payloads) for run in batch} == {0: 2, 1: 1, 2: 2, 3: 3}
    assert not [call for call in again.calls if call.group.id in (1, 2)], "their answers are there"


class Unsized(Rows):
    """Each third row asks for no number of trajectories that there is."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        wrong = [0, 2.5, "four", None, -1, float("inf")]
        return {**super().__getitem__(index), "__rollout_n__": wrong[index // 3] if index % 3 == 0 else 2}


def test_a_number_of_trajectories_that_is_none_costs_its_own_group(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pool = ScriptedPool(finish_at_once)
    scheduler = start(new_scheduler(new_ledger(b=2), make_source(18, kind=Unsized), pool, failures=9))
    while train(scheduler) is not None:
        pass
    # No batch can form with the last prompt, so the trainer does not wait for it.
    wait_until(scheduler, lambda: scheduler.ledger.counts().issued == 18)
    counts = scheduler.ledger.counts()
    # The fourth of the wrong ones, None, is that of a row without the column.
    assert (counts.issued, counts.failed) == (18, 5)
    assert "__rollout_n__ has 2.5, which is not a whole number of at least 1" in caplog.text


def test_policy_that_raises_ends_the_run_with_its_words(start: Any) -> None:
    class Broken(OldestReady):
        def next_batch(self, ready: Any) -> Any:
            raise ValueError("no such group")

    scheduler = start(
        new_scheduler(new_ledger(policy=Broken()), make_source(4), ScriptedPool(lambda call: call.finish()))
    )
    with pytest.raises(RolloutFailed, match=r"PolicyError: .*Broken\.next_batch raised ValueError: no such group"):
        scheduler.take_batch(SOON)


def test_policy_chooses_among_the_prompts_at_hand_and_each_is_issued_once(start: Any) -> None:
    class Last(OldestReady):
        at_hand = 3

        def next_prompt(self, prompts: Any) -> int | None:
            return len(prompts) - 1

    pool = ScriptedPool(lambda call: call.finish())
    scheduler = start(new_scheduler(new_ledger(b=2, bound=2, depth=2, policy=Last()), make_source(4), pool))
    trained = []
    while (batch := scheduler.take_batch(SOON)) is not None:
        trained += [run.group.prompt.index for run in batch]
        scheduler.batch_trained()
        scheduler.version_sealed()
        scheduler.version_announced()
    assert sorted(trained) == [0, 1, 2, 3]

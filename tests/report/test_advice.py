# SPDX-License-Identifier: Apache-2.0
"""The greatest loss of a run is named first, with a setting that is about it, whatever waits it makes elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_engine.core.prompt_manager import Why
from recipe.async_engine.record.events import (
    EMPTY,
    LOG_PROBS,
    ROLLOUT,
    SCHEDULER,
    TRAINER,
    Away,
    Class,
    Devices,
    Event,
)
from recipe.report.account import KINDS, Account, DeviceAccount, Kind, close, meanwhile, pieces
from recipe.report.advice import RULES, WITHOUT_WORK, Advice, Facts, advise, charged

SETTINGS = {
    "max_staleness": 1,
    "pipeline_depth": 1.0,
    "trigger_parameter_sync_step": 4,
    "publish": "beside",
    "rollout_replicas": 1,
    "engine_places": 64,
    "max_num_seqs": 64,
    "concurrent_samples_per_replica": None,
}
ENGINE, OTHER, AGENT = f"{ROLLOUT} 0", f"{ROLLOUT} 1", "agents 0"
DEVICES = Devices({TRAINER: 1, ROLLOUT: 1, LOG_PROBS: 1})

Step = list[tuple[str, str, float, float]]
"""What happens within a step: lane, what, from and to; a third word of ``what`` is the share."""

SYNC = [(TRAINER, "wait", 0, 7), (TRAINER, "update", 7, 10), (SCHEDULER, Why.GENERATING, 0, 10)]

CAUSES: dict[str, tuple[Step, dict[str, Any], Class, str]] = {
    "slow rewards": (
        [
            (TRAINER, "wait", 0, 7),
            (TRAINER, "update", 7, 10),
            (SCHEDULER, Why.LAST_OF_GATE, 0, 2),
            (SCHEDULER, Why.REWARD, 2, 7),
            (SCHEDULER, Why.GATE, 7, 10),
            (ENGINE, Class.DECODING, 0, 2),
            (ENGINE, EMPTY, 2, 10),
            (AGENT, Away.REWARD, 2, 7),
        ],
        {"reward_processes": 1},
        Class.WAIT_REWARD,
        "reward_processes 1 -> 2",
    ),
    "a slow sync, beside training": (
        [*SYNC, (ENGINE, Class.WAIT_WEIGHTS, 0, 6), (ENGINE, Class.DECODING, 6, 10)],
        {},
        Class.WAIT_WEIGHTS,
        "trigger_parameter_sync_step 4 -> 8",
    ),
    "a slow sync, inline": (
        [
            (TRAINER, "sync", 0, 5),
            (TRAINER, "update", 5, 10),
            (SCHEDULER, Why.GATE, 0, 5),
            (SCHEDULER, Why.GENERATING, 5, 10),
            (ENGINE, EMPTY, 0, 5),
            (ENGINE, Class.DECODING, 5, 10),
        ],
        {"publish": "inline"},
        Class.WAIT_WEIGHTS,
        "weights.publish inline -> beside",
    ),
    "a drain": (
        [*SYNC, (ENGINE, Class.WAIT_WEIGHTS, 0, 6), (ENGINE, Class.DECODING, 6, 10)],
        {"at_swap": "drain"},
        Class.WAIT_WEIGHTS,
        "weights.at_swap drain -> interrupt",
    ),
    "a gate that is too tight": (
        [
            (TRAINER, "wait", 0, 6),
            (TRAINER, "update", 6, 10),
            (SCHEDULER, Why.GENERATING, 0, 6),
            (SCHEDULER, Why.GATE, 6, 10),
            (ENGINE, Class.DECODING, 0, 6),
            (ENGINE, EMPTY, 6, 10),
        ],
        {"max_staleness": 0, "pipeline_depth": 0},
        Class.WAIT_GATE,
        "max_staleness 0 -> 1",
    ),
    "a depth below the bound": (
        [
            (TRAINER, "wait", 0, 6),
            (TRAINER, "update", 6, 10),
            (SCHEDULER, Why.GENERATING, 0, 6),
            (SCHEDULER, Why.GATE, 6, 10),
            (ENGINE, Class.DECODING, 0, 6),
            (ENGINE, EMPTY, 6, 10),
        ],
        {"max_staleness": 3},
        Class.WAIT_GATE,
        "staleness_threshold 1 -> 1.5",
    ),
    "training that is the slower side": (
        [
            (TRAINER, "update", 0, 10),
            (SCHEDULER, Why.GENERATING, 0, 4),
            (SCHEDULER, Why.GATE, 4, 10),
            (ENGINE, Class.DECODING, 0, 4),
            (ENGINE, EMPTY, 4, 10),
        ],
        {},
        Class.WAIT_GATE,
        "trainer.n_gpus_per_node up",
    ),
    "a tail": (
        [
            (TRAINER, "wait", 0, 8),
            (TRAINER, "update", 8, 10),
            (SCHEDULER, Why.GENERATING, 0, 2),
            (SCHEDULER, Why.LAST_OF_GATE, 2, 8),
            (SCHEDULER, Why.GENERATING, 8, 10),
            (ENGINE, Class.DECODING, 0, 2),
            (ENGINE, f"{Class.DECODING} 0.1", 2, 8),
            (ENGINE, f"{Class.IDLE_PLACES} 0.9", 2, 8),
            (ENGINE, Class.DECODING, 8, 10),
        ],
        {},
        Class.WAIT_TAIL,
        "max_staleness 1 -> 2",
    ),
    "generation that is the slower side": (
        [*SYNC, (ENGINE, Class.DECODING, 0, 10)],
        {},
        Class.WAIT_BATCH,
        "placement=elastic, which lends the trainer's accelerators while it waits; or more accelerators for the",
    ),
    "generation that is the slower side, in whole batches": (
        [*SYNC, (ENGINE, Class.DECODING, 0, 10)],
        {"whole_batches": True},
        Class.WAIT_BATCH,
        "more accelerators for the rollout: rollout.n_gpus_per_node up",
    ),
    "too few slots": (
        [*SYNC, (ENGINE, Class.DECODING, 0, 10)],
        {"concurrent_samples_per_replica": 1, "engine_places": 8},
        Class.WAIT_BATCH,
        "concurrent_samples_per_replica 1 -> null",
    ),
    "slots whose next answer comes from far": (
        [*SYNC, (ENGINE, f"{Class.DECODING} 0.4", 0, 10), (ENGINE, f"{Class.IDLE_PLACES} 0.6", 0, 10)],
        {"concurrent_samples_per_replica": 16},
        Class.IDLE_PLACES,
        "concurrent_samples_per_replica 16 -> null",
    ),
    "slow tools": (
        [*SYNC, (ENGINE, EMPTY, 0, 7), (ENGINE, Class.DECODING, 7, 10), (AGENT, Away.TOOLS, 0, 7)],
        {},
        Class.WAIT_TOOLS,
        "quicker tools",
    ),
    "slow agent loops": (
        [*SYNC, (ENGINE, EMPTY, 0, 7), (ENGINE, Class.DECODING, 7, 10)],
        {},
        Class.WAIT_AGENTS,
        "agent.num_workers",
    ),
    "slow prompts": (
        [
            (TRAINER, "wait", 0, 7),
            (TRAINER, "update", 7, 10),
            (SCHEDULER, Why.PROMPTS, 0, 7),
            (SCHEDULER, Why.GENERATING, 7, 10),
            (ENGINE, EMPTY, 0, 7),
            (ENGINE, Class.DECODING, 7, 10),
        ],
        {},
        Class.WAIT_PROMPTS,
        "dataloader_num_workers",
    ),
    "slow validation": (
        [
            (TRAINER, "validate", 0, 6),
            (TRAINER, "update", 6, 10),
            (SCHEDULER, Why.GATE, 0, 6),
            (SCHEDULER, Why.GENERATING, 6, 10),
            (ENGINE, f"{Class.VALIDATING} 0.2", 0, 6),
            (ENGINE, f"{Class.IDLE_PLACES} 0.8", 0, 6),
            (ENGINE, Class.DECODING, 6, 10),
        ],
        {},
        Class.WAIT_VALIDATION,
        "test_freq",
    ),
    "slow checkpoints": (
        [
            (TRAINER, "save", 0, 6),
            (TRAINER, "update", 6, 10),
            (SCHEDULER, Why.GATE, 0, 6),
            (SCHEDULER, Why.GENERATING, 6, 10),
            (ENGINE, EMPTY, 0, 6),
            (ENGINE, Class.DECODING, 6, 10),
        ],
        {},
        Class.WAIT_CHECKPOINT,
        "save_freq",
    ),
    "a slow driver": (
        [
            (TRAINER, "train", 0, 6),
            (TRAINER, "update", 6, 10),
            (SCHEDULER, Why.GATE, 0, 6),
            (SCHEDULER, Why.GENERATING, 6, 10),
            (ENGINE, EMPTY, 0, 6),
            (ENGINE, Class.DECODING, 6, 10),
        ],
        {},
        Class.WAIT_DRIVER,
        "require_batches",
    ),
    "slow log-prob servers": (
        [
            (TRAINER, "wait", 0, 5),
            (TRAINER, "scores", 5, 7),
            (TRAINER, "update", 7, 10),
            (SCHEDULER, Why.REWARD, 0, 5),
            (SCHEDULER, Why.GENERATING, 5, 10),
            (ENGINE, EMPTY, 0, 5),
            (ENGINE, Class.DECODING, 5, 10),
            (AGENT, Away.LOG_PROBS, 0, 5),
            (f"{LOG_PROBS} 0", Class.LOG_PROBS, 0, 10),
        ],
        {},
        Class.WAIT_LOG_PROBS,
        "model_engine_server",
    ),
    "log-probs by the trainer": (
        [(TRAINER, "log_probs", 0, 5), (TRAINER, "update", 5, 10), *SYNC[2:], (ENGINE, Class.DECODING, 0, 10)],
        {},
        Class.LOG_PROBS,
        "proximal_log_probs",
    ),
    "attempts that fail": ([*SYNC, (ENGINE, Class.RETRY, 0, 10)], {}, Class.RETRY, "log"),
    "answers that are cut": ([*SYNC, (ENGINE, Class.RE_PREFILL, 0, 10)], {}, Class.RE_PREFILL, "keep"),
    "a device that is missed": ([*SYNC, (ENGINE, Class.DOWN, 0, 10)], {}, Class.DOWN, "max_replica_restarts"),
}


def facts_of(step: Step, settings: dict[str, Any], times: int = 3, scale: float = 1.0) -> Facts:
    """Of a run of so many steps, ``scale`` times 10 seconds each."""
    events = []
    for number in range(times):
        for lane, what, start, end in step:
            name, _, share = what.rpartition(" ") if what[-1].isdigit() else (what, "", "1")
            events.append(Event(lane, name, scale * (10 * number + start), scale * (10 * number + end), float(share)))
    until = scale * 10 * times
    found = list(pieces(events, DEVICES, until))
    account = close(events, DEVICES, until, found=found)
    assert account.closes
    return Facts(account, SETTINGS | settings, meanwhile(found, DEVICES))


@pytest.mark.parametrize("cause", CAUSES)
def test_a_planted_cause_is_named_first(cause: str) -> None:
    step, settings, what, setting = CAUSES[cause]
    first = advise(facts_of(step, settings))[0]
    assert first.what is what, first
    assert setting in first.change


@given(st.sampled_from(sorted(CAUSES)), st.integers(1, 4), st.floats(0.01, 500))
def test_a_cause_is_named_first_however_long_and_however_many_steps_are(cause: str, times: int, scale: float) -> None:
    step, settings, what, _ = CAUSES[cause]
    facts = facts_of(step, settings, times, scale)
    assert advise(facts)[0].what is what
    running = sum(seconds for name, seconds in facts.account.total.items() if name != Class.START_UP)
    assert sum(charged(facts).values()) == pytest.approx(running)


@given(
    st.dictionaries(st.sampled_from(list(Class)), st.floats(0, 50)),
    st.dictionaries(st.sampled_from(list(Class)), st.floats(0, 50)),
)
def test_advice_is_of_what_was_lost_the_greatest_first(
    trainer: dict[Class, float], rollout: dict[Class, float]
) -> None:
    devices = {
        name: DeviceAccount(1, sum(seconds.values()), {str(what): value for what, value in seconds.items()})
        for name, seconds in ((TRAINER, trainer), (ENGINE, rollout))
    }
    found = advise(Facts(Account(100.0, devices), SETTINGS))
    assert [advice.seconds for advice in found] == sorted((advice.seconds for advice in found), reverse=True)
    for advice in found:
        assert advice.what is not Class.START_UP
        classes = WITHOUT_WORK if "training is the slower side" in advice.reason else [advice.what]
        assert advice.seconds <= sum(trainer.get(what, 0.0) + rollout.get(what, 0.0) for what in classes) + 1e-9
        assert 0 < advice.share <= 1 + 1e-9


def test_a_slow_engine_is_named_before_what_the_others_wait_for() -> None:
    step = [
        (TRAINER, "wait", 0, 8),
        (TRAINER, "update", 8, 10),
        (SCHEDULER, Why.LAST_OF_GATE, 0, 10),
        (ENGINE, Class.DECODING, 0, 4),
        (ENGINE, EMPTY, 4, 10),
        (OTHER, Class.DECODING, 0, 10),
    ]
    facts = facts_of(step, {})
    even = Facts(facts.account, facts.settings, facts.meanwhile, {ENGINE: 100.0, OTHER: 90.0})
    assert advise(even)[0].what is Class.WAIT_TAIL
    slow = Facts(facts.account, facts.settings, facts.meanwhile, {ENGINE: 100.0, OTHER: 40.0})
    first, *others = advise(slow)
    assert (first.what, first.device) == (Class.DECODING, OTHER)
    assert "40%" in first.reason
    assert Class.WAIT_TAIL not in {advice.what for advice in others}


def test_start_up_is_no_loss_and_small_ones_are_not_named() -> None:
    assert advise(facts_of([(TRAINER, "update", 0, 10), *SYNC[2:], (ENGINE, Class.DECODING, 0, 10)], {})) == []
    events = [
        Event(TRAINER, "update", 90, 99),
        Event(TRAINER, "wait", 99, 99.2),
        Event(ENGINE, Class.DECODING, 0, 99.2),
    ]
    assert advise(Facts(close(events, DEVICES, 99.2), SETTINGS)) == []


def test_log_prob_servers_that_are_there_are_not_advised() -> None:
    step, settings, _, _ = CAUSES["log-probs by the trainer"]
    found: list[Advice] = advise(facts_of([*step, (f"{LOG_PROBS} 0", Class.LOG_PROBS, 0, 10)], settings))
    assert Class.LOG_PROBS not in {advice.what for advice in found}


def test_every_loss_that_a_setting_can_change_has_a_rule_and_a_planted_cause() -> None:
    losses = {what for what, kind in KINDS.items() if kind in (Kind.REPEATED, Kind.WAITING, Kind.IDLE, Kind.DOWN)}
    # A log-prob server without work, and the end of the run.
    assert losses - RULES.keys() == {Class.WAIT_REQUESTS, Class.WAIT_END}
    planted = {what for _, _, what, _ in CAUSES.values()}
    assert RULES.keys() - planted == {Class.LOST, Class.WAIT_OTHER_SIDE, Class.WAIT_SWITCH}

# SPDX-License-Identifier: Apache-2.0
"""The greatest loss of a run is named first, with a setting that is about it."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_engine.core.account import KINDS, Account, DeviceAccount, Kind
from recipe.async_engine.core.events import LOG_PROBS, ROLLOUT, TRAINER, Class
from recipe.report.advice import RULES, advise

SETTINGS = {"max_staleness": 1, "pipeline_depth": 1.0, "trigger_parameter_sync_step": 4, "publish": "beside"}


def account(trainer: dict[Class, float], rollout: dict[Class, float], **others: dict[Class, float]) -> Account:
    sides = {TRAINER: trainer, f"{ROLLOUT} 0": rollout, **{f"{name} 0": seconds for name, seconds in others.items()}}
    devices = {
        name: DeviceAccount(1, sum(seconds.values()), {str(what): value for what, value in seconds.items()})
        for name, seconds in sides.items()
    }
    return Account(100.0, devices)


def first(account_of: Account, **settings: Any) -> tuple[str, Class, str]:
    found = advise(account_of, SETTINGS | settings)[0]
    return found.side, found.what, found.change


@pytest.mark.parametrize(
    ("trainer", "rollout", "settings", "side", "what", "setting"),
    [
        ({Class.TRAINING: 50, Class.WAIT_BATCH: 50}, {Class.DECODING: 100}, {}, TRAINER, Class.WAIT_BATCH, "rollout."),
        (
            {Class.TRAINING: 80, Class.WAIT_BATCH: 20},
            {Class.DECODING: 70, Class.WAIT_GATE: 30},
            {},
            ROLLOUT,
            Class.WAIT_GATE,
            "max_staleness 1 -> 2",
        ),
        (
            {Class.TRAINING: 80, Class.WAIT_BATCH: 20},
            {Class.DECODING: 70, Class.WAIT_GATE: 30},
            {"max_staleness": 3},
            ROLLOUT,
            Class.WAIT_GATE,
            "pipeline_depth 1 -> 1.5",
        ),
        (
            {Class.TRAINING: 100},
            {Class.DECODING: 50, Class.WAIT_GATE: 50},
            {},
            ROLLOUT,
            Class.WAIT_GATE,
            "trainer.n_gpus_per_node",
        ),
        (
            {Class.TRAINING: 60, Class.WAIT_WEIGHTS: 40},
            {Class.DECODING: 100},
            {"publish": "inline"},
            TRAINER,
            Class.WAIT_WEIGHTS,
            "weights.publish inline -> beside",
        ),
        (
            {Class.TRAINING: 100},
            {Class.DECODING: 60, Class.WAIT_WEIGHTS: 40},
            {"at_swap": "drain"},
            ROLLOUT,
            Class.WAIT_WEIGHTS,
            "partial_rollout",
        ),
        (
            {Class.TRAINING: 60, Class.WAIT_REWARD: 40},
            {Class.DECODING: 70, Class.WAIT_REWARD: 30},
            {"reward_processes": 1},
            TRAINER,
            Class.WAIT_REWARD,
            "reward_processes 1 -> 2",
        ),
        (
            {Class.TRAINING: 90, Class.WAIT_BATCH: 10},
            {Class.DECODING: 40, Class.IDLE_PLACES: 60},
            {"concurrent_samples_per_replica": 16, "max_concurrent_trajectories": 64, "engine_places": 64},
            ROLLOUT,
            Class.IDLE_PLACES,
            "concurrent_samples_per_replica 16 -> null",
        ),
        (
            {Class.TRAINING: 60, Class.LOG_PROBS: 40},
            {Class.DECODING: 100},
            {},
            TRAINER,
            Class.LOG_PROBS,
            "proximal_log_probs",
        ),
    ],
)
def test_a_planted_cause_is_named_first(
    trainer: dict[Class, float],
    rollout: dict[Class, float],
    settings: dict[str, Any],
    side: str,
    what: Class,
    setting: str,
) -> None:
    found = first(account(trainer, rollout), **settings)
    assert found[:2] == (side, what)
    assert setting in found[2]


def test_start_up_is_no_loss_and_small_ones_are_not_named() -> None:
    assert (
        advise(account({Class.START_UP: 500, Class.TRAINING: 99, Class.WAIT_BATCH: 1}, {Class.DECODING: 50}), {}) == []
    )


def test_log_prob_servers_that_are_there_are_not_advised() -> None:
    of_run = account(
        {Class.TRAINING: 50, Class.LOG_PROBS: 50}, {Class.DECODING: 100}, **{LOG_PROBS: {Class.LOG_PROBS: 1}}
    )
    assert advise(of_run, SETTINGS) == []


def test_every_loss_that_a_setting_can_change_has_a_rule() -> None:
    losses = {what for what, kind in KINDS.items() if kind in (Kind.REPEATED, Kind.WAITING, Kind.IDLE, Kind.DOWN)}
    # A log-prob server without work, and the end of the run.
    assert losses - RULES.keys() == {Class.WAIT_REQUESTS, Class.WAIT_END}

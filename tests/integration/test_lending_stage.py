# SPDX-License-Identifier: Apache-2.0
"""Lending without standalone replicas: when hybrid replicas wake and sleep, over the real scheduler."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_pool import SOON, ScriptedCall, new_ledger
from test_turn_scheduler import TurnPoolFake, new_turns

from recipe.async_engine.actors.replacement import Restarts
from recipe.async_engine.config.sections import AsyncTraining, Timeouts
from recipe.async_engine.core.policy import Turns
from recipe.async_engine.record.timeline import Timeline
from recipe.async_engine.rollout.kept_answers import TokenAccount
from recipe.async_engine.trainer.lending_stage import LendingStage
from recipe.async_engine.weights.hybrid_publisher import CannotRestart

SLOTS = 4


class Lending:
    """A trainer that lends all of its accelerators; a group has two answers, and the first group ends."""

    def __init__(self) -> None:
        self.pool = TurnPoolFake(self.answer)
        self.pool.account = TokenAccount(cut=5, lost=1)
        self.said = self.pool.told
        self.ledger = new_ledger(b=1, bound=2, depth=2, policy=Turns())
        self.scheduler = new_turns(self.ledger, self.pool, slots=SLOTS)
        self.hybrid = SimpleNamespace(
            replicas=["one"], live_replicas=1, checksum="sum", restarts=Restarts(1), wake=self.wake, sleep=self.sleep
        )
        self.awake = False
        training = AsyncTraining(placement="shared", timeouts=Timeouts(batch_wait=SOON, trajectory=SOON))
        plan: Any = SimpleNamespace(
            engine_places=SLOTS, rollout_replicas=1, settings=SimpleNamespace(async_training=training)
        )
        none: Any = SimpleNamespace(live_replicas=0, serving=[])
        publishing: Any = SimpleNamespace(finish=lambda metrics: None, arrived=self.arrived)
        hybrid: Any = self.hybrid
        published: Any = None
        self.stage = LendingStage(plan, self.scheduler, hybrid, none, publishing, published, Timeline(time.monotonic))
        self.metrics: dict[str, Any] = {}

    def answer(self, call: ScriptedCall) -> None:
        # Group 0 is complete when group 1 has begun, so that the end of the turn cuts group 1.
        if (call.group.id, call.n) == (1, 1):
            for n in (0, 1):
                self.pool.of(0, n).finish()

    def wake(self, version: int) -> dict[str, float]:
        self.said.append(f"wake {version}")
        self.awake = True
        if version == 1:
            for n in (0, 1):
                self.pool.of(1, n).finish()
        return {}

    def sleep(self, others_serve: bool = False) -> float:
        assert not others_serve
        self.said.append("sleep")
        self.awake = False
        return 0.5

    def arrived(self, metrics: dict[str, Any], of_sync: dict[str, float], checksum: str) -> None:
        self.said.append(f"arrived {checksum}")

    def step(self) -> None:
        """Wait for a batch, train it and publish."""
        self.stage.wait(self.metrics, is_within_version=False)
        assert not self.awake
        assert self.scheduler.take_batch(SOON) is not None
        self.scheduler.batch_trained()
        self.scheduler.version_sealed()
        self.scheduler.version_announced()


@pytest.fixture
def lending() -> Iterator[Lending]:
    found = Lending()
    found.stage.begin()
    found.scheduler.start()
    yield found
    found.scheduler.stop(SOON)


def test_engines_generate_until_a_batch_may_be_taken_and_sleep_while_it_is_trained(lending: Lending) -> None:
    lending.step()
    assert sorted(lending.said) == ["arrived sum", "go on", "hold", "sleep", "wake 0"]
    # What was cut keeps its slot, and goes on with the next version.
    assert lending.scheduler.metrics()["partial_rollout/trajectories_interrupted"] >= 2
    lending.step()
    assert lending.said.index("wake 1") == 5 and sorted(lending.said[6:]) == ["arrived sum", "go on", "hold", "sleep"]
    assert lending.metrics["partial_rollout/cut_tokens"] == 5 and lending.metrics["partial_rollout/lost_tokens"] == 1
    assert lending.metrics["partial_rollout/interrupt_seconds"] == 0.5


def test_validation_wakes_engines_between_turns_and_lets_nothing_else_go_on(lending: Lending) -> None:
    lending.step()
    lending.said.clear()
    with lending.stage.validating():
        assert lending.awake
    assert lending.said == ["wake 1", "sleep"]


def test_engine_that_cannot_be_started_again_ends_the_run(lending: Lending) -> None:
    def wake(version: int) -> dict[str, float]:
        raise CannotRestart("it died")

    lending.hybrid.wake = wake
    with pytest.raises(CannotRestart, match="it died"):
        lending.step()

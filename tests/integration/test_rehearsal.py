# SPDX-License-Identifier: Apache-2.0
"""What a rehearsal makes of what it meets, over the real publisher; replicas and trainer ranks are faked below it."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_publisher import BESIDE, Fleet, seam
from verl.workers.rollout.replica import TokenOutput

from recipe.async_engine.config.sections import Weights
from recipe.async_engine.core.errors import WeightLoadError, WeightStreamError
from recipe.async_engine.core.rehearsed import FAILED, FELL_BACK, LEFT_OUT, PASSED
from recipe.async_engine.engines.answers import Sampled
from recipe.async_engine.trainer import rehearsal as module
from recipe.async_engine.trainer.probe import Probe, RehearsalFailed
from recipe.async_engine.trainer.rehearsal import Rehearsal

__all__ = ["seam"]
INLINE, IN_PLACE = "async_training.weights.publish=inline", "async_training.weights.staging=none"
REFUSED, BROKEN = WeightLoadError("no room for a second set"), WeightStreamError("cut off")


class Rollout(SimpleNamespace):
    """verl's rollout section."""

    def __init__(self, **more: Any) -> None:
        super().__init__(
            **{
                "temperature": 1.0,
                "prompt_length": 32,
                "response_length": 32,
                "max_model_len": 216,
                "dtype": "float32",
                "enable_rollout_routing_replay": False,
                **more,
            }
        )

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def log_prob(token: int) -> float:
    return -1.0 - token % 7


class Engine:
    """Speaks for a faked replica; ``off`` is added to each log-prob, and requests that are cut come back in parts."""

    def __init__(self, replica: Any) -> None:
        self.off, self.is_silent, self.is_quick = 0.0, False, False
        self.cuts = 0
        self.sampled: dict[str, list[int]] = {}
        self.seeds: list[Any] = []
        pause = replica.abort_all_requests

        async def paused() -> None:
            self.cuts += 1
            await pause()

        replica.abort_all_requests = paused
        replica.generate, replica.sampled_since = self.generate, self.since

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> TokenOutput:
        self.seeds.append(sampling_params.get("seed"))
        tokens = self.sampled[request_id] = []
        cuts = self.cuts
        while self.is_silent:
            await asyncio.sleep(0.01)
        while len(tokens) < sampling_params["max_tokens"]:
            if self.cuts > cuts:
                return self._part(tokens, "aborted")
            tokens.append((sum(prompt_ids) + 31 * len(tokens) + sampling_params["seed"]) % 50)
            if request_id.startswith("rehearsal-") and not self.is_quick:
                await asyncio.sleep(0.002)
        return self._part(tokens, "completed")

    def _part(self, tokens: list[int], stop: str) -> TokenOutput:
        log_probs = [log_prob(token) + self.off for token in tokens]
        return TokenOutput(token_ids=list(tokens), log_probs=log_probs, stop_reason=stop, extra_fields={})

    def since(self, known: dict[str, int]) -> dict[str, Sampled]:
        return {name: Sampled(list(self.sampled[name]), [], None) for name in known if self.sampled.get(name)}


class Stage:
    """A publisher after its first publication, and the rehearsal over it."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *scripts: tuple[Any, ...],
        weights: Weights = BESIDE,
        is_server: bool = False,
        **rollout: Any,
    ) -> None:
        """``is_server``: the last one is a log-prob server."""
        self.passes = 0
        self.fakes = Fleet(*[(None, *script) for script in scripts], weights=weights)
        self.publisher = self.fakes.publisher
        self.engines = [Engine(replica) for replica in self.fakes.replicas]
        if is_server:
            self.fakes.replicas[-1].generates = False
        self.fakes.publish(0)
        monkeypatch.setattr(module.ray, "get", self._passed)
        section = Rollout(**rollout)
        self.rehearsal = Rehearsal(
            self.publisher,
            SimpleNamespace(pass_without_update=lambda data: data),
            ranks=3,
            version=0,
            probe=Probe(section, range(50), timeout_s=2.0),
            rollout=section,
            log_probs=self._computed,
            published=nullcontext,
            timeout_s=2.0,
        )

    def _passed(self, data: Any, timeout: float) -> None:
        assert data["input_ids"].is_nested
        self.passes += 1
        time.sleep(0.01)

    def _computed(self, batch: Any) -> tuple[Any, float]:
        assert len(batch) % 3 == 0
        responses = batch.batch["responses"]
        return SimpleNamespace(batch={"old_log_probs": -1.0 - (responses % 7).float()}), 0.0

    def outcomes(self) -> dict[str, str]:
        return {check.name: check.outcome for check in self.rehearsal.result.checks}


def test_everything_is_tried_and_nothing_is_left_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, (), ())
    usual = stage.publisher.known.timeout_s, stage.publisher.attempts, stage.publisher.weights
    stage.rehearsal.run()
    result = stage.rehearsal.result
    assert set(stage.outcomes().values()) == {PASSED}
    assert result.fallbacks == []
    assert result.passes == stage.passes >= 1
    assert result.difference < 1e-6
    said = {check.name: check.said for check in result.checks}
    assert said["requests go on after a swap"] == "2 answers were completed, 2 of them after an interruption"
    assert stage.fakes.routed == ["server-0", "server-1"]
    assert (stage.publisher.known.timeout_s, stage.publisher.attempts, stage.publisher.weights) == usual
    # A request without a seed would draw from what the run's own answers are drawn from.
    assert None not in stage.engines[0].seeds + stage.engines[1].seeds


def test_transfer_that_breaks_falls_back_to_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, (BROKEN,), (BROKEN,))
    stage.rehearsal.run()
    assert stage.rehearsal.result.fallbacks == [INLINE]
    assert stage.publisher.weights == replace(BESIDE, publish="inline")
    assert stage.outcomes()["weights arrive (publish=beside, staging=device)"] == FELL_BACK
    assert stage.outcomes()["weights arrive (publish=inline, staging=device)"] == PASSED
    assert stage.publisher.live_replicas == 2


def test_transfer_that_reaches_one_of_two_replicas_has_not_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, (), (BROKEN,))
    stage.rehearsal.run()
    assert stage.rehearsal.result.fallbacks == [INLINE]
    assert "replica 1 did not get the weights" in stage.rehearsal.result.checks[1].said
    assert stage.fakes.routed == ["server-0", "server-1"]


def test_engine_that_refuses_to_stage_has_its_weights_loaded_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, (REFUSED,), (REFUSED,))
    stage.rehearsal.run()
    assert stage.rehearsal.result.fallbacks == [IN_PLACE]
    assert stage.publisher.weights == replace(BESIDE, staging="none")


def test_what_fails_in_every_way_ends_the_run_and_names_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, (BROKEN,) * 9, (BROKEN,) * 9)
    with pytest.raises(RehearsalFailed, match=r"publish=inline, staging=none\): .*cut off"):
        stage.rehearsal.run()
    assert stage.rehearsal.result.fallbacks == [INLINE, IN_PLACE]
    assert list(stage.outcomes().values())[-1] == FAILED


def test_held_answers_are_no_reason_to_give_up_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    held = replace(BESIDE, at_swap="keep")
    stage = Stage(monkeypatch, (), weights=held)
    monkeypatch.setattr(stage.publisher.known, "records", [SimpleNamespace(error=REFUSED)])
    assert stage.rehearsal._fall_back() == INLINE
    assert stage.rehearsal._fall_back() is None


def test_replica_whose_log_probs_are_not_the_trainers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, (), ())
    stage.engines[1].off = 0.5
    with pytest.raises(RehearsalFailed, match=r"log-probs of replica 1 are not the trainer's.*0\.5 on average"):
        stage.rehearsal.run()
    assert stage.outcomes()["log-probs agree"] == FAILED


def test_replica_that_swapped_in_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, (), ())
    swapped = stage.fakes.replicas[0].swap

    def swap(version: int, checksum: str) -> None:
        swapped(version, checksum)
        stage.engines[0].off = 0.5

    stage.fakes.replicas[0].swap = swap
    with pytest.raises(RehearsalFailed, match="answers of replica 0 changed, though the weights did not"):
        stage.rehearsal.run()


def test_replica_that_gives_no_token_is_named_with_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, ())
    stage.engines[0].is_silent = True
    with pytest.raises(RehearsalFailed, match=r"replica 0 gave 0 of 16 tokens within 2 s .*timeouts.rehearsal"):
        stage.rehearsal.run()


def test_replica_that_dies_on_the_way_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, (), ("die",))
    with pytest.raises(RehearsalFailed, match="replicas were lost: replica 1"):
        stage.rehearsal.run()


@pytest.mark.parametrize("script", [(), (BROKEN,) * 9])
def test_log_prob_server_without_the_weights_is_said_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, script: tuple[Any, ...]
) -> None:
    stage = Stage(monkeypatch, (), script, is_server=True)
    stage.rehearsal.run()
    lacks = bool(script)
    assert stage.outcomes()["log-prob servers have the weights"] == (FELL_BACK if lacks else PASSED)
    assert ("async_training.proximal_log_probs=recompute" in stage.rehearsal.result.fallbacks) is lacks
    assert stage.publisher.weights == BESIDE
    assert stage.outcomes()["log-probs agree"] == PASSED


def test_request_that_was_over_before_it_could_be_cut_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, ())
    stage.engines[0].is_quick = True
    stage.rehearsal.run()
    assert stage.outcomes()["requests go on after a swap"] == LEFT_OUT


def test_swap_that_drains_interrupts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, (), weights=replace(BESIDE, at_swap="drain"))
    stage.rehearsal.run()
    assert stage.outcomes()["requests go on after a swap"] == LEFT_OUT
    assert not any(name.startswith("rehearsal-") for name in stage.engines[0].sampled)


def test_trainer_that_replays_the_experts_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, (), enable_rollout_routing_replay=True)
    stage.rehearsal.run()
    assert stage.outcomes()["log-probs agree"] == LEFT_OUT


def test_positions_of_a_model_with_images_have_as_many_rows_as_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, ())
    stage.rehearsal.position_rows = 4
    batch = stage.rehearsal._batch([[1, 2]], [[3]])
    assert torch.equal(batch.batch["position_ids"], torch.arange(3).expand(1, 4, 3))

# SPDX-License-Identifier: Apache-2.0
"""Which steps are profiled on which side, and when the finish hook runs; a real one is in test_trainer_features.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from recipe.async_engine.engines.reservation import Reservations
from recipe.async_engine.trainer import profile_stage
from recipe.async_engine.trainer.profile_stage import ProfileStage
from recipe.async_engine.trainer.verl_trainer import VerlTrainer


class Server:
    """A rollout server's handle; what its methods return is what `ray.get` is given."""

    def __init__(self, done: list[str], error: Exception | None) -> None:
        for name in ("start_profile", "stop_profile"):
            setattr(self, name, SimpleNamespace(remote=lambda name=name: (done.append(f"engine {name}"), error)[1]))


def gathered(answers: list[Exception | None], timeout: float) -> None:
    assert timeout == 5.0
    for error in answers:
        if error is not None:
            raise error


def profiled(
    monkeypatch: pytest.MonkeyPatch, steps: list[int] | None, *, in_a_row: bool, last: int = 5, error: Any = None
) -> list[str]:
    """What happens in a run of so many steps."""
    done: list[str] = []
    monkeypatch.setattr(profile_stage.ray, "get", gathered)
    monkeypatch.setattr(profile_stage, "generates", lambda replica: replica.generates)
    replicas: Any = [SimpleNamespace(generates=kind, servers=[Server(done, error)]) for kind in (True, False)]
    stage = ProfileStage(
        SimpleNamespace(steps=steps, profile_continuous_steps=in_a_row),
        lambda: replicas,
        lambda start, run_hook=False: done.append(
            "trainer starts" if start else "trainer stops" + (", hook" if run_hook else "")
        ),
        5.0,
    )
    for step in range(1, last + 1):
        stage.begin(step)
        stage.train(step)
        done.append(f"step {step}")
        stage.end(step, step == last)
    return done


STARTS, STOPS = ["engine start_profile", "trainer starts"], "engine stop_profile"


def test_each_step_has_its_own_trace_and_the_hook_runs_after_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert profiled(monkeypatch, [2, 3], in_a_row=False) == [
        "step 1",
        *(*STARTS, "step 2", "trainer stops", STOPS),
        *(*STARTS, "step 3", "trainer stops, hook", STOPS),
        *("step 4", "step 5"),
    ]


def test_steps_in_a_row_are_one_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    assert profiled(monkeypatch, [1, 2, 4], in_a_row=True) == [
        *(*STARTS, "step 1", "step 2", "trainer stops", STOPS),
        "step 3",
        *(*STARTS, "step 4", "trainer stops, hook", STOPS),
        "step 5",
    ]


def test_run_that_ends_within_its_profiled_steps_stops_and_runs_the_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    done = profiled(monkeypatch, [2, 3, 9], in_a_row=True, last=2)
    assert done[-3:] == ["step 2", "trainer stops, hook", STOPS]


def test_nothing_is_profiled_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for steps in (None, []):
        assert profiled(monkeypatch, steps, in_a_row=False, last=2) == ["step 1", "step 2"]


def test_engine_that_cannot_be_profiled_costs_no_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert "trainer stops, hook" in profiled(monkeypatch, [2], in_a_row=False, error=RayActorError())
    assert "may not have a trace of this step (start_profile)" in caplog.text


class Adapted(VerlTrainer):
    """A trainer of adapters with a KL term, whose reference policy is the actor without them; no process starts."""

    def __init__(self, profiled: list[str]) -> None:
        self.use_reference_policy, self.ref_in_actor, self.use_critic, self.global_steps = True, True, False, 1
        self.workers: Any = SimpleNamespace(
            start_profile=lambda **_: profiled.append("start"), stop_profile=lambda **how: profiled.append(str(how))
        )

        self.resource_pool_manager = SimpleNamespace(resource_pool_spec={})

    def _nothing(self) -> None:
        pass

    _create_worker_classes = _init_worker_groups = _nothing

    def _init_models(self) -> None:
        self.actor_rollout_wg = self.workers


def test_adapters_with_a_reference_policy_are_profiled_once() -> None:
    trainer = Adapted(profiled := [])
    trainer.start(Reservations())
    trainer.profile(start=True)
    trainer.profile(start=False, run_hook=True)
    assert profiled == ["start", "{'run_command': True}"]

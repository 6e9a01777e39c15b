# SPDX-License-Identifier: Apache-2.0
"""Which manager hands weights to the log-prob servers beside verl's v1 trainers."""

from __future__ import annotations

from types import SimpleNamespace

from recipe.async_engine.v1.trainers import SeparateAsync


def test_the_trainers_engine_serves_one_manager_which_has_the_servers_too() -> None:
    trainer = object.__new__(SeparateAsync)
    of_rollout = ["replica"]
    trainer.standalone_checkpoint_manager = SimpleNamespace(replicas=of_rollout)
    assert trainer._give_weights_to(["server"]) is None
    assert trainer.standalone_checkpoint_manager.replicas == ["replica", "server"]
    assert of_rollout == ["replica"], "the list of verl's that it was made with has other uses"

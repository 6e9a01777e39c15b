# SPDX-License-Identifier: Apache-2.0
"""A rollout engine comes in with one row and one module: real publisher, load balancer and client, another engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import ray
from engine_fleet import Trainer, make_weights
from omegaconf import OmegaConf
from second_engine import SumReplica
from test_nccl_engine import GLOO
from verl.workers.config import CheckpointEngineConfig

from recipe.async_engine.config.sections import Weights
from recipe.async_engine.config.verdicts import ENGINES
from recipe.async_engine.engines.load_balancer import CountingBalancer
from recipe.async_engine.engines.protocol import engine_class
from recipe.async_engine.rollout.client import ResumingClient
from recipe.async_engine.weights.publisher import WeightPublisher

TIMEOUT_S = 30.0


@pytest.fixture
def trainer(cluster: None) -> Iterator[Trainer]:
    trainer = Trainer(GLOO)
    yield trainer
    trainer.stop()


def answered_by(client: ResumingClient) -> tuple[int, int]:
    """The number of an answer, and the version that it names."""
    output = asyncio.run(client.generate("request", prompt_ids=[1, 2], sampling_params={}))
    return output.token_ids[0], output.extra_fields["global_steps"]


def total(version: int) -> int:
    return round(sum(float(tensor.double().sum()) for tensor in make_weights(version).values()))


def test_another_engine_gets_weights_answers_and_is_lost(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "sum", "second_engine.SumReplica")
    config = CheckpointEngineConfig(backend=GLOO.backend, custom_backend_module=GLOO.module)
    replicas: list[SumReplica] = [engine_class("sum")(rank, config, None, 1) for rank in range(2)]
    for replica in replicas:
        asyncio.run(replica.init_standalone())
    balancer = ray.remote(CountingBalancer).options(num_cpus=0).remote(servers={})
    publisher = WeightPublisher(
        config, trainer.group, replicas, balancer, TIMEOUT_S, Weights("device", "inline", "interrupt")
    )
    rollout = {"name": "sum", "prompt_length": 4, "response_length": 8}
    training = {
        "partial_rollout": True,
        "timeouts": dict.fromkeys(["generation", "batch_wait", "weight_sync", "checkpoint"], TIMEOUT_S),
        "partial_tokens_interval": None,
    }
    settings = OmegaConf.create({"async_training": training, "actor_rollout_ref": {"rollout": rollout}})
    client = ResumingClient(settings, load_balancer_handle=balancer)
    for version in (1, 2):
        publisher.publish(version)
        assert publisher.live_replicas == 2
        assert answered_by(client) == (total(version), version)
    ray.kill(replicas[0].workers[0])
    publisher.publish(3)
    assert publisher.take_lost() == replicas[:1]
    assert answered_by(client) == (total(3), 3)

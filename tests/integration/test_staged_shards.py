# SPDX-License-Identifier: Apache-2.0
"""Weights staged beside a live FSDP2 model on one and two ranks: all of them or none, on all ranks alike."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from recipe.async_engine.log_prob_servers.adapter import StagedShards
from recipe.async_engine.log_prob_servers.fsdp2_shards import FSDP2Shards
from recipe.async_engine.weights.staged import Intake, StagingRefused

RANKS_S = 120
# Not divisible by two, so that the ranks' shards differ in size.
VOCABULARY = 37
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def make_model(family: str, tied: bool, seed: int, **sizes: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, tie_word_embeddings=tied, **SHAPE | sizes)
    return AutoModelForCausalLM.from_config(config)


def stream(family: str, tied: bool, seed: int) -> dict[str, torch.Tensor]:
    """The tensors of a model as a trainer sends them: a tied head has a name of its own, or has not."""
    weights = {name: tensor.clone() for name, tensor in make_model(family, tied, seed).state_dict().items()}
    if tied and seed % 2:
        del weights["lm_head.weight"]
    return weights


class Rank:
    """A rank's sharded model with its staging."""

    def __init__(self, family: str, tied: bool, host: bool, **sizes: int) -> None:
        self.module = make_model(family, tied, seed=0, **sizes).eval()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.module.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.module, mesh=mesh)
        self.staged = StagedShards(FSDP2Shards(self.module), dist.group.WORLD, host)

    def load(self, weights: dict[str, torch.Tensor], version: int = 1) -> str | None:
        """Through one buffer that is used again for each tensor, as a transport does; returns what went wrong."""
        intake = Intake(self.staged, version)
        intake.begin()
        buffer = torch.empty(max(tensor.numel() for tensor in weights.values()))
        for name, tensor in weights.items():
            intake.take([(name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor))])
        buffer.fill_(float("nan"))
        intake.end()
        return intake.problem

    def refusal(self, weights: dict[str, torch.Tensor]) -> str:
        problem = self.load(weights)
        assert problem is not None
        with pytest.raises(StagingRefused, match="version 1 is not staged"):
            self.staged.swap(1)
        return problem

    def holds(self, weights: dict[str, torch.Tensor]) -> bool:
        state = self.module.state_dict()
        full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}
        return all(torch.equal(full[name], tensor) for name, tensor in weights.items())

    @torch.no_grad()
    def logits(self) -> torch.Tensor:
        return self.module(torch.arange(9)[None] % VOCABULARY).logits


def run_rank(rank: int, world: int, folder: str, scenario: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        scenario(rank, *arguments)
    finally:
        dist.destroy_process_group()


@pytest.fixture(params=[1, 2])
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., set[int | None]]:
    """Runs a scenario, which has the assertions, on one or two ranks, each a process; returns their exit codes."""
    context = multiprocessing.get_context("fork")

    def run(scenario: Callable[..., None], *arguments: Any) -> set[int | None]:
        settings = (request.param, str(tmp_path), scenario, arguments)
        processes = [context.Process(target=run_rank, args=(rank, *settings)) for rank in range(request.param)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(RANKS_S)
        codes = {process.exitcode for process in processes}
        for process in processes:
            process.kill()
        return codes

    return run


def scenario_load(rank: int, family: str, tied: bool, host: bool) -> None:
    member = Rank(family, tied, host)
    old, new, newer = (stream(family, tied, seed) for seed in (0, 1, 2))
    before = member.logits()
    assert member.load(new) is None
    assert member.holds(old) and torch.equal(member.logits(), before), "staging changed the live weights"
    member.staged.swap(1)
    assert member.holds(new)
    reference = make_model(family, tied, seed=1).eval()
    with torch.no_grad():
        expected = reference(torch.arange(9)[None] % VOCABULARY).logits
    assert torch.allclose(member.logits(), expected, atol=1e-6)
    assert member.load(newer, 2) is None
    member.staged.swap(2)
    assert member.holds(newer)


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_staged_weights_become_live_all_at_once(ranks: Any, family: str, tied: bool, host: bool) -> None:
    assert ranks(scenario_load, family, tied, host) == {0}


def scenario_refused(rank: int) -> None:
    member = Rank("qwen3", False, False)
    old, new = stream("qwen3", False, 0), stream("qwen3", False, 1)
    name = "model.layers.1.mlp.up_proj.weight"
    without = {key: tensor for key, tensor in new.items() if key != name}
    assert name in member.refusal(without)
    assert f"{name} has the shape (32, 15), not (32, 16)" in member.refusal(new | {name: new[name][:, :15]})
    assert "no tensor model.layers.2" in member.refusal(new | {"model.layers.2.mlp.up_proj.weight": new[name]})
    assert member.holds(old)
    assert member.load(new) is None
    member.staged.swap(1)
    assert member.holds(new)


def test_stream_that_the_model_cannot_take_is_refused_by_name_and_the_next_one_works(ranks: Any) -> None:
    assert ranks(scenario_refused) == {0}


def scenario_one_rank_cut_off(rank: int) -> None:
    member = Rank("qwen3", False, False)
    old, new = stream("qwen3", False, 0), stream("qwen3", False, 1)
    last = dist.get_world_size() - 1
    arrived = dict(list(new.items())[: 5 if rank == last else None])
    message = member.refusal(arrived)
    assert f"rank {last}: {len(new) - 5} tensors never came" in message
    assert member.holds(old)


def test_stream_that_one_rank_loses_is_refused_on_all(ranks: Any) -> None:
    assert ranks(scenario_one_rank_cut_off) == {0}


class Small(torch.nn.Module):
    """Parameters of which the second of two ranks has nothing, in shapes that cannot be copied into each other."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.offset = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1, 3))
        self.table = torch.nn.Parameter(torch.zeros(4, 3))


def scenario_empty_shards(rank: int) -> None:
    member = Rank.__new__(Rank)
    member.module = fully_shard(Small(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    member.staged = StagedShards(FSDP2Shards(member.module), dist.group.WORLD)
    new = {"scale": torch.ones(1), "offset": torch.full((1, 3), 2.0), "table": torch.rand(4, 3)}
    for name in new:
        assert name in member.refusal({key: tensor for key, tensor in new.items() if key != name})
    assert member.load(new) is None
    member.staged.swap(1)
    assert member.holds(new)


def test_parameters_of_which_a_rank_has_nothing_are_staged_and_missed_like_the_others(ranks: Any) -> None:
    assert ranks(scenario_empty_shards) == {0}

# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter beside the live one: until the swap nothing changes, and none comes under a name that one has had."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recipe.async_engine.engines.vllm.staged_adapter import AdapterName, StagedAdapter
from recipe.async_engine.weights.staged import StagingRefused

CONFIG = {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"}


class Worker:
    """vLLM's, as far as adapters go; tests/e2e/test_lora.py has the real one."""

    def __init__(self) -> None:
        self.adapters: dict[int, Any] = {}
        self.names: list[str] = []
        self.ignored: list[str] = []

    def add_lora(self, request: Any) -> bool:
        self.adapters[request.lora_int_id] = request
        self.names.append(request.lora_name)
        return True

    def ignored_parts(self, number: int) -> list[str]:
        assert number in self.adapters
        return self.ignored

    def remove_lora(self, number: int) -> bool:
        return self.adapters.pop(number, None) is not None


def tensors(value: float, layers: int = 2) -> list[tuple[str, torch.Tensor]]:
    names = [f"base_model.model.model.layers.{layer}.mlp.up_proj" for layer in range(layers)]
    shapes = {"lora_A": (2, 8), "lora_B": (6, 2)}
    return [(f"{name}.{part}.weight", torch.full(shapes[part], value)) for name in names for part in shapes]


def stage(staged: StagedAdapter, name: AdapterName, weights: list[tuple[str, torch.Tensor]]) -> None:
    staged.name = name
    staged.begin()
    for pair in weights:
        staged.load([pair])
        # The receiver's buffer is written again.
        pair[1].zero_()
    staged.complete(name.version)


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def staged(worker: Worker) -> StagedAdapter:
    """With version 1 live."""
    adapter = StagedAdapter(worker, CONFIG)
    stage(adapter, AdapterName(1, 1), tensors(1.0))
    adapter.swap(1)
    return adapter


def values(worker: Worker) -> dict[int, set[float]]:
    return {
        number: {float(value) for tensor in request.lora_tensors.values() for value in tensor.unique()}
        for number, request in worker.adapters.items()
    }


def test_the_live_adapter_stays_until_the_swap_and_is_gone_after_it(staged: StagedAdapter, worker: Worker) -> None:
    stage(staged, AdapterName(2, 2), tensors(2.0))
    assert values(worker) == {1: {1.0}}
    staged.swap(2)
    assert values(worker) == {2: {2.0}}
    assert worker.adapters[2].peft_config == CONFIG


def test_a_version_that_comes_again_has_a_name_of_its_own(staged: StagedAdapter, worker: Worker) -> None:
    for number in (2, 3):
        stage(staged, AdapterName(number, 2), tensors(2.0))
        staged.swap(2)
    assert len(worker.names) == len(set(worker.names)) == 3
    assert all("version 2" in name for name in worker.names[1:])


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (tensors(2.0)[:-1], "layers.1.mlp.up_proj.lora_B.weight"),
        (tensors(2.0)[1:], "layers.0.mlp.up_proj.lora_B.weight"),
        (
            tensors(2.0, layers=1),
            "differ from those of the previous adapter, among them base_model.model.model.layers.1.mlp.up_proj",
        ),
        ([*tensors(2.0), ("model.layers.0.mlp.up_proj.weight", torch.ones(6, 8))], "1 belong to no adapter"),
        ([], "nothing at all"),
        (tensors(float("nan")), "NaN or infinities"),
    ],
)
def test_what_is_not_the_adapter_as_a_whole_is_refused_and_changes_nothing(
    weights: list[tuple[str, torch.Tensor]], words: str, staged: StagedAdapter, worker: Worker
) -> None:
    with pytest.raises(StagingRefused, match=words):
        stage(staged, AdapterName(2, 2), weights)
    with pytest.raises(StagingRefused, match="version 2 is not staged"):
        staged.swap(2)
    assert values(worker) == {1: {1.0}}
    stage(staged, AdapterName(3, 2), tensors(2.0))
    staged.swap(2)
    assert values(worker) == {3: {2.0}}


def test_an_adapter_that_the_engine_takes_in_part_is_refused_and_gone(staged: StagedAdapter, worker: Worker) -> None:
    stage(staged, AdapterName(2, 2), tensors(2.0))
    worker.ignored = ["model.layers.0.mlp.router"]
    with pytest.raises(StagingRefused, match=r"router.*exclude_modules"):
        staged.swap(2)
    assert worker.adapters == {}

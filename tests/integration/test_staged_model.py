# SPDX-License-Identifier: Apache-2.0
"""Weights beside the live ones: what is refused, what a swap exchanges, and that the live ones are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from recipe.async_engine.weights.staged import StagingRefused
from recipe.async_engine.weights.staged_model import StagedModel

SIZE = 4


class Packed(nn.Module):
    """A layer of two parts in one parameter; its forward uses what is derived from it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, SIZE), requires_grad=False)

    def derive(self) -> None:
        packed = self.weight.sum(0)
        self.packed = packed
        self.compute = lambda: packed


class Model(nn.Module):
    """Loads by the names of files, as vLLM's models do: a part of a packed parameter reports the whole one's name."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(SIZE), requires_grad=False)
        self.head = self.embed
        self.step = nn.Parameter(torch.zeros(1, dtype=torch.int64), requires_grad=False)
        self.layer = Packed()
        self.register_buffer("scale", torch.zeros(1))
        self.register_buffer("measured", torch.zeros(1))

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        places = {"embed": self.embed, "step": self.step, "q": self.layer.weight[0], "k": self.layer.weight[1]}
        names = {"q": "layer.weight", "k": "layer.weight"}
        for name, tensor in weights:
            places[name].copy_(tensor)
        return {names.get(name, name) for name, _ in weights}

    def seen(self) -> list[float]:
        parts = self.embed, self.head, self.step, self.layer.weight, self.layer.compute(), self.layer.packed, self.scale
        return [value for part in parts for value in part.flatten().tolist()]


def finish(model: Model) -> None:
    model.layer.derive()


def weights_of(version: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(version)
    floats = {name: torch.randn(SIZE, generator=random) for name in ("embed", "q", "k")}
    return {**floats, "step": torch.tensor([version]), "scale": torch.tensor([version / 2])}


def fresh(version: int) -> Model:
    """A model that has loaded a version as an engine does at its start."""
    model, weights = Model(), weights_of(version)
    model.scale.copy_(weights.pop("scale"))
    model.load_weights(list(weights.items()))
    finish(model)
    return model


STREAMS = ["whole", "dropped", "embed", "q", "k", "step", "broken"]


def staged(copies: bool, in_host: bool = False) -> tuple[Model, StagedModel]:
    live = fresh(0)
    return live, StagedModel(live, Model(), finish, copies, in_host)


def stage(model: StagedModel, version: int, without: str | None = None) -> None:
    model.begin()
    for name, tensor in weights_of(version).items():
        if name != without:
            model.load([(name, tensor)])
    model.complete(version)


@settings(max_examples=50)
@given(
    st.booleans(),
    st.booleans(),
    st.lists(st.sampled_from(["whole", "dropped", "embed", "q", "k", "step", "broken"]), max_size=8),
)
def test_live_weights_are_those_of_the_last_swap_whatever_was_staged_since(
    copies: bool, in_host: bool, streams: list[str]
) -> None:
    live, model = staged(copies, in_host)
    current = 0
    for version, what in enumerate(streams, start=1):
        if what == "whole":
            stage(model, version)
            assert live.seen() == fresh(current).seen()
            model.swap(version)
            current = version
        elif what == "dropped":
            stage(model, version)
        elif what == "broken":
            model.begin()
            with pytest.raises(RuntimeError):
                model.load([("q", torch.zeros(SIZE + 1))])
        else:
            with pytest.raises(StagingRefused, match="did not come as a whole"):
                stage(model, version, without=what)
            with pytest.raises(StagingRefused, match=f"version {version} is not staged"):
                model.swap(version)
        assert live.seen() == fresh(current).seen()


def test_buffers_that_do_not_come_keep_what_the_engine_has_made_of_them() -> None:
    live, model = staged(copies=False)
    for version in (1, 2):
        live.measured += 1
        stage(model, version)
        model.swap(version)
        assert live.measured.item() == version


def test_only_the_staged_version_can_be_swapped_in_and_only_once() -> None:
    live, model = staged(copies=False)
    stage(model, 3)
    with pytest.raises(StagingRefused, match="version 4 is not staged; 3 is"):
        model.swap(4)
    model.swap(3)
    with pytest.raises(StagingRefused, match="version 3 is not staged"):
        model.swap(3)
    assert live.seen() == fresh(3).seen()


def test_weights_that_are_nan_are_refused() -> None:
    live, model = staged(copies=False)
    model.begin()
    weights: dict[str, Any] = weights_of(1)
    weights["k"][2] = float("nan")
    model.load(list(weights.items()))
    with pytest.raises(StagingRefused, match=r"or are NaN; among them layer\.weight"):
        model.complete(1)
    assert live.seen() == fresh(0).seen()


def test_tensors_keep_their_addresses_where_graphs_hold_them_and_move_nothing_elsewhere() -> None:
    for copies in (True, False):
        live, model = staged(copies)
        before = [live.embed.data_ptr(), live.layer.weight.data_ptr(), live.layer.packed.data_ptr()]
        stage(model, 1)
        model.swap(1)
        after = [live.embed.data_ptr(), live.layer.weight.data_ptr(), live.layer.packed.data_ptr()]
        assert (before == after) == copies


def test_from_host_memory_only_parameters_and_buffers_are_taken() -> None:
    """What is derived there would be of the wrong device."""
    live, model = staged(copies=False, in_host=True)
    before = [live.embed.data_ptr(), live.layer.weight.data_ptr()]
    spare = model._spare
    stage(model, 1)
    assert not hasattr(spare.layer, "packed")
    model.swap(1)
    assert [live.embed.data_ptr(), live.layer.weight.data_ptr()] == before
    assert live.seen() == fresh(1).seen() and not hasattr(spare.layer, "packed")

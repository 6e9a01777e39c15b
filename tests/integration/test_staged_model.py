# SPDX-License-Identifier: Apache-2.0
"""Weights beside the live ones: what is refused, what a swap exchanges, and that the live ones are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from recipe.async_engine.engines.staged_model import StagedModel
from recipe.async_engine.weights.staged import StagingRefused

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


class Router:
    """No module, and yet it reads a parameter: by itself, by a view, and by a function that has another view."""

    def __init__(self, bias: nn.Parameter) -> None:
        self.bias, self.views = bias, [bias.detach()[1:]]
        folded = bias.detach().view(2, -1)
        self.compute = lambda: folded

    def seen(self) -> list[torch.Tensor]:
        return [self.bias, *self.views, self.compute()]


class Model(nn.Module):
    """Loads by the names of files, as vLLM's models do: a part of a packed parameter reports the whole one's name."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(SIZE), requires_grad=False)
        self.head = self.embed
        self.step = nn.Parameter(torch.zeros(1, dtype=torch.int64), requires_grad=False)
        self.layer = Packed()
        self.bias = nn.Parameter(torch.zeros(SIZE), requires_grad=False)
        self.router = Router(self.bias)
        self.register_buffer("scale", torch.zeros(1))
        self.register_buffer("measured", torch.zeros(1))

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        places = {"embed": self.embed, "step": self.step, "q": self.layer.weight[0], "k": self.layer.weight[1]}
        places["bias"] = self.bias
        names = {"q": "layer.weight", "k": "layer.weight"}
        for name, tensor in weights:
            places[name].copy_(tensor)
        return {names.get(name, name) for name, _ in weights}

    def seen(self) -> list[float]:
        parts = [
            self.embed,
            self.head,
            self.step,
            self.layer.weight,
            self.layer.compute(),
            self.layer.packed,
            self.scale,
        ]
        return [value for part in parts + self.router.seen() for value in part.flatten().tolist()]


def finish(model: Model) -> None:
    model.layer.derive()


def weights_of(version: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(version)
    floats = {name: torch.randn(SIZE, generator=random) for name in ("embed", "q", "k", "bias")}
    return {**floats, "step": torch.tensor([version]), "scale": torch.tensor([version / 2])}


def fresh(version: int) -> Model:
    """A model that has loaded a version as an engine does at its start."""
    model, weights = Model(), weights_of(version)
    model.scale.copy_(weights.pop("scale"))
    model.load_weights(list(weights.items()))
    finish(model)
    return model


STREAMS = ["whole", "dropped", "embed", "q", "k", "bias", "step", "broken"]


def staged(in_host: bool = False) -> tuple[Model, StagedModel]:
    live = fresh(0)
    return live, StagedModel(live, Model(), finish, in_host)


def stage(model: StagedModel, version: int, without: str | None = None) -> None:
    model.begin()
    for name, tensor in weights_of(version).items():
        if name != without:
            model.load([(name, tensor)])
    model.complete(version)


@settings(max_examples=50)
@given(st.booleans(), st.lists(st.sampled_from(STREAMS), max_size=8))
def test_live_weights_are_those_of_the_last_swap_whatever_was_staged_since(in_host: bool, streams: list[str]) -> None:
    live, model = staged(in_host)
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
            with pytest.raises(StagingRefused, match="are incomplete or NaN"):
                stage(model, version, without=what)
            with pytest.raises(StagingRefused, match=f"version {version} is not staged"):
                model.swap(version)
        assert live.seen() == fresh(current).seen()


def test_buffers_that_do_not_come_keep_what_the_engine_has_made_of_them() -> None:
    live, model = staged()
    for version in (1, 2):
        live.measured += 1
        stage(model, version)
        model.swap(version)
        assert live.measured.item() == version


def test_only_the_staged_version_can_be_swapped_in_and_only_once() -> None:
    live, model = staged()
    stage(model, 3)
    with pytest.raises(StagingRefused, match="version 4 is not staged; the staged version is 3"):
        model.swap(4)
    model.swap(3)
    with pytest.raises(StagingRefused, match="version 3 is not staged"):
        model.swap(3)
    assert live.seen() == fresh(3).seen()


def test_weights_that_are_nan_are_refused() -> None:
    live, model = staged()
    model.begin()
    weights: dict[str, Any] = weights_of(1)
    weights["k"][2] = float("nan")
    model.load(list(weights.items()))
    with pytest.raises(StagingRefused, match=r"are incomplete or NaN, among them layer\.weight"):
        model.complete(1)
    assert live.seen() == fresh(0).seen()


def test_tensors_keep_their_addresses_which_captured_graphs_hold() -> None:
    live, model = staged()
    before = [live.embed.data_ptr(), live.layer.weight.data_ptr(), live.layer.packed.data_ptr()]
    staged_at = model._spare.embed.data_ptr()
    stage(model, 1)
    assert model._spare.embed.data_ptr() == staged_at, "it may be pinned"
    model.swap(1)
    assert [live.embed.data_ptr(), live.layer.weight.data_ptr(), live.layer.packed.data_ptr()] == before


def test_from_host_memory_only_parameters_and_buffers_are_taken() -> None:
    """What is derived there would be of the wrong device."""
    live, model = staged(in_host=True)
    before = [live.embed.data_ptr(), live.layer.weight.data_ptr()]
    spare = model._spare
    stage(model, 1)
    assert not hasattr(spare.layer, "packed")
    model.swap(1)
    assert [live.embed.data_ptr(), live.layer.weight.data_ptr()] == before
    assert live.seen() == fresh(1).seen() and not hasattr(spare.layer, "packed")


@pytest.mark.parametrize("in_host", [False, True])
def test_an_object_that_is_no_module_reads_the_weights_of_the_last_swap_and_none_that_come_later(in_host: bool) -> None:
    live, model = staged(in_host)
    router = live.router
    for version in (1, 2):
        stage(model, version)
        model.swap(version)
        # The other instance is filled with NaN here.
        model.begin()
        assert [part.tolist() for part in router.seen()] == [part.tolist() for part in fresh(version).router.seen()]


class Kernel:
    """Has the weights in a form of its own, which nobody can look into, and frees it when it goes."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._form = bytes(weight.numpy().tobytes())

    def __del__(self) -> None:
        self._form = b""

    def seen(self) -> list[float]:
        return torch.frombuffer(bytearray(self._form), dtype=torch.float32).tolist()


class Backend:
    """No module; what it derives, it derives once, as vLLM 0.24's FlashInfer does with attention sinks."""

    def __init__(self, sinks: nn.Parameter) -> None:
        self.sinks: torch.Tensor = sinks

    def derive(self) -> None:
        if self.sinks.dtype != torch.float64:
            self.sinks = self.sinks.double()
        self.kernel = Kernel(self.sinks.float())


class Derived(nn.Module):
    """Of its parameters, one is derived into an object, the other one is replaced by what has another layout."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(SIZE), requires_grad=False)
        self.weight = nn.Parameter(torch.zeros(2, SIZE), requires_grad=False)
        self.backend = Backend(self.sinks)

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        for name, tensor in weights:
            getattr(self, name).copy_(tensor)
        return {name for name, _ in weights}

    def derive(self) -> None:
        self.backend.derive()
        self.weight = nn.Parameter(self.weight.t().contiguous(), requires_grad=False)

    def seen(self) -> list[float]:
        return [*self.weight.flatten().tolist(), *self.backend.sinks.tolist(), *self.backend.kernel.seen()]


def derived_of(version: int) -> dict[str, torch.Tensor]:
    return {"sinks": torch.full((SIZE,), version / 2), "weight": torch.arange(2.0 * SIZE).view(2, SIZE) + version}


def fresh_derived(version: int) -> Derived:
    model = Derived()
    model.load_weights(list(derived_of(version).items()))
    model.derive()
    return model


def test_what_an_engine_derives_into_objects_and_other_layouts_is_that_of_each_version() -> None:
    live, spare = fresh_derived(0), Derived()
    loaded = spare.weight.data.untyped_storage()
    model = StagedModel(live, spare, Derived.derive)
    addresses = live.weight.data_ptr(), live.backend.sinks.data_ptr()
    for version in (1, 2, 3):
        model.begin()
        model.load(list(derived_of(version).items()))
        model.complete(version)
        assert loaded.nbytes() == 0, "it is kept in its other layout alone"
        assert live.seen() == fresh_derived(version - 1).seen()
        model.swap(version)
        assert live.seen() == fresh_derived(version).seen()
    assert (live.weight.data_ptr(), live.backend.sinks.data_ptr()) == addresses


def test_what_has_no_counterpart_that_it_fits_into_is_refused_by_name_before_a_swap() -> None:
    """From host memory the weights come as they were loaded, and the live ones have another layout."""
    live = fresh_derived(0)
    model = StagedModel(live, Derived(), Derived.derive, in_host=True)
    model.begin()
    model.load(list(derived_of(1).items()))
    with pytest.raises(StagingRefused, match=r"the engine's .* does not fit .*weights\.staging=none"):
        model.complete(1)
    with pytest.raises(StagingRefused, match="version 1 is not staged"):
        model.swap(1)
    assert live.seen() == fresh_derived(0).seen()


def test_a_live_parameter_that_the_other_instance_lacks_is_refused_by_name() -> None:
    live, model = staged()
    live.layer.extra = nn.Parameter(torch.ones(SIZE))
    with pytest.raises(StagingRefused, match=r"layer\.extra has no counterpart in the staged model"):
        stage(model, 1)

# SPDX-License-Identifier: Apache-2.0
"""The copy of the weights that is sent while training goes on: which version, whose bits, in what dtype and memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_engine.weights import arena
from recipe.async_engine.weights.snapshot import WeightsError, WeightSnapshot, Wire, last_parts, widest

BF16 = Wire(torch.bfloat16, frozenset({"gate.weight"}))


def model() -> dict[str, torch.Tensor]:
    """fp32 masters, a router, statistics and counters, as training engines yield them."""
    random = torch.Generator().manual_seed(3)
    return {
        "model.layers.0.mlp.up_proj.weight": torch.randn(7, 5, generator=random),
        "model.layers.0.mlp.gate.weight": torch.randn(4, 5, generator=random),
        "model.layers.0.norm.weight": torch.randn(5, generator=random).bfloat16(),
        "model.steps": torch.tensor([1 << 40]),
        "lm_head.weight": torch.randn(5, 7, generator=random).t(),
    }


def sent(snapshot: WeightSnapshot, version: int) -> dict[str, torch.Tensor]:
    with snapshot.stream(version) as weights:
        return dict(weights)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


def test_what_is_sent_is_the_version_that_was_copied_whatever_training_does_meanwhile() -> None:
    live, snapshot = model(), WeightSnapshot(is_sender=True)
    before = {name: tensor.clone() for name, tensor in live.items()}
    snapshot.take(live.items, 1, Wire())
    with snapshot.stream(1) as weights:
        for name, tensor in weights:
            for parameter in live.values():
                parameter += 1
            assert torch.equal(tensor, before[name]) and tensor.is_contiguous()
    assert list(sent(snapshot, 1)) == list(live), "a transfer that failed is tried again"


def test_masters_travel_in_the_dtype_of_the_rollout_and_what_engines_hold_wider_as_it_is() -> None:
    snapshot = WeightSnapshot(is_sender=True)
    snapshot.take(model().items, 1, BF16)
    found = sent(snapshot, 1)
    for name, tensor in model().items():
        narrows = tensor.dtype == torch.float32 and last_parts(name) != "gate.weight"
        assert same_bits(found[name], tensor.bfloat16() if narrows else tensor), name


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_narrowing_gives_the_bits_that_an_engine_would_have_stored(patterns: list[int]) -> None:
    """vLLM's loaders copy into their parameters: NaN, infinities and ties included."""
    masters = torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)
    loaded = torch.empty(len(patterns), dtype=torch.bfloat16).copy_(masters)
    snapshot = WeightSnapshot(is_sender=True)
    snapshot.take(lambda: [("weight", masters)], 1, BF16)
    assert same_bits(sent(snapshot, 1)["weight"], loaded)


def test_memory_is_used_again_for_the_next_version_where_the_tensors_are_alike() -> None:
    live, snapshot = model(), WeightSnapshot(is_sender=True)
    snapshot.take(live.items, 1, BF16)
    first = {name: tensor.data_ptr() for name, tensor in sent(snapshot, 1).items()}
    snapshot.take(live.items, 2, BF16)
    assert {name: tensor.data_ptr() for name, tensor in sent(snapshot, 2).items()} == first
    live["lm_head.weight"] = torch.full((9, 5), 7.0)
    snapshot.take(live.items, 3, BF16)
    assert same_bits(sent(snapshot, 3)["lm_head.weight"], live["lm_head.weight"].bfloat16())


def test_all_lie_in_one_piece_of_memory_of_their_size() -> None:
    """torch's own pinned memory takes up to twice as much."""
    snapshot, sizes = WeightSnapshot(is_sender=True), [3, 300, 70_000, 33]
    snapshot.take(lambda: [(str(size), torch.ones(size)) for size in sizes], 1, BF16)
    tensors = sent(snapshot, 1).values()
    pieces = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert list(pieces.values()) == [sum(-(-2 * size // 64) * 64 for size in sizes)]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)


def test_memory_is_pinned_once_as_large_as_it_is_until_its_last_tensor_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[tuple[int, int]] = []
    monkeypatch.setattr(arena, "pin_memory", lambda place, size: pinned.append((place, size)))
    monkeypatch.setattr(arena, "unpin_memory", lambda place: pinned.append((place, -1)))
    tensors = arena.in_one_piece([(torch.Size([size]), torch.bfloat16) for size in (3, 300, 33)], pinned=True)
    begin = tensors[0].data_ptr()
    gc.collect()
    del tensors[0]
    assert pinned == [(begin, 64 + 640 + 128)]
    del tensors
    gc.collect()
    assert pinned == [(begin, 64 + 640 + 128), (begin, -1)]


def test_weights_are_gone_through_once_where_they_are_as_the_last_ones_on_every_rank() -> None:
    """Each time gathers them all; how much room they need is known after the first."""
    for is_sender in (True, False):
        snapshot, times = WeightSnapshot(is_sender), []

        def export(times: list[int] = times) -> Any:
            times.append(len(times))
            return model().items()

        for version, expected in ((1, 2), (2, 3), (3, 4)):
            snapshot.take(export, version, BF16)
            assert len(times) == expected


def test_weights_whose_shapes_change_each_time_are_not_copied() -> None:
    sizes = iter(range(1, 9))
    with pytest.raises(WeightsError, match="its tensors changed shape"):
        WeightSnapshot(is_sender=True).take(lambda: [("a", torch.ones(next(sizes)))], 1, BF16)


def test_other_ranks_keep_shapes_and_dtypes_alone() -> None:
    snapshot, sender = WeightSnapshot(is_sender=False), WeightSnapshot(is_sender=True)
    for one in (snapshot, sender):
        one.take(model().items, 1, BF16)
    mine, theirs = sent(snapshot, 1), sent(sender, 1)
    assert all(tensor.is_meta for tensor in mine.values())
    assert {name: (t.shape, t.dtype) for name, t in mine.items()} == {n: (t.shape, t.dtype) for n, t in theirs.items()}


def test_tensors_are_brought_to_the_device_that_the_engine_sends_from() -> None:
    snapshot = WeightSnapshot(is_sender=True, device=torch.device("meta"))
    snapshot.take(model().items, 1, BF16)
    assert all(tensor.is_meta for tensor in sent(snapshot, 1).values())


def test_no_other_version_than_the_copied_one_is_sent_and_none_is_copied_over_one_under_way() -> None:
    snapshot = WeightSnapshot(is_sender=True)
    with pytest.raises(WeightsError, match="version 1 cannot be sent: the copy is of version None"):
        sent(snapshot, 1)
    snapshot.take(model().items, 1, BF16)
    with pytest.raises(WeightsError, match="the copy is of version 1"):
        sent(snapshot, 2)
    with snapshot.stream(1), pytest.raises(WeightsError, match=r"version 2 cannot be copied: .* version 1 is in use"):
        snapshot.take(model().items, 2, BF16)
    with snapshot.stream(1), pytest.raises(WeightsError, match=r"version 1 cannot be sent: .* is in use"):
        sent(snapshot, 1)
    sent(snapshot, 1)


def test_a_copy_that_broke_off_is_not_sent() -> None:
    def breaking() -> Any:
        yield from list(model().items())[:2]
        raise OSError("a shard is gone")

    snapshot = WeightSnapshot(is_sender=True)
    snapshot.take(model().items, 1, BF16)
    with pytest.raises(OSError, match="a shard is gone"):
        snapshot.take(breaking, 2, BF16)
    for version in (1, 2):
        with pytest.raises(WeightsError, match="the copy is of version None"):
            sent(snapshot, version)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("bfloat16",), torch.bfloat16),
        (("bfloat16", "bf16"), torch.bfloat16),
        (("bfloat16", "fp32"), torch.float32),
        (("float16", "auto"), torch.float64),
    ],
)
def test_nothing_is_narrowed_below_what_a_receiver_computes_in(names: tuple[str, ...], expected: torch.dtype) -> None:
    assert widest(*names) == expected

# SPDX-License-Identifier: Apache-2.0
"""Weights sent as what changed of them: what comes out is what went in, bit for bit, or the stream is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recipe.async_engine.core.errors import WeightStreamError
from recipe.async_engine.weights.delta import HEADER, INDEX, INTEGERS, PACKED, Base, Decoder, Sizes, decode, encode
from recipe.laptop.transfer.buckets import BucketReader, Buckets, BucketWriter

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
OTHERS = [torch.int64, torch.uint8, torch.bool]
SHARES = [0.0, 0.001, 0.02, 0.3, 1.0]
Weights = dict[str, torch.Tensor]
Stream = list[tuple[str, torch.Tensor]]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, random: torch.Generator) -> torch.Tensor:
    """Any bits: numbers, infinities, -0.0, and NaN with payloads."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=random).bool()
    count = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 256, (count,), generator=random, dtype=torch.uint8)
    return bits.view(dtype).view(shape)


def changed(weights: Weights, share: float, random: torch.Generator) -> Weights:
    """Other weights, of which about ``share`` of the values have one bit flipped."""
    after = {}
    for name, tensor in weights.items():
        after[name] = tensor.clone()
        bits = after[name].view(-1).view(INTEGERS[tensor.element_size()])
        which = torch.rand(len(bits), generator=random) < share
        bits[which] ^= 1
    return after


def bits_of(weights: Weights) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    return {
        name: (tensor.dtype, tuple(tensor.shape), bytes(tensor.reshape(-1).view(torch.uint8).numpy()))
        for name, tensor in weights.items()
    }


def through_buckets(
    stream: Iterator[tuple[str, torch.Tensor]], bucket_bytes: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """As an engine carries it: in buckets, in which tensors are views that last until the next one."""
    reader, buckets = BucketReader(None), Buckets.growing()
    for frame in BucketWriter(buckets, bucket_bytes, None).frames(stream):
        yield from reader.tensors(reader.header(frame.header.tolist()), frame.body)


def sent(stream: Iterator[tuple[str, torch.Tensor]], base: Base) -> Weights:
    decoder, arrived = Decoder(base), {}
    for name, tensor in stream:
        for out, whole in decoder.take(name, tensor):
            assert out not in arrived
            arrived[out] = whole.clone()
    decoder.finish()
    return arrived


def example(seed: int = 0, share: float = 0.02) -> tuple[Weights, Weights]:
    """Two versions."""
    random = torch.Generator().manual_seed(seed)
    shapes = {"embed": (300, 16), "norm": (16,), "scalar": (), "empty": (0, 5), "head": (7, 411)}
    before = {name: random_bits(shape, torch.bfloat16, random) for name, shape in shapes.items()}
    return before, changed(before, share, random)


def both_at(weights: Weights, version: int = 0) -> tuple[Base, Base]:
    """Sender's and receiver's, which have a version."""
    ours, theirs = Base(), Base()
    sent(encode(weights.items(), version, ours, Sizes()), theirs)
    return ours, theirs


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    tensors=st.lists(
        st.tuples(
            st.sampled_from([*FLOATS, *OTHERS]),
            st.lists(st.integers(0, 40), max_size=3).map(tuple),
            st.sampled_from(SHARES),
        ),
        min_size=1,
        max_size=6,
    ),
    bucket_bytes=st.integers(64, 5000),
)
def test_what_comes_out_is_what_went_in(
    seed: int, tensors: list[tuple[torch.dtype, tuple[int, ...], float]], bucket_bytes: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    before = {f"{n}": random_bits(shape, dtype, random) for n, (dtype, shape, _) in enumerate(tensors)}
    ours, theirs = both_at(before)
    for version in (1, 2):
        after = {}
        for (name, tensor), (_, _, share) in zip(before.items(), tensors, strict=True):
            after |= changed({name: tensor}, share, random)
        sizes = Sizes()
        stream = through_buckets(encode(after.items(), version, ours, sizes), bucket_bytes)
        assert bits_of(sent(stream, theirs)) == bits_of(after)
        assert bits_of(theirs.tensors) == bits_of(ours.tensors) == bits_of(after)
        assert (theirs.version, theirs.checksum) == (ours.version, ours.checksum) and theirs.version == version
        assert sizes.full_bytes == sum(tensor.nbytes for tensor in after.values())
        flat = [
            (a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
            for a, b in zip(before.values(), after.values(), strict=True)
        ]
        differ = [
            (a != b).view(-1, t.element_size()).any(1).sum() for (a, b), t in zip(flat, after.values(), strict=True)
        ]
        assert sizes.changed == sum(map(int, differ))
        before = after


@pytest.mark.parametrize("places", [[0], [255], [256], [257], [65_535], [65_536], [69_999], [0, 256, 512, 69_999]])
def test_gaps_that_do_not_fit_their_bytes(places: list[int]) -> None:
    before = {"one": torch.zeros(70_000, dtype=torch.int16)}
    after = {"one": torch.zeros(70_000, dtype=torch.int16)}
    after["one"][places] = 1
    ours, theirs = both_at(before)
    sizes = Sizes()
    assert bits_of(sent(encode(after.items(), 1, ours, sizes), theirs)) == bits_of(after)
    assert sizes.changed == len(places) and sizes.sent_bytes < 400 + 8 * (len(places) + 1)


@pytest.mark.parametrize(
    ("share", "least", "most"), [(0.0, 0, 0.001), (0.01, 0.015, 0.02), (0.1, 0.14, 0.16), (1, 1, 1.01)]
)
def test_size_is_what_was_sent_and_never_much_more_than_all(share: float, least: float, most: float) -> None:
    random = torch.Generator().manual_seed(1)
    before = {"one": random_bits((1000, 1000), torch.bfloat16, random)}
    ours, theirs = both_at(before)
    sizes, passed = Sizes(), []
    for name, tensor in encode(changed(before, share, random).items(), 1, ours, sizes):
        passed.append((name, tensor.clone()))
    assert all(tensor.nbytes % 16 == 0 for _, tensor in passed), "verl's nccl does not align what comes next"
    assert sizes.sent_bytes == sum(tensor.nbytes for _, tensor in passed)
    assert least <= sizes.sent_bytes / sizes.full_bytes <= most
    sent(iter(passed), theirs)


def test_members_without_a_base_get_everything_and_what_is_new_or_other_comes_in_full() -> None:
    before, after = example()
    ours, theirs = both_at(before)
    grown = {**after, "head": torch.ones(3, 3), "new": torch.ones(4)}
    del grown["norm"]
    assert bits_of(sent(encode(grown.items(), 1, ours, Sizes()), theirs)) == bits_of(grown)
    assert bits_of(theirs.tensors) == bits_of(grown)
    fresh = Base()
    assert bits_of(sent(encode(before.items(), 2, ours, Sizes(), full=True), fresh)) == bits_of(before)


def encoded(share: float = 0.02) -> tuple[Stream, Base]:
    """A stream of changes, and a receiver that has its base."""
    before, after = example(share=share)
    ours, theirs = both_at(before)
    return [(name, tensor.clone()) for name, tensor in encode(after.items(), 1, ours, Sizes())], theirs


def test_stream_against_another_base_is_refused_and_one_in_full_is_taken_after_it() -> None:
    stream, _ = encoded()
    before, after = example()
    other, same_number = both_at(example(seed=1)[0])[1], both_at(before, version=7)[1]
    for base in (Base(), other, same_number):
        with pytest.raises(WeightStreamError, match=r"sent as changes of version 0 .* sent in full"):
            sent(iter(stream), base)
        assert base.version is None
        assert bits_of(sent(encode(after.items(), 1, Base(), Sizes()), base)) == bits_of(after)
        assert base.version == 1


def test_stream_that_is_cut_off_anywhere_is_refused_and_so_is_the_next_one_of_changes() -> None:
    stream, _ = encoded()
    for length in range(len(stream)):
        _, base = encoded()
        with pytest.raises(WeightStreamError, match="cut off"):
            sent(iter(stream[:length]), base)
        assert base.version is None
        with pytest.raises(WeightStreamError, match="sent in full"):
            sent(iter(stream), base)


@pytest.mark.parametrize("harm", ["left out", "twice", "shorter", "longer", "of other numbers", "renamed"])
def test_harm_to_any_tensor_of_the_stream_is_noticed_or_changes_nothing(harm: str) -> None:
    stream, _ = encoded()
    assert [name for name, _ in stream][:2] == [HEADER, f"{PACKED}embed"] and stream[-1][0] == INDEX
    for place, (name, tensor) in enumerate(stream):
        replaced = {
            "left out": [],
            "twice": [(name, tensor)] * 2,
            "shorter": [(name, tensor.reshape(-1)[:-1])],
            "longer": [(name, torch.cat([tensor.reshape(-1), tensor.reshape(-1)[-1:]]))],
            "of other numbers": [(name, tensor.clone().reshape(-1).view(torch.uint8).fill_(255).view(tensor.dtype))],
            "renamed": [(f"{name}x", tensor)],
        }[harm]
        if harm == "of other numbers" and name not in (HEADER, INDEX) and not name.startswith(PACKED):
            continue
        with pytest.raises(WeightStreamError):
            sent(iter([*stream[:place], *replaced, *stream[place + 1 :]]), encoded()[1])


@settings(max_examples=150)
@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_flipped_bit_is_noticed_or_another_checksum_tells(place: int, bit: int) -> None:
    stream, base = encoded()
    before, after = example()
    right = both_at(before)[0]
    list(encode(after.items(), 1, right, Sizes()))
    _, tensor = stream[place % len(stream)]
    if not tensor.numel():
        return
    data = tensor.view(-1).view(torch.uint8)
    data[place % len(data)] ^= 1 << bit
    try:
        sent(iter(stream), base)
    except WeightStreamError:
        assert base.version is None
        return
    assert bits_of(base.tensors) == bits_of(after) or base.checksum != right.checksum


def test_names_of_the_streams_own_and_twice_the_same_are_refused() -> None:
    for weights in ([("a", torch.ones(1))] * 2, [(HEADER, torch.ones(1))], [(f"{PACKED}a", torch.ones(1))]):
        base = Base()
        with pytest.raises(WeightStreamError, match="cannot be sent"):
            list(encode(weights, 0, base, Sizes()))
        assert base.version is None


def test_streams_of_both_kinds_are_decoded() -> None:
    async def arriving(stream: Stream) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        for item in stream:
            yield item

    async def all_of(stream: object, base: Base) -> Weights:
        return {name: tensor.clone() async for name, tensor in decode(stream, base)}

    _, after = example()
    for way in (arriving, iter):
        stream, base = encoded()
        assert bits_of(asyncio.run(all_of(way(stream), base))) == bits_of(after)

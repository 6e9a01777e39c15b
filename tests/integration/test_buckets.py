# SPDX-License-Identifier: Apache-2.0
"""The stream format of a weight sync: what does not fit together is refused, naming tensor and version."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from recipe.async_engine.core.errors import WeightStreamError
from recipe.laptop.transfer.buckets import TEXT_BYTES, BucketReader, Buckets, BucketWriter

BUCKET_BYTES = 4096


def make_weights() -> dict[str, torch.Tensor]:
    """More than four frames; the first tensor is larger than a bucket, and another as large as one."""
    return {
        "embed": torch.randn(300, 16),
        "norm": torch.ones(16).bfloat16(),
        "scalar": torch.tensor(1.0),
        "as large as a bucket": torch.randn(BUCKET_BYTES // 4),
        "last": torch.randn(7, 3),
    }


def stream(weights: dict[str, torch.Tensor], version: int | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    buckets = Buckets.growing()
    frames = BucketWriter(buckets, BUCKET_BYTES, version).frames(weights.items())
    return [(frame.header.clone(), frame.body.clone()) for frame in frames]


def read(frames: list[tuple[torch.Tensor, torch.Tensor]], version: int | None = None) -> dict[str, torch.Tensor]:
    reader = BucketReader(version)
    got = {}
    for fields, body in frames:
        for name, tensor in reader.tensors(reader.header(fields.tolist()), body):
            got[name] = tensor.clone()
    return got


def test_stream_without_its_middle_is_refused() -> None:
    frames = stream(make_weights(), version=3)
    assert len(frames) > 4
    with pytest.raises(WeightStreamError, match=r"out of turn.*version 3"):
        read([*frames[:2], *frames[3:]], version=3)


def test_a_tensor_larger_than_a_bucket_leaves_whole_and_before_the_next_one_is_asked_for() -> None:
    weights = {"small": torch.zeros(3), "large": torch.arange(BUCKET_BYTES), "after": torch.ones(3)}
    asked: list[str] = []

    def passing() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            asked.append(name)
            yield name, tensor

    reader = BucketReader(None)
    buckets = Buckets.growing()
    arrived = []
    for frame in BucketWriter(buckets, BUCKET_BYTES, None).frames(passing()):
        for name, tensor in reader.tensors(reader.header(frame.header.tolist()), frame.body):
            assert torch.equal(tensor, weights[name])
            arrived.append((name, asked[-1]))
    assert arrived == [("small", "large"), ("large", "large"), ("after", "after")]


def test_stream_with_fewer_tensors_than_announced_is_refused() -> None:
    short = stream({"a": torch.zeros(3)})
    end = stream({"a": torch.zeros(3), "b": torch.zeros(3)})[-1]
    end[0][3] = len(short) - 1
    with pytest.raises(WeightStreamError, match="arrived"):
        read([*short[:-1], end])


@pytest.mark.parametrize("grows", [False, True])
def test_a_frame_for_which_there_is_no_memory_is_refused_with_its_size(grows: bool) -> None:
    buckets = Buckets([torch.empty(8, dtype=torch.uint8)], grows)
    assert buckets.room(3, 8).numel() == 8
    with pytest.raises(WeightStreamError, match=str(1 << 60)):
        buckets.room(0, 1 << 60)


def test_a_tensor_that_is_not_in_its_frame_is_refused_by_name() -> None:
    (fields, body), _ = stream({"there": torch.zeros(3)}, version=3)
    header = BucketReader(None).header(fields.tolist())
    for wrong in (b"[9]", b"[4]"):
        text = bytes(body[header.payload_bytes :].numpy()).replace(b"[3]", wrong)
        harmed = torch.cat((body[: header.payload_bytes], torch.frombuffer(bytearray(text), dtype=torch.uint8)))
        with pytest.raises(WeightStreamError, match=r"'there'.*version 3"):
            list(BucketReader(3).tensors(header, harmed))


@pytest.mark.parametrize(("field", "value"), [(0, 1), (1, 0), (4, -1), (5, -1), (5, TEXT_BYTES + 1)])
def test_bytes_that_are_no_frame_are_refused(field: int, value: int) -> None:
    ((fields, _), *_) = stream({"a": torch.zeros(3)})
    fields[field] = value
    with pytest.raises(WeightStreamError, match="not a weight frame"):
        BucketReader(None).header(fields.tolist())


def test_many_small_tensors_fit_the_frame_text() -> None:
    weights = {f"{'layer' * 38}{index}": torch.tensor([index]) for index in range(1500)}
    got = read(stream(weights))
    assert list(got) == list(weights)
    assert all(torch.equal(got[name], tensor) for name, tensor in weights.items())

# SPDX-License-Identifier: Apache-2.0
"""The stream format of a weight sync: what does not fit together is refused, naming tensor and version."""

from __future__ import annotations

import pytest
import torch

from recipe.async_engine.weights.buckets import TEXT_BYTES, BucketReader, BucketWriter, WeightStreamError

BUCKET_BYTES = 4096


def make_weights() -> dict[str, torch.Tensor]:
    """More than four frames, the first tensor larger than a bucket."""
    return {"embed": torch.randn(300, 16), "norm": torch.ones(16).bfloat16(), "scalar": torch.tensor(1.0)}


def stream(weights: dict[str, torch.Tensor], version: int | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    size = BUCKET_BYTES + TEXT_BYTES
    writer = BucketWriter((torch.empty(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)), version)
    return [(frame.header.clone(), frame.body.clone()) for frame in writer.frames(weights.items())]


def read(frames: list[tuple[torch.Tensor, torch.Tensor]], version: int | None = None) -> dict[str, torch.Tensor]:
    reader = BucketReader(version, BUCKET_BYTES + TEXT_BYTES)
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


def test_stream_that_ends_within_a_tensor_names_it() -> None:
    frames = stream({"big": torch.zeros(BUCKET_BYTES)}, version=3)
    end = frames[-1]
    end[0][3] = 1
    with pytest.raises(WeightStreamError, match=r"within tensor 'big'.*version 3"):
        read([frames[0], end], version=3)


def test_stream_with_fewer_tensors_than_announced_is_refused() -> None:
    short = stream({"a": torch.zeros(3)})
    end = stream({"a": torch.zeros(3), "b": torch.zeros(3)})[-1]
    end[0][3] = len(short) - 1
    with pytest.raises(WeightStreamError, match="arrived"):
        read([*short[:-1], end])


def test_frame_larger_than_the_receivers_bucket_is_refused_with_the_setting() -> None:
    ((fields, _), _) = stream({"a": torch.zeros(3)})
    with pytest.raises(WeightStreamError, match="update_weights_bucket_megabytes"):
        BucketReader(None, 8).header(fields.tolist())


def test_bytes_that_are_no_frame_are_refused() -> None:
    with pytest.raises(WeightStreamError, match="not a weight frame"):
        BucketReader(None, BUCKET_BYTES).header(list(range(6)))


def test_many_small_tensors_fit_the_frame_text() -> None:
    weights = {f"{'layer' * 38}{index}": torch.tensor([index]) for index in range(1500)}
    got = read(stream(weights))
    assert list(got) == list(weights)
    assert all(torch.equal(got[name], tensor) for name, tensor in weights.items())

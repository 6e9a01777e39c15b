# SPDX-License-Identifier: Apache-2.0
"""What a checksum of weights tells apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recipe.async_engine.weights.checksum import BLOCK_WORDS, CHECKSUM, VERSION, StreamChecksum, SummedSender

BLOCK = 8 * BLOCK_WORDS
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.float8_e4m3fn)


def checksum(weights: dict[str, torch.Tensor]) -> str:
    found = StreamChecksum()
    for name, tensor in weights.items():
        found.add(name, tensor)
    return found.value()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)


@settings(max_examples=60)
@given(st.sampled_from(TYPES), st.integers(1, 3 * BLOCK), st.data())
def test_any_bit_counts(dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    weights = {"a": torch.randn(size).to(dtype), "b": torch.randn(3, 5).to(dtype)}
    before = checksum(weights)
    changed = bits(weights["a"])
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(weights) != before


@pytest.mark.parametrize("dtype", TYPES)
def test_highest_bit_of_any_word_counts(dtype: torch.dtype) -> None:
    weights = {"a": torch.zeros(5 * BLOCK // dtype.itemsize + 3).to(dtype)}
    before, data = checksum(weights), bits(weights["a"])
    for place in range(7, len(data), 509 * 8):
        data[place] ^= 128
        assert checksum(weights) != before, place
        data[place] ^= 128


def test_where_in_a_buffer_a_tensor_lies_does_not_count() -> None:
    weights = {"a": torch.randn(3 * BLOCK).bfloat16()}
    for offset in (0, 2, 6, 8):
        buffer = torch.empty(offset + weights["a"].nbytes, dtype=torch.uint8)
        lying = buffer[offset:].view(torch.bfloat16).copy_(weights["a"])
        assert checksum({"a": lying}) == checksum(weights)


def test_order_of_arrival_and_layout_do_not_count() -> None:
    weights = {"a": torch.randn(40, 70), "b": torch.randn(()), "c": torch.empty(0, 3)}
    back = dict(reversed(weights.items()))
    back["a"] = weights["a"].T.contiguous().T
    assert not back["a"].is_contiguous()
    assert checksum(back) == checksum(weights)


@pytest.mark.parametrize("what", ["names", "shapes", "types", "blocks", "missing", "ones for zeros"])
def test_what_was_mixed_up_is_found(what: str) -> None:
    weights = {"a": torch.ones(4 * BLOCK), "b": torch.zeros(4 * BLOCK)}
    weights["a"][:BLOCK] = 2.0
    mixed = {name: tensor.clone() for name, tensor in weights.items()}
    if what == "names":
        mixed = {"a": mixed["b"], "b": mixed["a"]}
    elif what == "shapes":
        mixed["a"] = mixed["a"].view(2, -1)
    elif what == "types":
        mixed["b"] = mixed["b"].view(torch.int32)
    elif what == "blocks":
        mixed["a"] = mixed["a"].roll(BLOCK)
    elif what == "missing":
        del mixed["b"]
    else:
        mixed["b"] += 1.0
    assert checksum(mixed) != checksum(weights)


class Operations(TorchDispatchMode):
    """Counts what waits for a device, and the bytes of new tensors."""

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()
        self.waits = self.nbytes = 0
        self._storage = given.untyped_storage().data_ptr()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.waits += function is torch.ops.aten._local_scalar_dense.default
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() != self._storage:
                self.nbytes += tensor.nbytes
        return result


def test_no_tensor_is_waited_for_by_itself_or_copied() -> None:
    found, tensor = StreamChecksum(), torch.randn(64 * BLOCK).bfloat16()
    with Operations(tensor) as operations:
        for name in "abc":
            found.add(name, tensor)
        assert operations.nbytes < 3 * tensor.nbytes / 50
        found.value()
    assert operations.waits == 0, "values are read one by one"


class Launches(TorchDispatchMode):
    """Counts what a device would be asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asks_nothing = function.is_view or function._schema.name in (
            "aten::empty",
            "aten::detach",
            "aten::empty.memory",
        )
        self.count += not asks_nothing
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("size", [1, 512, BLOCK // 2, 24 * BLOCK // 2])
def test_a_device_is_asked_once_a_tensor(size: int) -> None:
    """Single experts of a mixture are many thousands."""
    found, tensors = StreamChecksum(), [torch.randn(size).bfloat16() for _ in range(1000)]
    with Launches() as launches:
        for number, tensor in enumerate(tensors):
            found.add(str(number), tensor)
        found.value()
    assert launches.count <= 1.1 * len(tensors)


async def test_weights_pass_unchanged() -> None:
    weights = {"a": torch.randn(3), "b": torch.randn(2)}
    found = StreamChecksum()
    passed = {name: tensor async for name, tensor in found.watching(iter(weights.items()))}
    assert all(passed[name] is weights[name] for name in weights)
    assert found.value() == checksum(weights)


async def test_sender_reports_what_passed_and_is_its_engine_in_all_else() -> None:
    class Engine:
        bucket = 7

        async def send_weights(self, weights: Iterator[Any], global_steps: int | None = None) -> dict[str, float]:
            self.sent = dict(weights)
            return {"seconds": 1.0}

    weights = {"a": torch.randn(3), "b": torch.randn(2), "empty": torch.empty(0)}
    sender = SummedSender(Engine())
    reported = await sender.send_weights(iter(weights.items()), global_steps=4)
    assert reported == {"seconds": 1.0, CHECKSUM: checksum(weights), VERSION: 4}
    assert sender.bucket == 7 and sender.sent.keys() == weights.keys()
    assert checksum(weights) == checksum({name: weights[name] for name in ("a", "b")}), "not every engine sends empties"

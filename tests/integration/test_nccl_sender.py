# SPDX-License-Identifier: Apache-2.0
"""What the sender of the `nccl` engine asks its device for: on which streams, and what it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import nccl_on_cpu
import pytest
import torch

from recipe.async_engine.weights.checksum import CHECKSUM, StreamChecksum

BUCKET = 4 * 4096


class Device:
    """What was asked for, in order; buckets arrive at ``received`` as they are sent."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.received: list[tuple[dict[str, Any], torch.Tensor]] = []
        self.current, self._streams = "default", 0

    def stream(self) -> SimpleNamespace:
        self._streams += 1
        name = f"own {self._streams}"
        return SimpleNamespace(
            cuda_stream=name,
            name=name,
            synchronize=lambda: self.asked.append(f"wait for {name}"),
            wait_stream=lambda other: self.asked.append(f"{name} waits for {other.name}"),
        )

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def event(self) -> SimpleNamespace:
        number = len(self.received)
        return SimpleNamespace(
            record=lambda stream: self.asked.append(f"bucket {number} on {stream.name}"),
            synchronize=lambda: self.asked.append(f"wait for bucket {number}"),
        )

    def cuda(self) -> SimpleNamespace:
        return SimpleNamespace(
            Stream=self.stream,
            stream=self.on,
            Event=self.event,
            current_stream=lambda: SimpleNamespace(name=self.current),
            current_device=lambda: 0,
            synchronize=lambda: self.asked.append("wait for the device"),
            empty_cache=lambda: self.asked.append("empty the cache"),
        )


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    with nccl_on_cpu.for_a_while():
        nccl_on_cpu.install(ours=True)
        from verl.checkpoint_engine import nccl_checkpoint_engine

        from recipe.async_engine.weights import nccl_engine

        device = Device()

        class Broadcast:
            def __init__(self, rank: int, name: str, bucket: Any, meta: dict[str, Any], *_: Any) -> None:
                device.asked.append(f"send {len(bucket)} bytes after {device.current}")
                device.received.append((meta, torch.as_tensor(bucket).clone()))

            async def wait_for_complete(self) -> None: ...

        class Torch(nccl_on_cpu.OnCPU):
            cuda = device.cuda()

        monkeypatch.setattr(nccl_engine, "torch", Torch())
        monkeypatch.setattr(nccl_checkpoint_engine, "torch", Torch())
        for module in (nccl_engine, nccl_checkpoint_engine):
            monkeypatch.setattr(module, "BroadcastOperation", Broadcast)
        yield device


def sender(weights: dict[str, torch.Tensor], senders: int = 1) -> tuple[Any, Any]:
    """The engine of trainer rank 0 when it has sent them, and what it returned."""
    from recipe.async_engine.weights import nccl_engine

    engine = nccl_engine.BoundedNCCLCheckpointEngine(BUCKET)
    engine.rank, engine.num_senders, engine.socket = 0, senders, None
    engine.send_buf, engine.recv_buf = (nccl_engine.cp.zeros(BUCKET, "uint8") for _ in range(2))
    engine._group = nccl_engine.Group("group")
    return engine, asyncio.run(engine.send_weights(weights.items(), global_steps=1))


def many() -> dict[str, torch.Tensor]:
    """Of odd sizes, one of several buckets, and one that fills a bucket."""
    sizes = {"a": 7, "b": 1000, "c": 3 * BUCKET // 2 + 5, "d": 3, "e": BUCKET // 2, "f": 100}
    return {name: torch.randn(size).bfloat16() for name, size in sizes.items()}


def test_sender_waits_for_no_more_than_its_own_streams(device: Device) -> None:
    engine, _ = sender(many())
    engine.finalize()
    assert len(device.received) == 7
    waits = [asked for asked in device.asked if asked.startswith(("wait for", "empty"))]
    assert waits == [*(f"wait for bucket {number}" for number in range(1, 8)), "wait for own 1", "wait for own 2"]
    assert all(asked.endswith("after own 1") for asked in device.asked if asked.startswith("send"))
    assert all(asked.endswith("on own 2") for asked in device.asked if asked.startswith("bucket"))
    assert not [asked for asked in device.asked if "default" in asked], "training's stream has nothing to do with it"


def test_bucket_is_filled_again_when_it_has_been_sent(device: Device) -> None:
    sender(many())
    sent = [place for place, asked in enumerate(device.asked) if asked.startswith("send")]
    for number in range(1, 6):
        place = device.asked.index(f"wait for bucket {number}")
        assert sent[number] < place < sent[number + 1], "the next but one lies in the same memory"


def test_what_arrives_is_what_was_sent_aligned_and_summed_in_the_buckets(device: Device) -> None:
    weights, sums = many(), StreamChecksum()
    _, reported = sender(weights)
    arrived = {name: torch.empty(tensor.nbytes, dtype=torch.uint8) for name, tensor in weights.items()}
    for place, (meta, data) in enumerate(device.received):
        assert meta["is_last"] == (place == len(device.received) - 1) and meta["length"] == len(data) <= BUCKET
        for name, chunk in meta["bucket_meta"].items():
            assert chunk.offset % 16 == 0
            part = data[chunk.offset : chunk.offset + chunk.chunk_size]
            arrived[name][chunk.chunk_offset : chunk.chunk_offset + chunk.chunk_size] = part
    for name, tensor in weights.items():
        assert torch.equal(arrived[name], tensor.view(torch.uint8)), name
        sums.add(name, tensor)
    assert reported == {CHECKSUM: sums.value()}


def test_member_that_joins_another_group_has_no_socket_of_the_one_before(device: Device) -> None:
    """A socket and its context in one piece of garbage have the collector of garbage wait for ever."""
    from verl.checkpoint_engine.nccl_checkpoint_engine import MasterMetadata

    from recipe.async_engine.weights.nccl_engine import BoundedNCCLCheckpointEngine, Group

    engine = BoundedNCCLCheckpointEngine(BUCKET)
    sockets = []
    for name in ("first", "first", "second"):
        if not sockets or name != engine.topic:
            engine._group = Group(name)
        engine.topic = name
        engine._connect_zmq_client(MasterMetadata(zmq_ip="127.0.0.1", zmq_port=1, multi_sender=False))
        sockets.append(engine.socket._socket)
    assert sockets[0] is sockets[1]
    assert sockets[0].closed
    assert not sockets[2].closed
    engine.socket.close()

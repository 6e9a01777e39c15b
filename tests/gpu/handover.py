# SPDX-License-Identifier: Apache-2.0
"""Passes weights from a weight worker to the engine beside it, in two processes: CUDA IPC, or shared memory on a
CPU.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Iterator
from typing import Any

import torch

from recipe.async_engine.weights.checksum import StreamChecksum

DEADLINE_S = 120.0
BUCKET_MB = 16
TENSOR_MB = 4


def weights(mebibytes: int, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this much in bf16; with IPC one tensor is larger than a bucket, which shared memory does not support."""
    random = torch.Generator(device).manual_seed(0)
    sizes = [TENSOR_MB] * (mebibytes // TENSOR_MB) + ([] if device == "cpu" else [2 * BUCKET_MB])
    for number, size in enumerate(sizes):
        yield f"layer.{number}", torch.randn(size << 19, generator=random, device=device).bfloat16()


def receive(address: str, device: str, pipe: Any) -> None:
    """Run the engine's end, in a process of its own."""
    from recipe.async_engine.engines.weight_stream import DeadlineReceiver

    checksum = StreamChecksum()
    place = torch.device("cpu") if device == "cpu" else torch.device(device, 0)
    receiver = DeadlineReceiver(address, place, use_shm=device == "cpu", timeout_s=DEADLINE_S)

    def take(bucket: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
        for name, tensor in bucket:
            assert tensor.device.type == device
            checksum.add(name, tensor)

    receiver.receive_weights(take)
    pipe.send(checksum.value())
    # Keep the process alive like an engine: zmq's thread may not have sent the last answer yet.
    pipe.recv()


def hand_over(device: str, mebibytes: int, folder: str) -> dict[str, float]:
    """Send this much, check that it arrives bit for bit, and return seconds and GB/s."""
    from recipe.async_engine.engines.weight_stream import DeadlineWeightSender

    address, checksum = f"ipc://{folder}/weights", StreamChecksum()
    # CUDA does not survive a fork.
    context = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
    ours, theirs = context.Pipe()
    engine = context.Process(target=receive, args=(address, device, theirs), daemon=True)
    engine.start()
    sender = DeadlineWeightSender(
        address, bucket_size_mb=BUCKET_MB, use_shm=device == "cpu", timeout_s=DEADLINE_S, failure=lambda: None
    )
    sent = list(weights(mebibytes, device))
    began = time.monotonic()

    def timed() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal began
        began = time.monotonic()  # the engine's process has started by now
        yield from checksum.passing(sent)

    asyncio.run(sender.async_send_weights(timed()))
    seconds = time.monotonic() - began
    try:
        assert ours.poll(DEADLINE_S), "the engine did not take the weights"
        assert ours.recv() == checksum.value()
        ours.send("taken")
        engine.join(DEADLINE_S)
    finally:
        engine.kill()
    nbytes = sum(tensor.nbytes for _, tensor in sent)
    return {"seconds": round(seconds, 4), "gigabytes_per_second": round(nbytes / seconds / 1e9, 3)}

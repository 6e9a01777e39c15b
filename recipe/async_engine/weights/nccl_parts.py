# SPDX-License-Identifier: Apache-2.0
"""Classes and functions for `recipe.async_engine.weights.nccl_engine` that need no NCCL group: buckets and threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from verl.checkpoint_engine.base import TensorMeta

ALIGNMENT = 16
"""Alignment in bytes of tensors in a bucket. It makes views of any dtype possible; verl does not align tensors."""


class Bucket:
    """One of a sender's two buffers for tensors. While the sender fills one buffer, it sends the other."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._bytes = torch.as_tensor(memory)
        self.holds: dict[str, TensorMeta] = {}
        self.length = 0
        self.left: Any = None
        """CUDA event that completes when the bucket's contents have been sent, or None if nothing is being sent."""

    def place(self, size: int) -> int | None:
        """Return the offset in bytes at which ``size`` more bytes can be put, or None if they do not fit."""
        begin = self.length + -self.length % ALIGNMENT
        return begin if begin + size <= len(self._bytes) else None

    def fill(self, meta: TensorMeta, chunk: torch.Tensor) -> torch.Tensor:
        """Copy ``chunk`` into the bucket at ``meta.offset``, on the current stream; return a view of the copy."""
        assert meta.name not in self.holds, f"{meta.name} comes twice"
        self.holds[meta.name], self.length = meta, meta.offset + meta.chunk_size
        room = self._bytes[meta.offset : self.length]
        return room.copy_(chunk, non_blocking=True)

    def empty(self) -> None:
        """Wait until the bucket's contents have been sent or the communicator is aborted, and empty the bucket."""
        if self.left is not None:
            self.left.synchronize()
        self.holds, self.length, self.left = {}, 0, None

    @property
    def filled(self) -> Any:
        return self._memory[: self.length]


class InlineExecutor(ThreadPoolExecutor):
    """An executor for event loops. It runs each call on the thread that submits it, before `submit` returns."""

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        outcome: Future[Any] = Future()
        try:
            outcome.set_result(call(*arguments, **named))
        except Exception as error:  # The future passes the error on to its waiter.
            outcome.set_exception(error)
        return outcome


def within(timeout_s: float, call: Callable[[], Any]) -> None:
    """Run ``call`` on a thread; if it takes longer than ``timeout_s``, abandon the thread and raise TimeoutError."""
    outcome: Future[None] = Future()

    def run() -> None:
        try:
            call()
            outcome.set_result(None)
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="join-nccl-group", daemon=True).start()
    outcome.result(timeout_s)

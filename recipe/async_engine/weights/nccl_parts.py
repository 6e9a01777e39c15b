# SPDX-License-Identifier: Apache-2.0
"""What `recipe.async_engine.weights.nccl_engine` is made of that knows nothing of a group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from verl.checkpoint_engine.base import TensorMeta

ALIGNMENT = 16
"""Of tensors in a bucket, in bytes: verl's own lie one behind the other, and are views of another type there."""


class Bucket:
    """One of the two that a sender fills in turn."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._bytes = torch.as_tensor(memory)
        self.holds: dict[str, TensorMeta] = {}
        self.length = 0
        self.left: Any = None
        """The event with which what it held has been sent."""

    def place(self, size: int) -> int | None:
        """Where so many bytes would begin; None if they have no room."""
        begin = self.length + -self.length % ALIGNMENT
        return begin if begin + size <= len(self._bytes) else None

    def fill(self, meta: TensorMeta, chunk: torch.Tensor) -> torch.Tensor:
        """Copy a chunk to ``meta.offset``, on the current stream; returns where it lies."""
        assert meta.name not in self.holds, f"{meta.name} comes twice"
        self.holds[meta.name], self.length = meta, meta.offset + meta.chunk_size
        room = self._bytes[meta.offset : self.length]
        return room.copy_(chunk, non_blocking=True)

    def empty(self) -> None:
        """Have it empty, as soon as what it held has been sent. An abort of the communicator ends the wait."""
        if self.left is not None:
            self.left.synchronize()
        self.holds, self.length, self.left = {}, 0, None

    @property
    def filled(self) -> Any:
        return self._memory[: self.length]


class AtOnce(ThreadPoolExecutor):
    """An event loop's executor that does what it is given before it returns."""

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        outcome: Future[Any] = Future()
        try:
            outcome.set_result(call(*arguments, **named))
        except Exception as error:  # whoever waits for it gets it
            outcome.set_exception(error)
        return outcome


def within(timeout_s: float, call: Callable[[], Any]) -> None:
    """Do ``call`` on a thread that is left behind if it is late, with TimeoutError."""
    outcome: Future[None] = Future()

    def run() -> None:
        try:
            call()
            outcome.set_result(None)
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="join-nccl-group", daemon=True).start()
    outcome.result(timeout_s)

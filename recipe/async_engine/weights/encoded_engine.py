# SPDX-License-Identifier: Apache-2.0
"""Checkpoint engines of any kind, whose streams carry what changed since the version before.

Contract: each is the engine that it stands before in all else. Both ends keep the version that passed last in host
memory. Who sends says for each version whether it goes in full, which it must where a receiver may not have the one
before; a receiver refuses what it cannot put together. Settings: ``async_training.weights.encoding=delta``. Shown by
tests/integration/test_encoded_sync.py.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from typing import Any

import torch

from recipe.async_engine.weights.checksum import CHECKSUM, VERSION, SummedSender
from recipe.async_engine.weights.delta import Base, Sizes, decode, encode

DELTA = "delta"


class EncodedSender(SummedSender):
    """The sending end."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._base = Base()

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None, full: bool = True
    ) -> dict[str, Any]:
        """As the engine's; ``full``: send every value.

        Returns:
            Beside what `SummedSender` does, ``weight_sync/full_bytes`` and ``weight_sync/changed_share``, of values.
        """
        assert global_steps is not None, "changes are those of a version"
        sizes = Sizes()
        stream = encode(weights, global_steps, self._base, sizes, full)
        metrics = await self.engine.send_weights(stream, global_steps=global_steps)
        return {
            **(metrics or {}),
            "weight_sync/full_bytes": sizes.full_bytes,
            "weight_sync/changed_share": sizes.changed / max(1, sizes.values),
            CHECKSUM: self._base.checksum,
            VERSION: global_steps,
        }


class EncodedReceiver:
    """The receiving end. What comes out of it is valid until the next version, and must not be written to."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._base = Base()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """As the engine's."""
        async for named_tensor in decode(self._engine.receive_weights(global_steps=global_steps), self._base):
            yield named_tensor


def receiving(engine: Any, rollout_config: Any) -> Any:
    """The engine of a receiver, as the run's settings have it."""
    settings = (rollout_config.custom or {}).get("recipe", {})
    return EncodedReceiver(engine) if settings.get("encoding") == DELTA else engine

# SPDX-License-Identifier: Apache-2.0
"""Checkpoint engine ``emulated_gloo``: `recipe_gloo` with a sender that takes the time of an accelerator's links::

actor_rollout_ref.rollout.checkpoint_engine.backend=emulated_gloo
actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=benchmarks.emulation.transfer
"""

from __future__ import annotations

import functools
from typing import Any

from verl.checkpoint_engine.base import CheckpointEngineRegistry

from benchmarks.emulation.devices import Device, emulation
from recipe.laptop.transfer.gloo_engine import GlooCheckpointEngine

BACKEND = "emulated_gloo"


@functools.cache
def device() -> Device:
    """Return this process's device."""
    return Device(emulation(), "sender", 1)


@CheckpointEngineRegistry.register(BACKEND)
class EmulatedEngine(GlooCheckpointEngine):
    """Waits on the engine's own thread after the stream has been confirmed, since a version arrives only then."""

    def _send(self, *arguments: Any) -> dict[str, float]:
        with device().work("transfer", device().times.transfer_s()):
            return super()._send(*arguments)

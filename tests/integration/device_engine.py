# SPDX-License-Identifier: Apache-2.0
"""The checkpoint engine ``recipe_gloo`` under a name that log-prob servers treat as one that needs a device."""

from __future__ import annotations

from verl.checkpoint_engine.base import CheckpointEngineRegistry

from recipe.laptop.transfer.gloo_engine import GlooCheckpointEngine

BACKEND = "as_on_a_device"


@CheckpointEngineRegistry.register(BACKEND)
class DeviceEngine(GlooCheckpointEngine):
    """Identical to its base class."""

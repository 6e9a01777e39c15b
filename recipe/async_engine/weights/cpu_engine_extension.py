# SPDX-License-Identifier: Apache-2.0
"""The extension of vLLM's worker where there is no accelerator: weights can be staged, and loaded more than once."""

from __future__ import annotations

from recipe.async_engine.platform.vllm_cpu import CPUWorkerExtension
from recipe.async_engine.weights.engine_extension import StagingExtension


class CPUStagingExtension(StagingExtension, CPUWorkerExtension):
    """Both of its parents."""

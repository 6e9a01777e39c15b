# SPDX-License-Identifier: Apache-2.0
"""The extension of vLLM's worker where there is no accelerator: weights can be staged, and loaded more than once."""

from __future__ import annotations

from recipe.async_engine.engines.vllm.engine_extension import StagingExtension
from recipe.laptop.platform.vllm_cpu import CPUWorkerExtension


class CPUStagingExtension(StagingExtension, CPUWorkerExtension):
    """Both of its parents."""

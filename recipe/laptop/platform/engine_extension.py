# SPDX-License-Identifier: Apache-2.0
"""The extension of vLLM's worker on a machine without an accelerator: weights can be staged, and loaded repeatedly."""

from __future__ import annotations

from recipe.async_engine.engines.vllm.engine_extension import StagingExtension
from recipe.laptop.platform.vllm_cpu import CPUWorkerExtension


class CPUStagingExtension(StagingExtension, CPUWorkerExtension):
    """Combines staging with repeated loading on a CPU."""

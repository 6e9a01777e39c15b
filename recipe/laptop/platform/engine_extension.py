# SPDX-License-Identifier: Apache-2.0
"""The extension of a vLLM worker on a CPU, which can stage weights, and load weights in place more than once."""

from __future__ import annotations

from recipe.async_engine.engines.vllm.engine_extension import StagingExtension
from recipe.laptop.platform.vllm_cpu import CPUWorkerExtension


class CPUStagingExtension(StagingExtension, CPUWorkerExtension):
    """Combines the staging of weights with repeated loading in place on a CPU."""

# SPDX-License-Identifier: Apache-2.0
"""The extension of a vLLM worker on a CPU that can stage weights next to those in use, and load weights repeatedly."""

from __future__ import annotations

from recipe.async_engine.engines.vllm.engine_extension import StagingExtension
from recipe.laptop.engines.vllm_cpu import CPUWorkerExtension


class CPUStagingExtension(StagingExtension, CPUWorkerExtension):
    """Combines the extension that stages weights with the one that loads weights repeatedly on a CPU."""

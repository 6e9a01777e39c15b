# SPDX-License-Identifier: Apache-2.0
"""The extension with which a vLLM worker on a CPU can stage new weights, and can load weights more than once.

To stage weights means to keep them in memory, next to those in use, until they are swapped in.
"""

from __future__ import annotations

from recipe.async_engine.engines.vllm.engine_extension import StagingExtension
from recipe.laptop.engines.vllm_cpu import CPUWorkerExtension


class CPUStagingExtension(StagingExtension, CPUWorkerExtension):
    """Combines the extension that stages weights with the one that can load weights more than once on a CPU."""

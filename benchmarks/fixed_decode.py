# SPDX-License-Identifier: Apache-2.0
"""A rollout engine whose decode steps compute nothing and take ``DECODE_STEP_S`` seconds of waiting.

As on an accelerator, where generation takes no core from whatever loads weights on the host. The engine adds a line to
the file ``DECODE_RECORD`` for each step: when it ended (monotonic clock, the same in all processes of a machine).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from recipe.async_engine.weights.cpu_engine_extension import CPUStagingExtension


class FixedDecodeExtension(CPUStagingExtension):
    """The extension of the CPU platform, in an engine whose model runner waits."""

    def __new__(cls, **kwargs: Any) -> FixedDecodeExtension:
        step_s, record = float(os.environ["DECODE_STEP_S"]), Path(os.environ["DECODE_RECORD"])

        def forward(self: Any, *args: Any, positions: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            time.sleep(step_s)
            with record.open("a") as file:
                file.write(f"{time.monotonic()}\n")
            return torch.zeros(positions.shape[-1], self.model_config.get_hidden_size(), dtype=self.dtype)

        GPUModelRunner._model_forward = forward
        return super().__new__(cls, **kwargs)

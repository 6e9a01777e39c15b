# SPDX-License-Identifier: Apache-2.0
"""A rollout engine whose decode steps take at least ``DECODE_STEP_S`` seconds, as on an accelerator.

The time is a wait: it uses no core, and is the same however many answers are decoded at once, as where decoding is
bound by reading the weights. Here a step of the tiny model takes milliseconds of CPU time that the other processes then
lack; with the wait, which trajectories are decoded when is what decides how long a run takes.

If ``ENGINE_RECORD`` names a file, the engine adds a line to it for each request that reaches it: the request's tokens.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from recipe.async_engine.weights.cpu_engine_extension import CPUStagingExtension


def record_requests(scheduler_output: Any) -> None:
    if "ENGINE_RECORD" in os.environ:
        lines = [json.dumps(request.prompt_token_ids) + "\n" for request in scheduler_output.scheduled_new_reqs]
        with Path(os.environ["ENGINE_RECORD"]).open("a") as file:
            file.writelines(lines)


class SlowDecodeExtension(CPUStagingExtension):
    """The extension of the CPU platform, in an engine whose model runner waits."""

    def __new__(cls, **kwargs: Any) -> SlowDecodeExtension:
        step_s = float(os.environ["DECODE_STEP_S"])
        execute = GPUModelRunner.execute_model

        def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            record_requests(scheduler_output)
            began = time.monotonic()
            result = execute(self, scheduler_output, *args, **kwargs)
            if scheduler_output.total_num_scheduled_tokens:
                time.sleep(max(0.0, step_s - (time.monotonic() - began)))
            return result

        GPUModelRunner.execute_model = execute_model
        return super().__new__(cls, **kwargs)

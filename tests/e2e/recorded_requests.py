# SPDX-License-Identifier: Apache-2.0
"""An emulated engine that appends the tokens of each request that reaches it to the file ``ENGINE_RECORD``.

They include the tokens of its answer before a cut.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from benchmarks.emulation.engine import EmulatedExtension
from recipe.async_engine.core.cuts import sampled_before


class RecordedRequests(EmulatedExtension):
    def __new__(cls, **kwargs: Any) -> RecordedRequests:
        extension = super().__new__(cls, **kwargs)
        execute = GPUModelRunner.execute_model

        def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            asked = [
                [*request.prompt_token_ids, *sampled_before(request.sampling_params)]
                for request in scheduler_output.scheduled_new_reqs
            ]
            lines = [json.dumps(tokens) + "\n" for tokens in asked]
            with Path(os.environ["ENGINE_RECORD"]).open("a") as file:
                file.writelines(lines)
            return execute(self, scheduler_output, *args, **kwargs)

        GPUModelRunner.execute_model = execute_model
        return extension

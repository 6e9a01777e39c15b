# SPDX-License-Identifier: Apache-2.0
"""An emulated engine that appends the tokens of each request that reaches it to the file ``ENGINE_RECORD``.

They include the tokens of its answer before a cut. `Raising` is an engine that fails.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
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


class Raising(EmulatedExtension):
    """An engine of which the first one to compute something raises an error, and creates the file ``ENGINE_RAISES``."""

    def __new__(cls, **kwargs: Any) -> Raising:
        extension = super().__new__(cls, **kwargs)
        execute = GPUModelRunner.execute_model

        def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if scheduler_output.scheduled_new_reqs:
                with suppress(FileExistsError):
                    Path(os.environ["ENGINE_RAISES"]).touch(exist_ok=False)
                    raise RuntimeError("out of order")
            return execute(self, scheduler_output, *args, **kwargs)

        GPUModelRunner.execute_model = execute_model
        return extension

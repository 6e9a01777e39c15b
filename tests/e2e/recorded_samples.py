# SPDX-License-Identifier: Apache-2.0
"""An emulated engine that writes what it samples, and after which tokens, to files in the folder ``ENGINE_SAMPLES``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from benchmarks.emulation.engine import EmulatedExtension
from recipe.async_engine.core.cuts import sampled_before


def write(line: Any) -> None:
    with Path(os.environ["ENGINE_SAMPLES"], f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def recorded(output: Any) -> Any:
    if isinstance(output, ModelRunnerOutput):
        for request, tokens in zip(output.req_ids, output.sampled_token_ids, strict=False):
            write(["sampled", request, list(map(int, tokens))])
    elif hasattr(output, "get_output"):
        get = output.get_output
        output.get_output = lambda: recorded(get())
    return output


class RecordedSamples(EmulatedExtension):
    def __new__(cls, **kwargs: Any) -> RecordedSamples:
        extension = super().__new__(cls, **kwargs)
        execute, sample = GPUModelRunner.execute_model, GPUModelRunner.sample_tokens

        def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            for request in scheduler_output.scheduled_new_reqs:
                before = sampled_before(request.sampling_params)
                write(["asked", request.req_id, [*request.prompt_token_ids, *before]])
            return recorded(execute(self, scheduler_output, *args, **kwargs))

        def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
            return recorded(sample(self, *args, **kwargs))

        GPUModelRunner.execute_model, GPUModelRunner.sample_tokens = execute_model, sample_tokens
        return extension

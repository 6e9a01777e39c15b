# SPDX-License-Identifier: Apache-2.0
"""An emulated engine that writes what it samples, after which tokens and by which weights, to a file of its own.

``ENGINE_SAMPLES`` is the folder of these files. `engine_record` reads them.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from benchmarks.emulation.engine import EmulatedExtension
from recipe.async_engine.core.cuts import sampled_before

FILE = f"{time.time_ns()}-{os.getpid()}.jsonl"
weights = ""
"""A digest of the weights that the engine has now."""


def write(*line: Any) -> None:
    with Path(os.environ["ENGINE_SAMPLES"], FILE).open("a") as file:
        file.write(json.dumps(line) + "\n")


def note(output: Any, by: str) -> None:
    for request, tokens in zip(output.req_ids, output.sampled_token_ids, strict=False):
        write("sampled", request, list(map(int, tokens)), by)


def recorded(output: Any) -> Any:
    # With asynchronous scheduling the tokens may be read only after the weights have changed.
    by = weights
    if isinstance(output, ModelRunnerOutput):
        note(output, by)
    elif hasattr(output, "get_output"):
        get = output.get_output

        def get_output() -> Any:
            note(found := get(), by)
            return found

        output.get_output = get_output
    return output


class RecordedSamples(EmulatedExtension):
    def __new__(cls, **kwargs: Any) -> RecordedSamples:
        extension = super().__new__(cls, **kwargs)
        execute, sample = GPUModelRunner.execute_model, GPUModelRunner.sample_tokens

        def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            for request in scheduler_output.scheduled_new_reqs:
                before = sampled_before(request.sampling_params)
                write("asked", request.req_id, [*request.prompt_token_ids, *before])
            return recorded(execute(self, scheduler_output, *args, **kwargs))

        def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
            return recorded(sample(self, *args, **kwargs))

        GPUModelRunner.execute_model, GPUModelRunner.sample_tokens = execute_model, sample_tokens
        return extension

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> Any:
        loaded = super().update_weights_from_ipc(*args, **kwargs)
        self._note_weights()
        return loaded

    def swap_staged(self, version: int) -> Any:
        swapped = super().swap_staged(version)
        self._note_weights()
        return swapped

    def _note_weights(self) -> None:
        global weights
        found = hashlib.sha256()
        for _, parameter in sorted(self.model_runner.get_model().named_parameters()):
            found.update(parameter.detach().numpy().tobytes())
        weights = found.hexdigest()[:16]
        write("weights", weights)

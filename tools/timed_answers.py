# SPDX-License-Identifier: Apache-2.0
"""Parts for the runs of `modes_picture`: the package's own, slowed down and with a record of their times.

`LongTail` gives each trajectory an answer of a long-tailed length, the same in every run, and names its requests.
`TimedDecodeExtension` slows down decode steps (`benchmarks.emulation`) and adds one line per decode step to the file
``DECODE_RECORD``: when it ``began`` and ``ended``, the ``version`` of the weights, and which ``answers`` it decoded.
The trainers' updates take at least ``UPDATE_S`` seconds. Both kinds of delay are waits, as for an accelerator.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from pathlib import Path
from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from benchmarks.emulation.engine import EmulatedExtension
from recipe.async_engine.trainer.base import AsyncPPOTrainer

MEDIAN_TOKENS, SPREAD, MOST_TOKENS = 12, 0.9, 48


class LongTail(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        task = asyncio.current_task()
        assert task is not None
        name = task.get_name()
        tokens = MEDIAN_TOKENS * random.Random(name).lognormvariate(0.0, SPREAD)
        fixed = {"max_tokens": min(MOST_TOKENS, max(4, round(tokens))), "ignore_eos": True}
        return await super().run({**sampling_params, **fixed, "extra_args": {"answer": name}}, **kwargs)


class TimedDecodeExtension(EmulatedExtension):
    loads = 0

    def __new__(cls, **kwargs: Any) -> TimedDecodeExtension:
        extension = super().__new__(cls, **kwargs)
        execute, names = GPUModelRunner.execute_model, {}

        def execute_model(self: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            for request in scheduled.scheduled_new_reqs:
                names[request.req_id] = request.sampling_params.extra_args["answer"]
            began = time.time()
            result = execute(self, scheduled, *args, **kwargs)
            if scheduled.total_num_scheduled_tokens:
                step = {"began": began, "ended": time.time(), "version": cls.loads - 1}
                answers = [names[request] for request in scheduled.num_scheduled_tokens]
                with Path(os.environ["DECODE_RECORD"]).open("a") as record:
                    record.write(json.dumps({**step, "answers": answers}) + "\n")
            return result

        GPUModelRunner.execute_model = execute_model
        return extension

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> Any:
        """Count loads: the first one is version 0, because these runs start from scratch and lose no replica."""
        TimedDecodeExtension.loads += 1
        return super().update_weights_from_ipc(*args, **kwargs)


class SlowUpdate(AsyncPPOTrainer):
    """A trainer with slow updates."""

    def _update(self, batch: Any) -> Any:
        ready = time.monotonic() + float(os.environ["UPDATE_S"])
        updated = super()._update(batch)
        time.sleep(max(0.0, ready - time.monotonic()))
        return updated

# SPDX-License-Identifier: Apache-2.0
"""Odd generation: answers as `odd_reward.WAYS` has them, and a replica much slower than the others."""

from __future__ import annotations

import math
import os
import random
from pathlib import Path
from typing import Any

from odd_reward import way
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from recipe.async_engine.weights.cpu_engine_extension import CPUStagingExtension
from recipe.emulation.engine import EmulatedExtension


class OddAnswers(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        output = await super().run(sampling_params, **kwargs)
        how = way(int(kwargs["extra_info"]["index"]))
        count = len(output.response_ids)
        if how == "answer empty":
            output.response_ids, output.response_mask, output.response_logprobs = [], [], []
        if how == "answer garbage":
            # Special tokens among them.
            output.response_ids = [random.randrange(len(self.tokenizer)) for _ in range(count)]
        if how == "log-prob NaN":
            output.response_logprobs = [math.nan] * count
        if how == "log-prob -inf":
            output.response_logprobs = [-math.inf, *output.response_logprobs[1:]]
        if how == "log-probs missing":
            output.response_logprobs = output.response_logprobs[: count // 2]
        return output


class OneSlowReplica(EmulatedExtension):
    """Of the engines of a run, the one that is first to create the file ``SLOW_ONE`` decodes slowly."""

    def __new__(cls, **kwargs: Any) -> OneSlowReplica:
        try:
            Path(os.environ["SLOW_ONE"]).touch(exist_ok=False)
        except FileExistsError:
            return CPUStagingExtension.__new__(cls, **kwargs)
        return super().__new__(cls, **kwargs)

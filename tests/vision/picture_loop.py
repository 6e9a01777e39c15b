# SPDX-License-Identifier: Apache-2.0
"""verl's agent loop of one turn with answers of 6 to 24 tokens, the same number for all answers to a prompt."""

from __future__ import annotations

import random
from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class VariedAnswers(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        tokens = random.Random(str(kwargs["uid"])).randint(6, 24)
        return await super().run({**sampling_params, "max_tokens": tokens, "ignore_eos": True}, **kwargs)

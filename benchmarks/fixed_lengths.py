# SPDX-License-Identifier: Apache-2.0
"""An agent loop with answers of fixed lengths: 20 times the usual length if the task's answer is a long one."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from recipe.laptop.task.problems import LONG_OPERATION

SHORT_TOKENS = 6


class FixedLengthLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        is_long = kwargs["raw_prompt"][0]["content"].startswith(LONG_OPERATION)
        length = 20 * SHORT_TOKENS if is_long else SHORT_TOKENS
        return await super().run({**sampling_params, "max_tokens": length, "ignore_eos": True}, **kwargs)

# SPDX-License-Identifier: Apache-2.0
"""Agent loops whose answers have lengths that are known before: fixed ones, and ones that grow during a run."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from recipe.laptop.task.problems import LONG_OPERATION

SHORT_TOKENS = 6
GROWTH = 3


class FixedLengthLoop(SingleTurnAgentLoop):
    """An answer has `SHORT_TOKENS` tokens, or 20 times as many if the task's answer is a long one."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        is_long = kwargs["raw_prompt"][0]["content"].startswith(LONG_OPERATION)
        length = 20 * SHORT_TOKENS if is_long else SHORT_TOKENS
        return await super().run({**sampling_params, "max_tokens": length, "ignore_eos": True}, **kwargs)


class GrowingLengthLoop(SingleTurnAgentLoop):
    """Answers have `SHORT_TOKENS` tokens at first, and `GROWTH` times as many at the prompt with index ``prompts``."""

    def __init__(self, *args: Any, prompts: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prompts = prompts

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        index = kwargs["extra_info"]["index"]
        length = round(SHORT_TOKENS * (1 + (GROWTH - 1) * index / self._prompts))
        return await super().run({**sampling_params, "max_tokens": length, "ignore_eos": True}, **kwargs)

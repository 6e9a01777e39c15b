# SPDX-License-Identifier: Apache-2.0
"""An agent loop as a user writes one, with a tool between two requests; it knows nothing of turns or versions."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

# Seconds that the tool takes: what it answers is always the same, when it does differs.
TOOL_S = (0.1, 0.9)


class TwoTurnLoop(AgentLoopBase):
    """Answers, has a slow tool read the answer back, and answers again; greedy, so that transcripts can be compared."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        sampling_params = {**sampling_params, "temperature": 0.0}
        prompt_ids = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        first = await self._ask(prompt_ids, sampling_params, kwargs)
        observed = await self._tool(first.token_ids)
        second = await self._ask([*prompt_ids, *first.token_ids, *observed], sampling_params, kwargs)
        response = [*first.token_ids, *observed, *second.token_ids]
        length = self.rollout_config.response_length
        assert len(response) <= length
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response,
            response_mask=[1] * len(first.token_ids) + [0] * len(observed) + [1] * len(second.token_ids),
            response_logprobs=[*first.log_probs, *[0.0] * len(observed), *second.log_probs],
            num_turns=4,
            metrics=AgentLoopMetrics(),
        )

    async def _ask(self, token_ids: list[int], sampling_params: dict[str, Any], kwargs: dict[str, Any]) -> Any:
        return await self.server_manager.generate(
            request_id=str(kwargs["uid"]),
            prompt_ids=token_ids,
            sampling_params={**sampling_params, "max_tokens": 12, "ignore_eos": True},
        )

    @staticmethod
    async def _tool(token_ids: list[int]) -> list[int]:
        await asyncio.sleep(random.uniform(*TOOL_S))
        return token_ids[3::-1]

# SPDX-License-Identifier: Apache-2.0
"""A user's agent loop, which ignores versions and raises for one prompt."""

from __future__ import annotations

import os
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput


class UserAgentLoop(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        if os.environ["FAILING_INDEX"] in ("all", str(kwargs["extra_info"]["index"])):
            raise ValueError("this prompt has no answer")
        prompt_ids = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        answer = await self.server_manager.generate(
            request_id=str(kwargs["uid"]), prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        length = self.rollout_config.response_length
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=answer.token_ids[:length],
            response_mask=[1] * len(answer.token_ids[:length]),
            response_logprobs=answer.log_probs[:length],
            num_turns=2,
            metrics=AgentLoopMetrics(),
        )

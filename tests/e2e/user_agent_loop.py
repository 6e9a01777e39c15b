# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""An agent loop as a user writes one: it knows nothing of versions, and raises for one prompt."""

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

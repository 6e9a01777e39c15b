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
"""verl's single-turn agent loop with a sampling seed for each request, so that two runs sample the same answers."""

from __future__ import annotations

from collections import Counter
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

SEEDS_PER_PROMPT = 1000

_requests: Counter[int] = Counter()


class SeededAgentLoop(SingleTurnAgentLoop):
    """The seed is the prompt's index and how often this process has answered the prompt before."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        index = int(kwargs["extra_info"]["index"])
        seed = index * SEEDS_PER_PROMPT + _requests[index]
        _requests[index] += 1
        return await super().run({**sampling_params, "seed": seed}, **kwargs)

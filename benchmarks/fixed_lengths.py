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
"""An agent loop whose answers have fixed lengths: 20 times the usual one where the task's answer is a long one."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from recipe.async_engine.task.problems import LONG_OPERATION

SHORT_TOKENS = 6


class FixedLengthLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        is_long = kwargs["raw_prompt"][0]["content"].startswith(LONG_OPERATION)
        length = 20 * SHORT_TOKENS if is_long else SHORT_TOKENS
        return await super().run({**sampling_params, "max_tokens": length, "ignore_eos": True}, **kwargs)

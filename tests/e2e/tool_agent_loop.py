# SPDX-License-Identifier: Apache-2.0
"""The example's agent loop with a slow tool and greedy sampling, so that transcripts can be compared."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import two_turn_loop

# The tool's possible durations in seconds; its output is always the same.
TOOL_S = (0.1, 0.9)


class TwoTurnLoop(two_turn_loop.TwoTurnLoop):
    """Answers of 12 tokens, and a tool that returns the first four in reverse."""

    async def ask(self, uid: str, context: list[int], sampling_params: dict[str, Any]) -> Any:
        fixed = {**sampling_params, "temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
        return await self.server_manager.generate(request_id=uid, prompt_ids=context, sampling_params=fixed)

    async def tool(self, answer: list[int]) -> list[int]:
        await asyncio.sleep(random.uniform(*TOOL_S))
        return answer[3::-1]

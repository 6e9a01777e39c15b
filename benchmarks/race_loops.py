# SPDX-License-Identifier: Apache-2.0
"""An agent loop with a slow tool: it samples half of an answer, waits for the tool, and samples the other half."""

from __future__ import annotations

import asyncio
from typing import Any

from fixed_lengths import SHORT_TOKENS
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

TOOL_S = 1.0


class ToolLoop(SingleTurnAgentLoop):
    """The tool returns no tokens for the model; only its time matters here."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        half = {**sampling_params, "max_tokens": SHORT_TOKENS // 2, "ignore_eos": True}
        first = await super().run(half, **kwargs)
        await asyncio.sleep(TOOL_S)
        second = await super().run(half, **kwargs)
        first.response_ids += second.response_ids
        first.response_mask += second.response_mask
        if first.response_logprobs is not None:
            first.response_logprobs += second.response_logprobs
        return first

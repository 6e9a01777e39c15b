# SPDX-License-Identifier: Apache-2.0
"""An agent that knows only OpenAI's client: it asks, uses a tool as the answer says, and asks again.

The model of the built-in task writes no calls. In place of Hermes's parser stands one that reads each of its answers as
a call, so that what the engine samples decides what the tool is called with.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from openai import AsyncOpenAI
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser

from recipe.agents.loop import OpenAIAgentLoop

TOOL = {
    "type": "function",
    "function": {
        "name": "turned",
        "description": "Turns a text around.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}
# Spread, so that syncs find some trajectories in a tool and others in an answer.
TOOL_S, ANSWER = (0.1, 3.0), (6, 12)


@ToolParser.register("hermes")
class EverythingIsACall(ToolParser):
    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        text = self.tokenizer.decode(responses_ids)
        return "", [FunctionCall(name="turned", arguments=json.dumps({"text": text}))]


class AgentLoop(OpenAIAgentLoop):
    """The agent loop itself, with answers that are long enough to be cut."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        return await super().run({**sampling_params, "ignore_eos": True}, **kwargs)


async def run(client: AsyncOpenAI, row: dict[str, Any]) -> dict[str, Any]:
    messages: list[Any] = list(row["raw_prompt"])
    asked: dict[str, Any] = {"model": "policy", "max_completion_tokens": random.randint(*ANSWER)}
    stream = random.random() < 0.5
    said = await asking(client, stream, messages=messages, tools=[TOOL], **asked)
    (call,) = said["tool_calls"]
    await asyncio.sleep(random.uniform(*TOOL_S))
    result = json.loads(call["function"]["arguments"])["text"][3::-1]
    messages += [said, {"role": "tool", "tool_call_id": call["id"], "content": result}]
    said = await asking(client, stream, messages=messages, tools=[TOOL], tool_choice="none", **asked)
    return {"reward": float(sum(letter.isdigit() for letter in said["content"])), "streamed": float(stream)}


async def rewriting(client: AsyncOpenAI, row: dict[str, Any]) -> float:
    """Asks, asks two others at once with the answer, and goes on with a summary in place of what was said."""
    question: list[Any] = list(row["raw_prompt"])
    asked: dict[str, Any] = {"model": "policy", "max_completion_tokens": 6}
    said = await asking(client, False, messages=question, **asked)
    more = [{"role": "user", "content": digit} for digit in "12"]
    others = await asyncio.gather(
        *[asking(client, other is more[0], messages=[*question, said, other], **asked) for other in more]
    )
    await asyncio.sleep(random.uniform(*TOOL_S))
    summary = {"role": "user", "content": others[0]["content"][:4]}
    last = await asking(client, False, messages=[summary], **asked)
    return float(len(last["content"]))


async def asking(client: AsyncOpenAI, stream: bool, **asked: Any) -> Any:
    """Return the message that answers a request, streamed or not."""
    if not stream:
        reply = await client.chat.completions.create(**asked)
        return reply.choices[0].message.model_dump(exclude_none=True)
    said: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    async for chunk in await client.chat.completions.create(stream=True, **asked):
        delta = chunk.choices[0].delta
        said["content"] += delta.content or ""
        said["tool_calls"] += [call.model_dump(exclude={"index"}) for call in delta.tool_calls or ()]
    return said

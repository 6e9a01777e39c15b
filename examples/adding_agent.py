# SPDX-License-Identifier: Apache-2.0
"""An example of an agent that knows only OpenAI's client; docs/agents.md explains it.

It asks, calls tools as long as the policy wants them called, and gives its own reward.
"""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}
TURNS = 3


async def run(client: AsyncOpenAI, row: dict[str, Any]) -> float:
    """Return 1 if the last answer has what the row says is right, else 0."""
    messages: list[Any] = list(row["raw_prompt"])
    for _ in range(TURNS):
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
        answer = reply.choices[0].message
        messages.append(answer)
        for call in answer.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": add(call.function.arguments)})
        if not answer.tool_calls:
            break
    return float(row["reward_model"]["ground_truth"] in (answer.content or ""))


def add(arguments: str) -> str:
    """Return the sum of the numbers in a call, or what is wrong with the call."""
    try:
        numbers = json.loads(arguments)
        return str(numbers["a"] + numbers["b"])
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error!r}"

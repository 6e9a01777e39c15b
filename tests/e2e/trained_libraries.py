# SPDX-License-Identifier: Apache-2.0
"""Agents of well-known libraries (requirements/agents.txt) to train: each has a tool, and its library's own loop.

The model of the built-in task writes no calls. In place of Hermes's parser stands one by which its first letter says
whether an answer is a call, so that what the engine samples decides how often and with what a tool is called.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser

from recipe.agents.loop import OpenAIAgentLoop

# Behind the others, because some of these packages are there too.
sys.path.append(str(Path(sys.prefix, "agents")))

MODEL, ANSWER = "policy", 8
# More than a conversation has room for, whatever the policy learns.
MOST_TURNS = 100
# Spread, so that syncs find some trajectories in a tool and others in an answer.
TOOL_S = (0.1, 2.0)
LAST = "final_answer"
"""The tool by which an agent of smolagents ends."""


@ToolParser.register("hermes")
class FirstLetter(ToolParser):
    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        text = self.tokenizer.decode(responses_ids, skip_special_tokens=True)
        if text.startswith(tuple("02468")):
            return "", [FunctionCall(name="turned", arguments=json.dumps({"text": text}))]
        if any(tool.function.name == LAST for tool in tools or ()):
            return "", [FunctionCall(name=LAST, arguments=json.dumps({"answer": text}))]
        return text, []


class AgentLoop(OpenAIAgentLoop):
    """The agent loop itself, with answers that are long enough to be cut."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        return await super().run({**sampling_params, "ignore_eos": True}, **kwargs)


async def turned(text: str) -> str:
    """Turns a text around.

    Args:
        text: The text.
    """
    await asyncio.sleep(random.uniform(*TOOL_S))
    return text[3::-1]


def rewarded(said: Any) -> float:
    return float(sum(letter.isdigit() for letter in str(said)))


async def openai_agents(client: AsyncOpenAI, row: dict[str, Any]) -> float:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)
    # A streamed response that ends by its limit is an error of this library.
    stream = random.random() < 0.5
    kind = OpenAIChatCompletionsModel if stream else random.choice([OpenAIChatCompletionsModel, OpenAIResponsesModel])
    agent = Agent(
        name="turner",
        instructions="Turn.",
        model=kind(model=MODEL, openai_client=client),
        model_settings=ModelSettings(max_tokens=ANSWER),
        tools=[function_tool(turned)],
    )
    question = row["raw_prompt"][-1]["content"]
    if not stream:
        return rewarded((await Runner.run(agent, question, max_turns=MOST_TURNS)).final_output)
    result = Runner.run_streamed(agent, question, max_turns=MOST_TURNS)
    async for _ in result.stream_events():
        pass
    return rewarded(result.final_output)


async def pydantic_ai(client: AsyncOpenAI, row: dict[str, Any]) -> float:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def watch(context: Any, events: Any) -> None:
        async for _ in events:
            pass

    kind = random.choice([OpenAIChatModel, OpenAIResponsesModel])
    model = kind(MODEL, provider=OpenAIProvider(openai_client=client))
    agent = Agent(model, instructions="Turn.", tools=[turned], model_settings={"max_tokens": ANSWER})
    handler = random.choice([watch, None])
    return rewarded((await agent.run(row["raw_prompt"][-1]["content"], event_stream_handler=handler)).output)


async def langgraph(client: AsyncOpenAI, row: dict[str, Any]) -> float:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    model = ChatOpenAI(
        model=MODEL,
        base_url=str(client.base_url),
        api_key=client.api_key,
        max_tokens=ANSWER,
        streaming=random.random() < 0.5,
        use_responses_api=random.random() < 0.5,
    )
    agent = create_react_agent(model, [turned], prompt="Turn.")
    said = await agent.ainvoke(
        {"messages": [("user", row["raw_prompt"][-1]["content"])]}, {"recursion_limit": MOST_TURNS}
    )
    return rewarded(said["messages"][-1].text)


async def smolagents(client: AsyncOpenAI, row: dict[str, Any]) -> float:
    """Its agents block, so that they run on threads of the worker."""
    return await asyncio.to_thread(_smolagents, str(client.base_url), client.api_key, row)


def _smolagents(address: str, key: str, row: dict[str, Any]) -> float:
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    def turned(text: str) -> str:
        """Turns a text around.

        Args:
            text: The text.
        """
        time.sleep(random.uniform(*TOOL_S))
        return text[3::-1]

    model = OpenAIModel(MODEL, api_base=address, api_key=key, max_tokens=ANSWER)
    how = {"stream_outputs": random.random() < 0.5, "verbosity_level": 0, "max_steps": MOST_TURNS}
    agent = ToolCallingAgent(tools=[tool(turned)], model=model, **how)
    agent.prompt_templates["system_prompt"] = "Turn."
    return rewarded(agent.run(row["raw_prompt"][-1]["content"]))

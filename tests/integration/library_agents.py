# SPDX-License-Identifier: Apache-2.0
"""Agents of well-known libraries, as their users write them: ``python library_agents.py NAME`` prints a reward.

Each asks what 1 + 2 is, has a tool that adds, and knows nothing of this package. The address comes by the environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

QUESTION = "What is 1 + 2?"
MODEL = "policy"


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def openai_agents(responses: bool, stream: bool) -> str:
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    kind = OpenAIResponsesModel if responses else OpenAIChatCompletionsModel
    model = kind(model=MODEL, openai_client=AsyncOpenAI())
    agent = Agent(name="adder", instructions="Use the tool.", model=model, tools=[function_tool(add)])

    async def run() -> str:
        if not stream:
            return str((await Runner.run(agent, QUESTION)).final_output)
        result = Runner.run_streamed(agent, QUESTION)
        async for _ in result.stream_events():
            pass
        return str(result.final_output)

    return asyncio.run(run())


def pydantic_ai(responses: bool, stream: bool) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

    kind = OpenAIResponsesModel if responses else OpenAIChatModel
    agent = Agent(kind(MODEL), instructions="Use the tool.", tools=[add])

    async def run() -> str:
        async def watch(context: Any, events: Any) -> None:
            async for _ in events:
                pass

        return str((await agent.run(QUESTION, event_stream_handler=watch if stream else None)).output)

    return asyncio.run(run())


def smolagents(responses: bool, stream: bool) -> str:
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    model = OpenAIModel(MODEL, api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    agent = ToolCallingAgent(tools=[tool(add)], model=model, max_steps=4, stream_outputs=stream, verbosity_level=0)
    return str(agent.run(QUESTION))


def langgraph(responses: bool, stream: bool) -> str:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    model = ChatOpenAI(model=MODEL, streaming=stream, use_responses_api=responses)
    agent = create_react_agent(model, [add], prompt="Use the tool.")
    said: Any = agent.invoke({"messages": [("user", QUESTION)]})["messages"][-1]
    return str(said.text)


if __name__ == "__main__":
    library, *how = sys.argv[1:]
    answer = globals()[library]("responses" in how, "stream" in how)
    # A library may have printed something without a line break.
    sys.stdout.write("\n" + json.dumps({"reward": float("3" in answer), "answer": answer}) + "\n")

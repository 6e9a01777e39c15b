# SPDX-License-Identifier: Apache-2.0
"""Measures the CPU time that an agent's request at the gateway takes, beside verl's own tool agent in the process.

    PYTHONPATH=.:tests python benchmarks/gateway_cpu.py [--trajectories 50] [--turns 8] [--repeats 3] [--profile]

Both sides have the same conversations: a policy that answers at once from a script calls a tool in each turn but the
last. verl's `ToolAgentLoop` runs in the measured process; OpenAI's client runs in another process, whose time does not
count. Several trajectories run at once on both sides. The result is milliseconds of CPU per request, of all threads.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import statistics
import sys
import time
from typing import Any

from openai import AsyncOpenAI

AT_ONCE = 8
QUESTION = {"role": "user", "content": "Add the numbers from 1 to 9. " + "Think well, and use the tool. " * 10}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
CALL = 'I go on adding, as I was told.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
RESULT = "The sum is 3. " * 4


async def converse(policy: AsyncOpenAI) -> None:
    messages: list[Any] = [QUESTION]
    tools: Any = [ADD]
    while True:
        reply = await policy.chat.completions.create(model="policy", messages=messages, tools=tools)
        said = reply.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            return
        messages.append({"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": RESULT})


async def client_process() -> None:
    """Hold a conversation at each address that arrives on the standard input, and say when it is over."""
    loop = asyncio.get_running_loop()

    async def one(asked: dict[str, str]) -> None:
        async with AsyncOpenAI(base_url=asked["address"], api_key=asked["key"], max_retries=0) as policy:
            await converse(policy)
        sys.stdout.write(f"{asked['address']}\n")
        sys.stdout.flush()

    tasks = []
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        tasks.append(asyncio.create_task(one(json.loads(line))))
    await asyncio.gather(*tasks)


class OtherProcess:
    """An agent that has its conversation in the other process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process, self._over = process, dict[str, asyncio.Event]()
        self._reading = asyncio.create_task(self._read())

    async def converse(self, address: str, key: str) -> float:
        self._over[address] = asyncio.Event()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"address": address, "key": key}).encode() + b"\n")
        await self._over[address].wait()
        return 1.0

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            self._over[line.decode().strip()].set()


def answers(turns: int) -> list[str]:
    return [CALL] * (turns - 1) + ["It is 45."]


async def measured(run: Any, trajectories: int, turns: int, profile: bool) -> float:
    """Return the milliseconds of CPU per request."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        async with places:
            await run()

    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    began = time.process_time()
    await asyncio.gather(*[one() for _ in range(trajectories)])
    took = time.process_time() - began
    if profile:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
    return 1000 * took / (trajectories * turns)


async def both_sides(options: argparse.Namespace) -> None:
    from scripted_policy import ScriptedClient, made
    from verl.experimental.agent_loop.agent_loop import ToolListWrap
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
    from verl.tools.base_tool import BaseTool
    from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

    from recipe.agents.loop import OpenAIAgentLoop

    class Adds(BaseTool):
        async def execute(self, instance_id: str, parameters: Any, **more: Any) -> tuple[ToolResponse, float, dict]:
            return ToolResponse(text=RESULT), 0.0, {}

    tools = ToolListWrap([Adds({}, OpenAIFunctionToolSchema(**ADD))])
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--client"), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    other = OtherProcess(process)

    class Elsewhere(OpenAIAgentLoop):
        """Has its agent in the other process, without an unused client in this one."""

        async def _returned(self, session: Any, address: str, key: str, row: Any) -> float:
            return await other.converse(address, key)

    async def verls() -> None:
        client = ScriptedClient(answers(options.turns))
        output = await made(ToolAgentLoop, client, tools=tools).run({"max_tokens": 4096}, raw_prompt=[QUESTION])
        assert len(client.sampled) == options.turns and sum(output.response_mask) > 0

    async def gateways() -> None:
        client = ScriptedClient(answers(options.turns))
        output = await made(Elsewhere, client, command="").run({}, raw_prompt=[QUESTION])
        assert len(client.sampled) == options.turns and not isinstance(output, list)

    found: dict[str, list[float]] = {"verl's tool agent": [], "gateway": []}
    for run in (verls, gateways):
        await measured(run, AT_ONCE, options.turns, False)
    for _ in range(options.repeats):
        for name, run in zip(found, (verls, gateways), strict=True):
            found[name].append(await measured(run, options.trajectories, options.turns, options.profile))
    for name, values in found.items():
        sys.stdout.write(f"{name}: {statistics.median(values):.2f} ms of CPU a request ({values})\n")
    assert process.stdin is not None
    process.stdin.close()
    await process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=50)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    asyncio.run(client_process() if options.client else both_sides(options))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""A user's agent loops and data set whose behaviour is determined by each row of the data.

``extra_info`` of a row names a behaviour of `odd_loops` (``loop``), of `odd_tools` (``tool``) or of `hostile_data`
(``row``).
"""

from __future__ import annotations

import asyncio
import inspect
import json
from typing import Any

import hostile_data
import odd_loops
from odd_poisons import POISONING
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.utils.dataset.rl_dataset import RLHFDataset


async def hangs(loop: Any, sampling_params: dict[str, Any], sample: dict[str, Any]) -> Any:
    await asyncio.sleep(3600)


async def hangs_past_its_end(loop: Any, sampling_params: dict[str, Any], sample: dict[str, Any]) -> Any:
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue


async def waits_for_a_thread(loop: Any, sampling_params: dict[str, Any], sample: dict[str, Any]) -> Any:
    await asyncio.to_thread(odd_loops.threading.Event().wait)


LATE = "was not done within 8 s"
LATES = {
    "hangs": (hangs, LATE),
    "hangs past its end": (hangs_past_its_end, LATE),
    "waits for a thread": (waits_for_a_thread, LATE),
}
DEATH = "died|did not answer|does not answer|was ended|restarted"
LOOPS: odd_loops.Table = {
    **{
        name: row
        for name, row in odd_loops.LOOPS.items()
        if name not in ("returns a huge field", "returns a huge array")
    },
    **LATES,
    **{name: (odd_loops.raising(function), DEATH) for name, function in odd_loops.DEADLY.items()},
}


class OddAgentLoop(AgentLoopBase):
    """An agent loop that does what its row says."""

    async def run(self, sampling_params: dict[str, Any], **sample: Any) -> Any:
        self.prompt = await self.ct_build_initial_tokens(list(sample["raw_prompt"]))
        way = (sample.get("extra_info") or {}).get("loop")
        if not way:
            return await self.sound(sampling_params)
        does = POISONING[way] if way in POISONING else LOOPS[way][0]
        return await does(self, sampling_params, sample)

    async def sound(self, sampling_params: dict[str, Any]) -> AgentLoopOutput:
        answer = await self.ask({**sampling_params, "max_tokens": 2}, self.prompt)
        made = self.output(self.prompt, answer.token_ids[:2])
        made.response_logprobs = answer.log_probs[:2]
        return made

    async def ask(self, sampling_params: dict[str, Any], prompt_ids: list[int]) -> Any:
        return await self.server_manager.generate(
            request_id=f"odd-{id(self)}", prompt_ids=prompt_ids, sampling_params=sampling_params
        )

    def output(self, prompt_ids: list[int], response_ids: list[int]) -> AgentLoopOutput:
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            response_mask=[1] * len(response_ids),
            response_logprobs=[-1.0] * len(response_ids),
            num_turns=2,
            metrics=AgentLoopMetrics(),
        )


class CallsItsTool(ToolAgentLoop):
    """verl's tool loop, with a policy whose first answer is the tool call that its row names."""

    async def run(self, sampling_params: dict[str, Any], **sample: Any) -> Any:
        asked = sample.get("extra_info") or {}
        tokens = []
        if asked.get("tool"):
            call = json.dumps({"name": asked["name"], "arguments": {"way": asked["tool"]}})
            tokens = self.tokenizer.encode(f"<tool_call>{call}</tool_call><|end|>")
        self.server_manager = SaysFirst(self.server_manager, tokens)
        return await super().run({**sampling_params, "max_tokens": 4}, **sample)


class SaysFirst:
    """A client of the engines whose first answer has the given tokens, if any, instead of its own."""

    def __init__(self, client: Any, tokens: list[int]) -> None:
        self._client, self._tokens = client, tokens

    async def generate(self, **request: Any) -> Any:
        answer = await self._client.generate(**request)
        tokens, self._tokens = self._tokens, []
        if not tokens:
            return answer
        return answer.model_copy(update={"token_ids": tokens, "log_probs": [-1.0] * len(tokens)})


ROWS = {
    name: kind
    for name, kind in inspect.getmembers(hostile_data, inspect.isclass)
    if issubclass(kind, hostile_data.Good) and "spoilt" in vars(kind) and kind is not hostile_data.Good
}


class OddRows(RLHFDataset):
    """verl's data set, with rows altered as in `hostile_data`."""

    def __getitem__(self, index: int) -> Any:
        row = super().__getitem__(index)
        kind = (row.get("extra_info") or {}).get("row")
        return ROWS[kind](None, None, None).spoilt(index) if kind else row

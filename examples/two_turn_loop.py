# SPDX-License-Identifier: Apache-2.0
"""An agent loop of one's own, with a tool between two answers; docs/agent-loops.md goes through it.

It is verl's interface and nothing else: interruptions, versions and resumed runs are not its concern.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput


class TwoTurnLoop(AgentLoopBase):
    """Answers, has a tool read the answer, and answers again with what the tool said in its context."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        uid = str(kwargs["uid"])
        first = await self.ask(uid, prompt, sampling_params)
        observed = await self.tool(first.token_ids)
        second = await self.ask(uid, [*prompt, *first.token_ids, *observed], sampling_params)
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=[*first.token_ids, *observed, *second.token_ids],
            # 1 where the policy chose the token; what the tool said is context, and is not trained.
            response_mask=[1] * len(first.token_ids) + [0] * len(observed) + [1] * len(second.token_ids),
            response_logprobs=[*first.log_probs, *[0.0] * len(observed), *second.log_probs],
            num_turns=4,
            metrics=AgentLoopMetrics(),
        )

    async def ask(self, uid: str, context: list[int], sampling_params: dict[str, Any]) -> Any:
        """The policy's answer to ``context``, of at most a third of the response's length."""
        limit = {**sampling_params, "max_tokens": self.rollout_config.response_length // 3}
        return await self.server_manager.generate(request_id=uid, prompt_ids=context, sampling_params=limit)

    async def tool(self, answer: list[int]) -> list[int]:
        """Reads the answer's first tokens back, last one first; a real tool would decode, compute and encode.

        Whatever it waits for needs a deadline of its own: a trajectory has `async_training.timeouts.trajectory` in all.
        """
        return answer[: self.rollout_config.response_length // 3][::-1]

# SPDX-License-Identifier: Apache-2.0
"""An example of a user's own agent loop, with a tool between two answers; docs/agent-loops.md explains it.

It uses only verl's interface, and does not have to handle interruptions, versions or resumed runs.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput


class TwoTurnLoop(AgentLoopBase):
    """Answers, lets a tool read the answer, and answers again with the tool's output in its context."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        uid = str(kwargs["uid"])
        first = await self.ask(uid, prompt, sampling_params)
        observed = await self.tool(first.token_ids)
        second = await self.ask(uid, [*prompt, *first.token_ids, *observed], sampling_params)
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=[*first.token_ids, *observed, *second.token_ids],
            # 1 for tokens that the policy sampled; the tool's output is context and is not trained.
            response_mask=[1] * len(first.token_ids) + [0] * len(observed) + [1] * len(second.token_ids),
            response_logprobs=[*first.log_probs, *[0.0] * len(observed), *second.log_probs],
            num_turns=4,
            metrics=AgentLoopMetrics(),
        )

    async def ask(self, uid: str, context: list[int], sampling_params: dict[str, Any]) -> Any:
        """Return the policy's answer to ``context``, of at most a third of the response length."""
        limit = {**sampling_params, "max_tokens": self.rollout_config.response_length // 3}
        return await self.server_manager.generate(request_id=uid, prompt_ids=context, sampling_params=limit)

    async def tool(self, answer: list[int]) -> list[int]:
        """Return the answer's first tokens in reverse order; a real tool would decode, compute and encode.

        Anything that it waits for needs a deadline of its own: a whole trajectory has
        `async_training.timeouts.trajectory`.
        """
        return answer[: self.rollout_config.response_length // 3][::-1]

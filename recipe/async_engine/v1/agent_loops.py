# SPDX-License-Identifier: Apache-2.0
"""verl's v1 agent loops, extended to send each answer to a log-prob server, which computes its old log-probs.

Contract: a log-prob server *scores* a finished answer with the version that sampled the answer's last token, while the
answer's reward is computed and other answers are generated. A prompt is complete once all of its answers have been
scored. If no server scores an answer in time, NaN is stored for it, and the trainer computes the log-probs. Without
log-prob servers, these agent loops behave like verl's. Shown by tests/e2e/test_v1_trainers.py.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray
import torch
import transfer_queue as tq
from verl.experimental.agent_loop import AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from recipe.async_engine.core.columns import ENTROPY, OLD_LOG_PROBS
from recipe.async_engine.core.versions import Part
from recipe.async_engine.log_prob_servers.client import ScoringClient, score
from recipe.async_engine.log_prob_servers.service import Unscored

logger = logging.getLogger(__name__)


class ScoringAgentLoopWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """verl's agent-loop worker, which also sends each answer to a log-prob server.

    It uses the client ``llm_client.log_prob_servers``, which `BoundedTrainer.get_llm_client` provides.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._scoring: ScoringClient | None = getattr(self.llm_client, "log_prob_servers", None)

    async def _agent_loop_postprocess(
        self, output: AgentLoopOutput | list[AgentLoopOutput], validate: bool, **kwargs: Any
    ) -> None:
        scoring = self._scoring
        if validate or scoring is None:
            await super()._agent_loop_postprocess(output, validate, **kwargs)
            return
        outputs = output if isinstance(output, list) else [output]
        columns, _ = await asyncio.gather(
            asyncio.gather(*[self._columns(scoring, each) for each in outputs]),
            super()._agent_loop_postprocess(output, validate, **kwargs),
        )
        if columns:
            # Add the log-probs and entropies to the answers, which verl has just stored under these keys. verl marks
            # the prompt as complete only after this method has returned, so the trainer never reads an answer without
            # them.
            await tq.async_kv_batch_put(
                keys=[f"{kwargs['uid']}_{kwargs['session_id']}_{number}" for number in range(len(outputs))],
                fields=list_of_dict_to_tensordict(columns),
                partition_id="train",
            )

    async def _columns(self, scoring: ScoringClient, output: AgentLoopOutput) -> dict[str, torch.Tensor]:
        """Return log-probs and entropies of an answer with R tokens, float32 (R,); NaN if no server computed them."""
        response, versions = output.response_ids, output.extra_fields
        if output.multi_modal_data or versions.get("max_global_steps") is None:
            return _unscored(len(response))
        part = Part(versions["max_global_steps"], output.prompt_ids, response)
        try:
            answer = await score(scoring, part, versions["min_global_steps"])
        except Unscored as error:
            logger.warning("an answer goes to the trainer without log-probs: %s", error)
            return _unscored(len(response))
        log_probs, entropy = torch.from_numpy(answer.scores)
        return {OLD_LOG_PROBS: log_probs.clone(), ENTROPY: entropy.clone()}


def _unscored(length: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((length,), torch.nan) for name in (OLD_LOG_PROBS, ENTROPY)}


class ScoringAgentLoopManager(AgentLoopManagerTQ):
    """verl's agent-loop manager, with :class:`ScoringAgentLoopWorker` actors as workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(ScoringAgentLoopWorker)

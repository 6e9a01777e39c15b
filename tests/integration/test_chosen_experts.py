# SPDX-License-Identifier: Apache-2.0
"""An agent loop's experts are refused if a token would be computed with none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from recipe.async_engine.rollout.loop_output import UnusableAnswer, plain_output

# A prompt of 3 tokens; an answer of 2 sampled tokens, 2 of a tool, 1 sampled and 1 of a tool.
MASK = [1, 1, 0, 0, 1, 0]
ROLLOUT = SimpleNamespace(
    enable_rollout_routing_replay=True, calculate_log_probs=False, prompt_length=4, response_length=8
)


def output(experts: Any) -> AgentLoopOutput:
    return AgentLoopOutput(
        prompt_ids=[1, 2, 3],
        response_ids=[4] * len(MASK),
        response_mask=MASK,
        routed_experts=experts,
        metrics=AgentLoopMetrics(),
        num_turns=2,
    )


@pytest.mark.parametrize("rows", [7, 8, 9])
def test_experts_up_to_the_last_sampled_token_suffice(rows: int) -> None:
    for experts in (np.zeros((rows, 2, 1), np.uint8), torch.zeros(rows, 2, 1)):
        assert plain_output(output(experts), ROLLOUT, vocabulary=8).routed_experts is experts


@pytest.mark.parametrize(
    ("experts", "words"),
    [
        (None, "has no routed_experts"),
        (np.zeros((6, 2, 1)), "(6, 2, 1), but needs 7 to 9 rows"),
        (np.zeros((10, 2, 1)), "(10, 2, 1)"),
        (np.zeros((7, 2)), "(7, 2)"),
        ("all of them", "'all of them'"),
    ],
)
def test_experts_that_do_not_fit_the_tokens_are_refused(experts: Any, words: str) -> None:
    with pytest.raises(UnusableAnswer) as refused:
        plain_output(output(experts), ROLLOUT, vocabulary=8)
    assert words in str(refused.value)

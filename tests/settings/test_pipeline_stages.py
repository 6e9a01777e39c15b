# SPDX-License-Identifier: Apache-2.0
"""What a configuration may ask of pipeline stages, against what Megatron builds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from test_config import ACTOR, MEGATRON
from test_memory import judged

SIZE, CHUNKS = (f"{ACTOR}.megatron.{name}pipeline_model_parallel_size" for name in ("", "virtual_"))
LAYOUT = f"{ACTOR}.megatron.override_transformer_config"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
# Qwen2.5-0.5B's.
LAYERS = 24


def megatron_builds(size: int, virtual: int | None, layout: dict[str, Any]) -> bool:
    """Whether Megatron finds a number of layers for each stage and chunk, all of the model's and as many as asked.

    It takes some numbers that do not add up: of both a first and a last stage where there is but one.
    """
    try:
        config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=8,
            num_attention_heads=2,
            pipeline_model_parallel_size=size,
            virtual_pipeline_model_parallel_size=virtual,
            pipeline_dtype=torch.float32,
            **layout,
        )
        chunks = range(virtual or 1)
        counts = [
            sum(get_num_layers_to_build(config, vp_stage=chunk, pp_rank=rank) for chunk in chunks)
            for rank in range(size)
        ]
    except (ValueError, AssertionError):
        return False
    asked = layout.get(FIRST, counts[0]), layout.get(LAST, counts[-1])
    return min(counts) > 0 and sum(counts) == LAYERS and asked == (counts[0], counts[-1])


def refused(size: int, virtual: int | None, layout: dict[str, Any]) -> set[str]:
    """Settings of pipeline stages that are refused."""
    # As many ranks as a stage each takes, and trajectories that divide among them.
    ranks = {"trainer.n_gpus_per_node": size, f"{ACTOR}.ppo_mini_batch_size": 60}
    stages: dict[str, Any] = {SIZE: size, CHUNKS: virtual, LAYOUT: layout}
    problems, _ = judged("Qwen/Qwen2.5-0.5B", MEGATRON | ranks | stages)
    return {setting for setting in problems if "pipeline" in setting}


def layouts() -> Iterator[dict[str, Any]]:
    for first, last in itertools.product((None, 1, 4, 9, 24), (None, 2, 4, 20, 24)):
        if (first or 0) + (last or 0) <= LAYERS:
            yield {name: count for name, count in ((FIRST, first), (LAST, last)) if count}
    yield from ({EMBEDDING: True}, {LOSS: True}, {EMBEDDING: True, LOSS: True}, {LOSS: True, LAST: 4})


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_stages_are_taken_that_megatron_can_build_and_no_others(size: int) -> None:
    outcomes = set()
    for layout, virtual in itertools.product(layouts(), (None, 2, 4) if size > 1 else (None,)):
        builds = megatron_builds(size, virtual, layout)
        assert (refused(size, virtual, layout) == set()) is builds, (layout, virtual)
        outcomes.add(builds)
    assert outcomes == {True, False}


def test_what_is_refused_is_named() -> None:
    assert refused(5, None, {}) == refused(5, None, {LAST: 3}) == {SIZE}
    assert refused(2, 5, {}) == refused(1, 2, {}) == {CHUNKS}
    assert refused(2, None, {LOSS: True, LAST: 4}) == {f"{LAYOUT}.{LOSS}"}


def test_stages_that_a_layout_names_are_left_to_megatron() -> None:
    assert refused(5, None, {"pipeline_model_parallel_layout": "Et*5|t*5|t*5|t*5|t*4L"}) == set()

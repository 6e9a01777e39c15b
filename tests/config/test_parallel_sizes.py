# SPDX-License-Identifier: Apache-2.0
"""Parallel sizes are accepted exactly if Megatron can build the model and vLLM and verl assert nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from memory_figures import known
from test_config import (
    ACTOR,
    GAE,
    MEGATRON,
    MEGATRON_SERVERS,
    REPLAY,
    RETURNED,
    REWARD_MODEL,
    ROLLOUT,
    SERVERS,
    configured,
)
from test_memory import judged

from recipe.async_engine.config.facts import FileFact
from recipe.async_engine.config.rules.context import RuleContext
from recipe.async_engine.config.rules.parallel import ranks
from recipe.async_engine.config.sections import read_settings
from recipe.plan.memory.parallel import parallel_sizes
from recipe.plan.memory.shape import known_model

SIZE, CHUNKS = (f"{ACTOR}.megatron.{name}pipeline_model_parallel_size" for name in ("", "virtual_"))
LAYOUT = f"{ACTOR}.megatron.override_transformer_config"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
# The layers of Qwen2.5-0.5B.
LAYERS = 24


def megatron_builds(size: int, virtual: int | None, layout: dict[str, Any]) -> bool:
    """Return whether Megatron finds the number of layers that was asked for, for each stage and chunk.

    Megatron itself accepts some numbers that do not add up: those for a first and a last stage if there is only one.
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
    """Return the settings of pipeline stages that are refused."""
    # There is a rank for each stage, and trajectories that divide among the ranks.
    devices = {"trainer.n_gpus_per_node": size, f"{ACTOR}.ppo_mini_batch_size": 60}
    stages: dict[str, Any] = {SIZE: size, CHUNKS: virtual, LAYOUT: layout}
    problems, _ = judged("Qwen/Qwen2.5-0.5B", MEGATRON | devices | stages)
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


def named(changes: dict[str, Any], **models: str) -> dict[str, str]:
    """Return what is refused if policy, critic and judge are these models, and what would be allowed."""
    paths = {
        "policy": "actor_rollout_ref.model.path",
        "critic": "critic.model.path",
        "judge": "reward.reward_model.model_path",
    }
    files = [FileFact(paths[who], name, "model", model_config=known_model(name)) for who, name in models.items()]
    config = configured(changes)
    context = RuleContext(config, read_settings(config)[0], None, None, files)
    return {problem.setting: problem.allowed for problem in parallel_sizes(context)}


TENSOR = "tensor_model_parallel_size"
SMALL, LARGE, SPARSE = "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B", "Qwen/Qwen3-30B-A3B"
ENGINE, JUDGE = "model_engine_server.engine", "reward.reward_model.rollout"


@pytest.mark.parametrize("size", range(1, 33))
@pytest.mark.parametrize("name", [SMALL, LARGE, SPARSE])
def test_heads_are_divided_or_repeated_where_megatron_does_it(name: str, size: int) -> None:
    shape = known(name)
    try:
        TransformerConfig(
            num_layers=shape.layers,
            hidden_size=shape.hidden,
            num_attention_heads=shape.heads,
            num_query_groups=shape.kv_heads,
            kv_channels=shape.head_dim,
            tensor_model_parallel_size=size,
        )
        takes = (shape.expert_mlp or shape.mlp) % size == 0
    except ValueError:
        takes = False
    megatron = {f"{ACTOR}.megatron.{TENSOR}": size, f"{ROLLOUT}.{TENSOR}": 1}
    assert (named(MEGATRON | megatron, policy=name) == {}) is takes
    unpadded = megatron | {f"{ACTOR}.megatron.vanilla_mbridge": True}
    assert (named(MEGATRON | unpadded, policy=name) == {}) is (takes and shape.vocab % size == 0)


@pytest.mark.parametrize(
    ("changes", "models", "setting", "allowed"),
    [
        ({f"{ROLLOUT}.{TENSOR}": 4}, {"policy": SMALL}, f"{ROLLOUT}.{TENSOR}", "14 attention heads"),
        # Of 14 heads 7 ranks would have two each, but there are only two heads of keys and values.
        ({f"{ROLLOUT}.{TENSOR}": 7}, {"policy": SMALL}, f"{ROLLOUT}.{TENSOR}", "multiple of the model's 2 heads of"),
        # The model has 28 heads, 4 heads of keys and values, and an MLP of 18,944 columns.
        ({f"{ROLLOUT}.{TENSOR}": 28}, {"policy": LARGE}, f"{ROLLOUT}.{TENSOR}", "18944 columns of the MLP"),
        (
            {f"{ROLLOUT}.expert_parallel_size": 2},
            {"policy": SMALL},
            f"{ROLLOUT}.expert_parallel_size",
            "without experts",
        ),
        (
            {f"{ACTOR}.ulysses_sequence_parallel_size": 7, f"{ROLLOUT}.{TENSOR}": 1},
            {"policy": SMALL},
            f"{ACTOR}.ulysses_sequence_parallel_size",
            "2 heads of keys and values",
        ),
        (
            SERVERS | {f"{ENGINE}.ulysses_sequence_parallel_size": 4},
            {"policy": SMALL},
            f"{ENGINE}.ulysses_sequence_parallel_size",
            "14 attention heads",
        ),
        (MEGATRON_SERVERS | {f"{ENGINE}.{TENSOR}": 7}, {"policy": SMALL}, f"{ENGINE}.{TENSOR}", "2 heads of keys"),
        (
            GAE | {"critic.ulysses_sequence_parallel_size": 4},
            {"policy": LARGE, "critic": SMALL},
            "critic.ulysses_sequence_parallel_size",
            "14 attention heads",
        ),
        (
            GAE | {"critic.strategy": "megatron", "critic.megatron.pipeline_model_parallel_size": 5},
            {"critic": SMALL},
            "critic.megatron.pipeline_model_parallel_size",
            "24 layers",
        ),
        (
            REWARD_MODEL | {f"{JUDGE}.{TENSOR}": 4},
            {"policy": LARGE, "judge": SMALL},
            f"{JUDGE}.{TENSOR}",
            "14 attention heads",
        ),
        (
            MEGATRON | {f"{ACTOR}.megatron": {"expert_tensor_parallel_size": 5}},
            {"policy": SPARSE},
            f"{ACTOR}.megatron.expert_tensor_parallel_size",
            "768 columns of an expert",
        ),
        (
            MEGATRON | {f"{ACTOR}.megatron": {TENSOR: 2, "sequence_parallel": False}},
            {"policy": SPARSE},
            f"{ACTOR}.megatron.sequence_parallel",
            "true with",
        ),
        ({RETURNED: True}, {"policy": SMALL}, RETURNED, "false with a model without experts"),
        (MEGATRON | {REPLAY: "R2"}, {"policy": SMALL}, REPLAY, "disabled with a model without experts"),
    ],
)
def test_size_that_does_not_divide_a_model_is_named_whoever_has_it(
    changes: dict[str, Any], models: dict[str, str], setting: str, allowed: str
) -> None:
    found = named(changes, **models)
    assert set(found) == {setting}
    assert allowed in found[setting]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        # Each head of keys and values is on two ranks.
        ({f"{ROLLOUT}.{TENSOR}": 4}, LARGE),
        ({f"{ROLLOUT}.{TENSOR}": 32, f"{ROLLOUT}.expert_parallel_size": 32}, SPARSE),
        ({f"{ENGINE}.ulysses_sequence_parallel_size": 4}, SMALL),
        ({f"{ROLLOUT}.expert_parallel_size": 1}, SMALL),
    ],
)
def test_sizes_that_an_engine_takes_or_that_nobody_has_are_not_refused(changes: dict[str, Any], name: str) -> None:
    assert named(changes, policy=name) == {}


FSDP, PIPELINE = "fsdp_config.fsdp_size", "pipeline_model_parallel_size"


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({f"{ACTOR}.{FSDP}": 3}, f"{ACTOR}.{FSDP}"),
        ({f"{ACTOR}.{FSDP}": 0}, f"{ACTOR}.{FSDP}"),
        ({f"{ACTOR}.{FSDP}": 2}, None),
        ({f"{ACTOR}.{FSDP}": -1}, None),
        ({f"{ACTOR}.{FSDP}": 8}, None),
        (MEGATRON | {f"{ACTOR}.{FSDP}": 3}, None),
        ({f"actor_rollout_ref.ref.{FSDP}": 3, f"{ACTOR}.use_kl_loss": True}, f"actor_rollout_ref.ref.{FSDP}"),
        ({f"actor_rollout_ref.ref.{FSDP}": 3}, None),
        (GAE | {"critic.fsdp.fsdp_size": 3}, "critic.fsdp.fsdp_size"),
        ({"critic.fsdp.fsdp_size": 3}, None),
        (GAE | {"critic.ulysses_sequence_parallel_size": 3}, "critic.ulysses_sequence_parallel_size"),
        (
            GAE
            | {
                "critic.strategy": "megatron",
                f"critic.megatron.{TENSOR}": 2,
                "critic.megatron.context_parallel_size": 4,
            },
            f"critic.megatron.{TENSOR}",
        ),
        (GAE | {"critic.strategy": "megatron", f"critic.megatron.{TENSOR}": 2}, None),
        (GAE | {"critic.ppo_mini_batch_size": 1, f"{ROLLOUT}.n": 2}, "critic.ppo_mini_batch_size"),
        (GAE | {"critic.ppo_mini_batch_size": 1, f"{ROLLOUT}.n": 4}, None),
        (
            GAE | {"critic.ppo_mini_batch_size": 1, f"{ROLLOUT}.n": 2, "critic.ulysses_sequence_parallel_size": 2},
            None,
        ),
        (SERVERS | {f"{ENGINE}.fsdp_size": 3}, f"{ENGINE}.fsdp_size"),
        (SERVERS | {f"{ENGINE}.ulysses_sequence_parallel_size": 3}, f"{ENGINE}.ulysses_sequence_parallel_size"),
        ({f"{ENGINE}.fsdp_size": 3}, None),
        ({f"{ROLLOUT}.data_parallel_size": 2, f"{ROLLOUT}.{TENSOR}": 2}, None),
        ({f"{ROLLOUT}.{PIPELINE}": 2}, None),
    ],
)
def test_ranks_of_an_engine_are_divided_by_its_sizes(changes: dict[str, Any], setting: str | None) -> None:
    """The trainer has 4 ranks, and a log-prob server 8."""
    config = configured(changes)
    problems = list(ranks(RuleContext(config, read_settings(config)[0], None, None, ())))
    assert [problem.setting for problem in problems] == ([setting] if setting else [])


def test_stages_that_a_layout_names_are_left_to_megatron() -> None:
    assert refused(5, None, {"pipeline_model_parallel_layout": "Et*5|t*5|t*5|t*5|t*4L"}) == set()

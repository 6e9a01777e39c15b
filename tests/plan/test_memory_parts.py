# SPDX-License-Identifier: Apache-2.0
"""Each item of the estimate is right for a model that is small enough to count by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from memory_figures import known
from test_config import (
    ACTOR,
    GAE,
    IN_TURNS,
    MEGATRON,
    MEGATRON_SERVERS,
    MERGED,
    MODEL,
    PROXIMAL,
    ROLLOUT,
    SERVERS,
    configured,
)

from recipe.async_engine.config.rules.context import RuleContext
from recipe.async_engine.config.sections import read_settings
from recipe.plan.memory.engines import (
    Engine,
    actor_rank,
    asleep,
    bucket_bytes,
    critic_rank,
    device_buckets,
    dtype_bytes,
    longest,
    outside_share,
    reference_rank,
    rollout_engine,
    room,
    server_rank,
)
from recipe.plan.memory.estimate import Models, parts_of, verdicts
from recipe.plan.memory.items import GIB, MIB, Item, Moment, Part, listed
from recipe.plan.memory.shape import ModelShape, known_model, shape_of
from recipe.plan.memory.training import CONTEXT, Megatron, Rank, Work, megatron_rank

# A layer has 208 parameters in attention and two norms, and 3 x 8 x 16 = 384 in the MLP. Four layers have 2,368, the
# embedding 800,000, and with the last norm it is 802,376.
SHAPE = ModelShape(
    hidden=8,
    layers=4,
    heads=2,
    kv_heads=1,
    head_dim=4,
    vocab=100_000,
    tied=True,
    mlp=16,
    qkv_bias=False,
    head_norms=False,
)
PARAMETERS = 802_376
KL = f"{ACTOR}.use_kl_loss"
FSDP = f"{ACTOR}.fsdp_config"
# `configured` has four ranks and four sequences in a micro-batch, the longest with 64 + 64 tokens.
TOKENS = 512


def amounts(items: tuple[Item, ...]) -> dict[str, int]:
    return {item.name: item.bytes for item in items}


def test_parameters_of_a_policy_a_value_model_and_adapters() -> None:
    assert (SHAPE.experts, SHAPE.experts_per_token, SHAPE.expert_mlp, SHAPE.expert_layers) == (0, 0, 0, 0)
    assert SHAPE.parameters == PARAMETERS
    assert SHAPE.without_head == 2_368 + 800_000 + 8 + 8
    # With rank 2, q, k, v and output have 16 + 12 + 12 + 16 rows and columns, and the MLP 3 x 24.
    assert SHAPE.lora_parameters(2) == 2 * 4 * (56 + 72)
    assert replace(SHAPE, qkv_bias=True).attention == 208 + 8 + 4 + 4


def test_experts_are_in_every_so_many_layers_but_those_that_have_none() -> None:
    moe = dict(known_model("Qwen/Qwen3-30B-A3B") or {})
    shape = shape_of(moe)
    assert shape is not None
    assert (shape.experts_per_token, shape.expert_mlp, shape.expert_layers) == (8, 768, 48)
    sparse = shape_of(moe | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]})
    assert sparse is not None and sparse.expert_layers == 1
    assert (known("Qwen/Qwen3-8B").experts_per_token, known("Qwen/Qwen3-8B").expert_mlp) == (0, 0)
    unsaid = shape_of({name: value for name, value in moe.items() if name != "num_experts_per_tok"})
    assert unsaid is not None and unsaid.experts_per_token == 0


def test_moments_and_parts_of_items() -> None:
    small, sure = Item("a", 3, certain=False), Item("b", 4)
    assert listed(Item("none", 0), None, Item("one", 1)) == (Item("one", 1),)
    moment = Moment("now", (small, sure))
    assert (moment.total, moment.certain) == (7, 4)
    assert Part("part", 1, (Moment("before", (sure,)), moment)).peak is moment


@pytest.mark.parametrize(
    ("total", "refused"), [(92, None), (93, False), (114, False), (116, True)], ids=["fits", "near", "over", "too much"]
)
def test_estimates_are_refused_beyond_their_error_and_warned_about_when_near(total: int, refused: bool | None) -> None:
    part = Part("part", 1, (Moment("now", (Item("estimate", total, certain=False),)),))
    assert [verdict.refused for verdict in verdicts([part], 100)] == ([] if refused is None else [refused])


@pytest.mark.parametrize(
    ("name", "size"), [("fp32", 4), ("float32", 4), ("bf16", 2), ("bfloat16", 2), ("fp16", 2), ("float16", 2)]
)
def test_types_have_their_sizes(name: str, size: int) -> None:
    assert dtype_bytes(name, 0) == size


@pytest.mark.parametrize(
    ("changes", "update", "forward"),
    [
        ({}, 2, 2),
        ({f"{ROLLOUT}.temperature": 1.0}, 2, 2),
        ({f"{ROLLOUT}.temperature": 0.7}, 4, 4),
        ({f"{ACTOR}.entropy_coeff": 0.1}, 6, 2),
        ({f"{ACTOR}.calculate_entropy": True}, 6, 2),
        ({f"{FSDP}.use_torch_compile": False}, 2, 6),
        ({f"{FSDP}.use_torch_compile": False, f"{FSDP}.entropy_from_logits_with_chunking": True}, 2, 2),
        (MEGATRON, 10, 10),
        (MEGATRON | {f"{ACTOR}.entropy_coeff": 0.1}, 14, 10),
        ({f"{MODEL}.use_fused_kernels": True}, 0, 0),
    ],
)
def test_bytes_of_a_logit_by_who_needs_it(changes: dict[str, Any], update: int, forward: int) -> None:
    rank = actor_rank(configured(changes), SHAPE)
    found = [amounts(items).get("logits", 0) / (TOKENS * 100_000) for items in (rank.update, rank.forward)]
    assert found == [update, forward]


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({}, TOKENS),
        ({f"{ACTOR}.ulysses_sequence_parallel_size": 2}, TOKENS // 2),
        (MEGATRON | {f"{ACTOR}.megatron.context_parallel_size": 2}, TOKENS // 2),
        (MEGATRON | {f"{ACTOR}.ulysses_sequence_parallel_size": 2}, TOKENS),
        ({f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 300}, 300),
        ({f"{ACTOR}.use_dynamic_bsz": True}, 16_384),
    ],
)
def test_tokens_of_a_micro_batch_by_sequences_their_split_or_a_budget(changes: dict[str, Any], tokens: int) -> None:
    logit = 10 if changes.get("model_engine") == "megatron" else 2
    assert amounts(actor_rank(configured(changes), SHAPE).update)["logits"] == tokens * 100_000 * logit


def test_activations_of_fsdp() -> None:
    rank = actor_rank(configured({}), SHAPE)
    # Kept are the inputs of four layers and, at the output, 16 bytes for each hidden entry.
    assert amounts(rank.update)["activations"] == TOKENS * (4 * 8 * 2 + 16 * 8)
    assert amounts(rank.forward)["activations"] == TOKENS * (8 * 8 + 6 * 16)
    narrow = actor_rank(configured({}), replace(SHAPE, mlp=4))
    assert amounts(narrow.forward)["activations"] == TOKENS * (8 * 8 + 4 * 12)


@pytest.mark.parametrize(("granularity", "kept"), [("full", 4 * 8 * 2 + 232), ("selective", 4 * 232)])
def test_activations_of_megatron_by_its_own_setting(granularity: str, kept: int) -> None:
    recompute = {f"{ACTOR}.megatron.override_transformer_config": {"recompute_granularity": granularity}}
    rank = actor_rank(configured(MEGATRON | recompute), SHAPE)
    # A layer keeps 8 x 8 bytes for its norms, 6 x 12 for attention and 6 x 16 for the MLP.
    assert amounts(rank.update)["activations"] == TOKENS * kept
    assert amounts(rank.forward)["activations"] == TOKENS * 232


def test_reference_policy_is_in_host_memory_and_gathers_two_layers() -> None:
    rank = reference_rank(configured({"actor_rollout_ref.ref.fsdp_config.use_torch_compile": False}), SHAPE)
    assert amounts(rank.host) == {"weights": PARAMETERS // 4 * 4}
    assert (rank.update, rank.at_rest) == ((), ())
    assert amounts(rank.forward) == {
        "activations": TOKENS * 160,
        "logits": TOKENS * 100_000 * 2,
        "gathered layers": 2 * (800_008 + 2 * 592),
        CONTEXT.name: CONTEXT.bytes,
    }


def test_critic_has_one_output_and_no_logits() -> None:
    rank = critic_rank(configured(GAE | {"critic.ppo_max_token_len_per_gpu": 128}), SHAPE)
    assert rank.weights == 4 * (802_384 // 4)
    assert "logits" not in amounts(rank.update)


@pytest.mark.parametrize(("servers", "tokens"), [(1, 1000), (2, 500), (16, 128)])
def test_ranks_of_a_log_prob_server_share_a_batch_down_to_the_longest_sequence(servers: int, tokens: int) -> None:
    sizes = {"model_engine_server.n_gpus_per_node": servers, "model_engine_server.max_batch_tokens": 1000}
    config = configured(SERVERS | sizes)
    rank = server_rank(config, read_settings(config)[0].servers, SHAPE)
    assert amounts(rank.forward)["logits"] == tokens * 100_000 * 2


def test_megatrons_log_prob_servers_have_no_logits_with_fused_kernels() -> None:
    for fused, logits in ((False, 8 * 100_000 * 10), (True, 0)):
        sizes = {f"{MODEL}.use_fused_kernels": fused, "model_engine_server.max_batch_tokens": 8}
        config = configured(MEGATRON_SERVERS | sizes)
        rank = server_rank(config, read_settings(config)[0].servers, SHAPE)
        assert amounts(rank.forward).get("logits", 0) == logits


def test_room_of_an_engines_cache() -> None:
    assert Engine(weights=300, share=0.5, token_bytes=7).cache_tokens(1000) == 28
    assert Engine(weights=300, share=0.5, token_bytes=1).cache_tokens(500) == 0


def test_weights_of_an_engine_and_its_keys_and_values() -> None:
    alone = configured({f"{ROLLOUT}.tensor_model_parallel_size": None})
    assert rollout_engine(alone, SHAPE) == Engine(2 * PARAMETERS, 0.5, 2 * 4 * 1 * 4 * 2)
    two = configured({f"{ROLLOUT}.gpu_memory_utilization": 0.8})
    assert rollout_engine(two, replace(SHAPE, kv_heads=4)).token_bytes == 2 * 4 * 2 * 4 * 2
    assert rollout_engine(two, SHAPE) == Engine(PARAMETERS, 0.8, 2 * 4 * 1 * 4 * 2)


@pytest.mark.parametrize(("expert_parallel", "spread"), [(None, 1), (1, 1), (2, 2)])
def test_experts_are_shared_out_with_expert_parallelism_alone(expert_parallel: int | None, spread: int) -> None:
    sizes = {"tensor_model_parallel_size": 1, "data_parallel_size": 2, "expert_parallel_size": expert_parallel}
    shape = replace(SHAPE, experts=4, experts_per_token=2, expert_mlp=16, expert_layers=4)
    # There are no dense MLPs, and each layer has a router of 4 x 8.
    dense, experts = PARAMETERS - 4 * 384 + 4 * 32, 4 * 4 * 384
    engine = rollout_engine(configured({f"{ROLLOUT}.{name}": size for name, size in sizes.items()}), shape)
    assert engine.weights == 2 * (dense + experts // spread)


def test_what_a_sleeping_engine_keeps_buckets_and_the_longest_request() -> None:
    alone = configured({f"{ROLLOUT}.tensor_model_parallel_size": 1, f"{ROLLOUT}.max_model_len": 100})
    assert (asleep(alone).bytes, asleep(configured({})).bytes) == (GIB, GIB * 5 // 2)
    assert bucket_bytes(alone) == 2048 * MIB
    sized = configured({f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": 3})
    found = [device_buckets(sized, hands_over=hands_over) for hands_over in (False, True)]
    assert [item.bytes // MIB for item in found if item is not None] == [6, 9]
    assert device_buckets(configured({f"{ROLLOUT}.checkpoint_engine.backend": "recipe_gloo"}), hands_over=True) is None
    unsaid = configured({f"{ROLLOUT}.max_model_len": None})
    assert (room(alone, 4096), room(unsaid, None), longest(unsaid)) == (100, 128, 128)
    assert room(unsaid, 4096) == 4096, "verl takes the model's positions"


def test_what_a_rank_keeps_on_its_device_where_nothing_is_offloaded() -> None:
    rank = Rank(weights=1, gradients=2, optimizer=3, update=(), forward=())
    assert (amounts(rank.at_rest), rank.host) == ({"weights": 1, "optimizer": 3}, ())


def test_megatron_counts_the_heavier_of_its_first_and_last_stage() -> None:
    assert Megatron(8, tensor=2, pipeline=2).copies == 2
    rank = megatron_rank(SHAPE, Megatron(2, pipeline=2), Work(64, 10), Work(64, 10))
    last = 2_368 // 2 + 800_000 + 8
    assert (rank.weights, rank.gradients, rank.optimizer) == (2 * last, 4 * last, 12 * last)
    # Kept are the inputs of two layers for one micro-batch, and a layer that is computed again.
    assert amounts(rank.update)["activations"] == 64 * (2 * 8 * 2 + 232)
    assert amounts(rank.update)["logits"] == amounts(rank.forward)["logits"] == 64 * 100_000 * 10
    first = megatron_rank(SHAPE, Megatron(2, pipeline=2), Work(64, 0), None)
    assert first.weights == 2 * (2_368 // 2 + 800_000)
    assert amounts(first.update)["activations"] == 64 * (2 * 2 * 8 * 2 + 232)
    assert first.forward == ()


def test_tensor_parallel_ranks_of_megatron_share_inputs_too() -> None:
    rank = megatron_rank(SHAPE, Megatron(2, tensor=2), Work(64, 0), None)
    assert amounts(rank.update)["activations"] == 4 * 32 * 8 * 2 + 64 * 232 // 2


def parts(changes: Mapping[str, Any], critic: ModelShape | None = None, device: int | None = None) -> dict[str, Part]:
    config = configured(changes)
    found = parts_of(RuleContext(config, read_settings(config)[0], None, None, ()), Models(SHAPE, critic), device)
    return {part.name: part for part in found}


def training(changes: Mapping[str, Any], critic: ModelShape | None = None) -> dict[str, set[str]]:
    """Return what is on a training rank at each of its moments."""
    return {moment.name: set(amounts(moment.items)) for moment in parts(changes, critic)["trainer rank"].moments}


def test_training_ranks_hold_what_their_other_models_keep_while_one_computes() -> None:
    assert set(training({})) == {"update", "log-probs"}
    assert set(training({PROXIMAL: "bypass"})) == {"update"}
    assert set(training({}, critic=SHAPE)) == set(training(GAE)) == {"update", "log-probs"}
    both = training(GAE, critic=SHAPE)
    assert set(both) == {"update", "log-probs", "update of the critic"}
    assert {"weights", "gradients", "weights of the critic", "optimizer of the critic"} <= both["update"]
    assert {"weights", "gradients", "weights of the actor"} <= both["update of the critic"]
    assert "gradients" not in both["log-probs"]
    for moment, other in (("update", "actor"), ("log-probs", "actor"), ("update of the critic", "critic")):
        assert not any(name.endswith(f"of the {other}") for name in both[moment])


def test_reference_policy_computes_beside_the_actor_unless_the_actors_base_is_it() -> None:
    found = training({KL: True})
    assert set(found) == {"update", "log-probs", "log-probs of the reference policy"}
    assert "weights of the actor" in found["log-probs of the reference policy"]
    assert set(training({KL: True} | MERGED)) == {"update", "log-probs"}
    assert set(training(MERGED)) == {"update", "log-probs"}


@pytest.mark.parametrize("placed", [{"async_training.trigger_parameter_sync_step": 1}, IN_TURNS])
def test_hosts_have_what_is_offloaded_of_each_model(placed: dict[str, Any]) -> None:
    name = "accelerator in turns" if placed is IN_TURNS else "trainer rank"
    kept = parts(placed | GAE | {KL: True}, critic=SHAPE)[name]
    assert amounts(kept.host) == {"weights of the reference policy": PARAMETERS // 4 * 4}
    offloads = {f"{FSDP}.param_offload": True, "critic.fsdp.optimizer_offload": True}
    offloaded = parts(placed | GAE | {KL: True} | offloads, critic=SHAPE)[name]
    assert amounts(offloaded.host) == {
        "weights": PARAMETERS // 4 * 4,
        "optimizer of the critic": 2 * 4 * (802_384 // 4),
        "weights of the reference policy": PARAMETERS // 4 * 4,
    }


@pytest.mark.parametrize(("save_freq", "source", "copies"), [(-1, "bypass", 0), (5, "bypass", 1), (-1, "recompute", 2)])
def test_weights_are_kept_where_a_version_has_several_batches(save_freq: int, source: str, copies: int) -> None:
    for batches in (1, 4):
        run = {"async_training.trigger_parameter_sync_step": batches, "trainer.save_freq": save_freq}
        kept = parts(run | {"async_training.proximal_log_probs": source})["trainer rank"].host
        assert [item.bytes for item in kept] == [PARAMETERS // 4 * 4] * (copies if batches > 1 else 0)


def test_copies_of_the_weights_in_host_memory() -> None:
    found = parts({}), parts({"async_training.weights.publish": "inline"})
    assert [[item.bytes for item in each["trainer rank"].host_once] for each in found] == [[2 * PARAMETERS], []]
    assert [amounts(each["rollout replica"].host) for each in found] == [{}, {}]


@pytest.mark.parametrize("staging", ["device", "host", "none"])
def test_next_weights_are_where_they_are_staged(staging: str) -> None:
    replica = parts({"async_training.weights.staging": staging})["rollout replica"]
    (moment,) = replica.moments
    # Two ranks share the model.
    places = [amounts(items).get("next weights", 0) for items in (moment.items, replica.host)]
    assert places == [PARAMETERS * (staging == "device"), PARAMETERS * (staging == "host")]


def test_sglangs_share_has_no_activations_and_a_sleeping_engine_keeps_its_weights_on_the_host() -> None:
    sglang = {f"{ROLLOUT}.name": "sglang", f"{ROLLOUT}.tensor_model_parallel_size": 2}
    assert outside_share(configured({}), 80 * GIB) is None
    eager, tokens = {f"{ROLLOUT}.enforce_eager": True}, {f"{ROLLOUT}.engine_kwargs.sglang": {"chunked_prefill_size": 1}}
    # 512 MiB, 1.5 MiB for each token of a prefill, 2 MiB for each sequence in a graph, and 128 MiB for each rank.
    for changes, size, mib in (
        ({}, 80, 512 + 12288 + 512 + 256),
        ({}, 24, 512 + 3072 + 48 + 256),
        ({}, 180, 512 + 24576 + 1024 + 256),
        ({f"{ROLLOUT}.tensor_model_parallel_size": 4}, 40, 512 + 6144 + 320 + 512),
        (eager | tokens, 80, 512 + 3072 + 256),
    ):
        item = outside_share(configured(sglang | changes), size * GIB)
        assert item is not None and (item.bytes, item.certain) == (mib * MIB, False)
    for engine, outside in (({}, 0), (sglang, 13568 * MIB)):
        held = amounts(parts(engine, device=64 * GIB)["rollout replica"].peak.items)
        cache = held[f"rollout engine: KV cache{'' if engine else ' and activations'}"]
        assert cache + held["rollout engine: weights"] == 32 * GIB
        assert held.get("rollout engine: activations and graphs", 0) == outside
        kept = amounts(parts(IN_TURNS | engine)["accelerator in turns"].host).get("copy of a sleeping engine's weights")
        assert kept == (PARAMETERS if engine else None)


def test_accelerators_in_turns_hold_what_the_other_side_keeps() -> None:
    shared = parts(IN_TURNS | GAE, critic=SHAPE)["accelerator in turns"]
    moments = {moment.name: amounts(moment.items) for moment in shared.moments}
    assert moments["handing weights over"]["gathered parameters"] == 2 * 2 * 800_000
    assert f"{FSDP}.param_offload" in shared.settings
    for alone in (parts(IN_TURNS | GAE), parts(IN_TURNS, critic=SHAPE)):
        (resting,) = (moment for moment in alone["accelerator in turns"].moments if moment.name == "generation")
        assert "weights of the critic" not in amounts(resting.items)
    for moment in ("handing weights over", "generation"):
        assert {"weights of the critic", "optimizer of the critic"} <= moments[moment].keys()
    reference = {KL: True, "actor_rollout_ref.ref.strategy": "megatron"}
    megatron = parts(IN_TURNS | MEGATRON | reference)["accelerator in turns"]
    # Megatron's reference policy stays on the device; FSDP2's is in host memory.
    for moment in megatron.moments:
        kept = amounts(moment.items)
        assert ("weights of the reference policy" in kept) is (moment.name != "log-probs of the reference policy")
    assert f"{ACTOR}.megatron.param_offload" in megatron.settings

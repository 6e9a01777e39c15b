# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts staged into an FSDP2 model: one by one, packed, and by the names of a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_staged_shards import VOCABULARY, Rank, make_model
from test_staged_shards import ranks as ranks
from transformers.core_model_loading import revert_weight_conversion
from verl.workers.engine.fsdp.utils import unfuse_moe_params

from recipe.async_engine.config.rules.experts import OTHER_EXPERTS
from recipe.async_engine.log_prob_servers import fsdp2_shards
from recipe.async_engine.log_prob_servers.fsdp2_shards import FSDP2Shards
from recipe.async_engine.weights.staged import StagingRefused

# Three, so that two ranks have two and one; the grouped routers want an even number.
QWEN = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
GROUPED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "head_dim": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
LOCAL = {"num_local_experts": 3, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, int]] = {
    "qwen2_moe": {**QWEN, "shared_expert_intermediate_size": 8},
    "qwen3_moe": QWEN,
    "olmoe": {"num_experts": 3, "num_experts_per_tok": 2, "eos_token_id": 1, "pad_token_id": 0},
    "deepseek_v3": {**GROUPED, **LATENT},
    "glm4_moe": GROUPED,
    "ernie4_5_moe": {"moe_num_experts": 3, "moe_k": 2, "moe_intermediate_size": 8, "moe_layer_start_index": 0},
    "mixtral": LOCAL,
    "minimax_m2": {**LOCAL, "bos_token_id": 1, "eos_token_id": 1},
    "phimoe": LOCAL,
    "granitemoe": LOCAL,
    "gpt_oss": {**LOCAL, "pad_token_id": 0, "eos_token_id": 1},
}


def model_of(family: str, seed: int) -> torch.nn.Module:
    model = make_model(family, False, seed, **FAMILIES[family]).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.copy_(torch.rand_like(buffer))
    return model


def streams(family: str, seed: int) -> dict[str, dict[str, torch.Tensor]]:
    """The same weights as verl's FSDP engine sends them, as merged LoRA weights come, and as in a checkpoint."""
    model = model_of(family, seed)
    packed = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return {
        "verl's": dict(unfuse_moe_params(packed.items(), family)),
        "packed": packed,
        "checkpoint's": revert_weight_conversion(model, dict(packed)),
    }


def scenario_load(rank: int, family: str) -> None:
    member = Rank(family, False, False, **FAMILIES[family])
    before = member.logits()
    for version, kind in enumerate(("verl's", "packed", "checkpoint's", "verl's"), start=1):
        assert member.load(streams(family, version)[kind], version) is None, kind
        assert torch.equal(member.logits(), before), "staging changed the live weights"
        member.staged.swap(version)
        assert member.holds(streams(family, version)["packed"]), kind
        before = member.logits()
        with torch.no_grad():
            expected = model_of(family, version)(torch.arange(9)[None] % VOCABULARY).logits
        assert torch.allclose(before, expected, atol=1e-6), kind


ALWAYS = {"qwen3_moe", "deepseek_v3", "mixtral", "gpt_oss"}


@pytest.mark.parametrize(
    "family", [family if family in ALWAYS else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
)
def test_experts_reach_a_sharded_model_whole_by_any_name(ranks: Any, family: str) -> None:
    assert ranks(scenario_load, family) == {0}


def scenario_missing(rank: int, family: str) -> None:
    member = Rank(family, False, False, **FAMILIES[family])
    old, new = streams(family, 0), streams(family, 1)
    parts = [name for name in new["verl's"] if ".experts." in name]
    assert len(parts) > 6
    for name in parts:
        message = member.refusal({key: tensor for key, tensor in new["verl's"].items() if key != name})
        assert message.endswith(f"1 tensors never came, among them {name}"), message
    name, whole = parts[-1], "model.layers.1.mlp.experts.down_proj"
    message = member.refusal({key: tensor for key, tensor in new["packed"].items() if key != whole})
    assert "model.layers.1.mlp.experts.0.down_proj.weight" in message and "tensors never came" in message
    assert f"{name} has the shape" in member.refusal(new["verl's"] | {name: new["verl's"][name][:, :-1]})
    assert f"{whole} has the shape" in member.refusal(new["packed"] | {whole: new["packed"][whole][:-1]})
    beyond = name.replace(".experts.2.", ".experts.3.")
    assert f"the model has no tensor {beyond}" in member.refusal(new["verl's"] | {beyond: new["verl's"][name]})
    assert member.holds(old["packed"])
    assert member.load(new["verl's"]) is None
    member.staged.swap(1)
    assert member.holds(new["packed"])


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_version_without_one_expert_is_refused_by_its_name(ranks: Any, family: str) -> None:
    assert ranks(scenario_missing, family) == {0}


def test_exporter_whose_tensors_are_no_part_of_the_model_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("qwen3_moe", 0)
    FSDP2Shards(model)

    def transposed(weights: Any, model_type: str | None = None) -> Any:
        for name, tensor in unfuse_moe_params(weights, model_type):
            yield name, tensor.T.contiguous() if ".experts.1." in name else tensor

    monkeypatch.setattr(fsdp2_shards, "unfuse_moe_params", transposed)
    with pytest.raises(StagingRefused, match=r"tensor .*experts.1.gate_proj.weight cannot be matched to a part"):
        FSDP2Shards(model)


def test_families_that_are_refused_are_those_whose_experts_verl_names_otherwise_than_their_checkpoints() -> None:
    renamed = set()
    for family in FAMILIES:
        names = [{name for name in kind if ".experts." in name} for kind in streams(family, 0).values()]
        if names[0] != names[2]:
            renamed.add(family)
    assert renamed == set(OTHER_EXPERTS) & FAMILIES.keys() and len(renamed) == 3

# SPDX-License-Identifier: Apache-2.0
"""Parallel sizes by which engines can divide a model's layers, and their own ranks.

Contract: what an engine asserts when it builds a model is refused before it is started, for each model that a run has:
the policy's in rollout, trainer and log-prob servers, the critic, the reward model. Shown by
tests/config/test_parallel_sizes.py, which asks Megatron itself.
"""

import math
from collections.abc import Iterator, Mapping

from recipe.async_engine.config.model_shape import ModelShape
from recipe.async_engine.config.problems import Problem
from recipe.async_engine.config.rules.context import REWARD_MODEL, RuleContext
from recipe.async_engine.config.verl_types import ACTOR, ROLLOUT

STAGES_OF_THEIR_OWN = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
COUNTED_AS_LAYERS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
# By training engine, the settings by which ranks share a model or a sequence.
OF_FSDP = ("ulysses_sequence_parallel_size",)
TITANS = tuple(f"torchtitan.{kind}_parallel_size" for kind in ("tensor", "pipeline", "context"))
SHARING = {
    "megatron": (
        "megatron.tensor_model_parallel_size",
        "megatron.pipeline_model_parallel_size",
        "megatron.context_parallel_size",
    ),
    "torchtitan": TITANS,
    "veomni": ("veomni.ulysses_parallel_size",),
}
SERVERS, PARALLEL, REFERENCE = "model_engine_server", "model_parallel_size", "actor_rollout_ref.ref"


def parallel_sizes(context: RuleContext) -> Iterator[Problem]:
    policy, critic = context.model("actor_rollout_ref.model.path"), context.model("critic.model.path")
    if policy is not None:
        yield from _rollout(context, ROLLOUT, policy)
        yield from _training(context, ACTOR, policy)
        yield from _servers(context, policy)
    if critic is not None:
        yield from _training(context, "critic", critic)
    judge = context.model(f"{REWARD_MODEL}.model_path")
    if judge is not None:
        yield from _rollout(context, f"{REWARD_MODEL}.rollout", judge)


def ranks(context: RuleContext) -> Iterator[Problem]:
    """Sizes by which an engine lays its ranks out; the actor's own parallel sizes are `micro_batches.division`'s."""
    for section in context.engines:
        if (context.count(f"{section}.data_parallel_size") or 1) > 1:
            yield from _one_stage(context, f"{section}.pipeline_{PARALLEL}")
    nodes, per_node = context.count("trainer.nnodes"), context.count("trainer.n_gpus_per_node")
    if nodes is not None and per_node is not None:
        trainer = nodes * per_node
        yield from _copies(context, ACTOR, f"{ACTOR}.fsdp_config", trainer)
        if context.uses_reference:
            yield from _copies(context, REFERENCE, f"{REFERENCE}.fsdp_config", trainer)
        if context.has_critic:
            yield from _copies(context, "critic", "critic.fsdp", trainer)
            yield from _parallel(context, "critic", trainer) or _critics_batches(context, trainer)
    if context.settings.servers.backend == "fsdp2":
        servers = f"{SERVERS}.engine"
        yield from _copies(context, servers, servers, context.settings.servers.ranks)
        yield from _parallel(context, servers, context.settings.servers.ranks)


def _one_stage(context: RuleContext, setting: str) -> Iterator[Problem]:
    """verl leaves pipeline stages out where it counts a node's engine cores (vllm_async_server.py:388)."""
    if (context.count(setting) or 1) > 1:
        advice = "verl would start a core of the engine for each stage: set it, or data_parallel_size, to 1."
        yield context.problem(setting, "1 with data_parallel_size above 1", advice)


def _copies(context: RuleContext, section: str, engine: str, count: int) -> Iterator[Problem]:
    """FSDP keeps a copy of the model on each ``fsdp_size`` ranks (verl/workers/engine/fsdp/utils.py:35)."""
    setting = f"{engine}.fsdp_size"
    size = context.get(setting)
    if context.get(f"{section}.strategy") in SHARING or not isinstance(size, int):
        return
    if size == 0 or (0 < size < count and count % size):
        advice = "Each copy of the model is on as many ranks; -1 is one copy on all of them."
        yield context.problem(setting, f"-1, or a divisor of the engine's {count} ranks", advice)


def _parallel(context: RuleContext, section: str, count: int) -> list[Problem]:
    """Ranks that share a sequence, or a model, are as many in each data-parallel part."""
    sizes = shared_by(context, section)
    if count % math.prod(sizes.values()) == 0:
        return []
    first, *_ = sizes
    advice = f"Change {', '.join(sizes)}, or the number of accelerators."
    allowed = f"such that {' x '.join(map(str, sizes.values()))} divides the engine's {count} ranks"
    return [context.problem(first, allowed, advice)]


def shared_by(context: RuleContext, section: str) -> dict[str, int]:
    """By how many ranks a sequence, or a model, is shared, by setting."""
    of_engine = SHARING.get(str(context.get(f"{section}.strategy")), OF_FSDP)
    return {setting: context.count(setting) or 1 for setting in (f"{section}.{name}" for name in of_engine)}


def _critics_batches(context: RuleContext, count: int) -> Iterator[Problem]:
    """verl's (verl/workers/engine_workers.py:267)."""
    setting = "critic.ppo_mini_batch_size"
    mini, answers = context.count(setting), context.count(f"{ROLLOUT}.n")
    parts = count // math.prod(shared_by(context, "critic").values())
    if mini is not None and answers is not None and mini * answers % parts:
        advice = f"{mini} prompts with {answers} answers are {mini * answers} trajectories: change either."
        yield context.problem(setting, f"such that its trajectories divide by {parts} data-parallel ranks", advice)


def _rollout(context: RuleContext, section: str, shape: ModelShape) -> Iterator[Problem]:
    """vLLM's (vllm/model_executor/layers/linear.py, models/qwen2.py:137, config/model.py:1361)."""
    in_parallel = (context.count(f"{section}.expert_parallel_size") or 1) > 1
    yield from _tensor(context, f"{section}.tensor_{PARALLEL}", shape, {} if in_parallel else _experts(shape))
    if in_parallel and not shape.experts:
        yield _no_experts(context, f"{section}.expert_parallel_size")


def _training(context: RuleContext, section: str, shape: ModelShape) -> Iterator[Problem]:
    strategy = context.get(f"{section}.strategy")
    if strategy == "megatron":
        yield from _megatron(context, f"{section}.megatron", shape)
    elif strategy not in SHARING:
        yield from _ulysses(context, section, shape)


def _servers(context: RuleContext, shape: ModelShape) -> Iterator[Problem]:
    if context.settings.servers.backend == "megatron":
        yield from _megatron(context, f"{SERVERS}.engine", shape)
    elif context.settings.servers.enabled:
        yield from _ulysses(context, f"{SERVERS}.engine", shape)


def _ulysses(context: RuleContext, section: str, shape: ModelShape) -> Iterator[Problem]:
    """verl's (verl/models/transformers/monkey_patch.py:344)."""
    yield from _attention(context, f"{section}.ulysses_sequence_parallel_size", shape)


def _megatron(context: RuleContext, section: str, shape: ModelShape) -> Iterator[Problem]:
    """Megatron's (megatron/core/transformer/transformer_config.py:920, tensor_parallel/layers.py)."""
    of_experts = f"{section}.expert_tensor_parallel_size"
    # Where none is set for experts, Megatron takes the other layers'.
    inherited = {} if context.count(of_experts) else _experts(shape)
    # mbridge pads no vocabulary; what Megatron-Bridge does is its own matter.
    vocabulary = {"entries of the vocabulary": shape.vocab} if context.get(f"{section}.vanilla_mbridge") else {}
    yield from _tensor(context, f"{section}.tensor_{PARALLEL}", shape, {**vocabulary, **inherited})
    yield from _divides(context, of_experts, _experts(shape))
    yield from _stages(context, section, shape.layers)
    setting = f"{section}.expert_{PARALLEL}"
    if shape.experts:
        yield from _divides(context, setting, {"experts": shape.experts})
    elif (context.count(setting) or 1) > 1:
        yield _no_experts(context, setting)


def _no_experts(context: RuleContext, setting: str) -> Problem:
    return context.problem(setting, "1 with a model without experts", "Remove it.")


def _experts(shape: ModelShape) -> dict[str, int]:
    """What tensor parallelism divides of experts."""
    return {"columns of an expert": shape.expert_mlp} if shape.experts else {}


def _stages(context: RuleContext, section: str, layers: int) -> Iterator[Problem]:
    """What Megatron asks of the layers of pipeline stages (megatron/core/transformer/transformer_config.py:1350-1480).

    The first and the last stage may have a number of their own, or embedding and loss count as a layer each; the others
    have equal numbers. A layout that names the layers of each stage is checked by Megatron alone.
    """
    layout = f"{section}.override_transformer_config"
    if context.get(f"{layout}.pipeline_model_parallel_layout"):
        return
    ends = {name: count for name in STAGES_OF_THEIR_OWN if (count := context.count(f"{layout}.{name}"))}
    more = [name for name in COUNTED_AS_LAYERS if context.get(f"{layout}.{name}")]
    if ends and more:
        advice = f"Megatron takes only one of the two: remove it or {', '.join(ends)}."
        yield context.problem(f"{layout}.{more[0]}", f"false with {', '.join(ends)}", advice)
        return
    setting, chunks = (f"{section}.{kind}pipeline_{PARALLEL}" for kind in ("", "virtual_"))
    size = context.count(setting) or 1
    stages, left = size - len(ends), layers + len(more) - sum(ends.values())
    if not (stages == left == 0 or (stages > 0 < left and left % stages == 0)):
        among = f"{stages} other stages" if ends else "its stages"
        advice = f"Or give a stage a number of its own: {layout}.{STAGES_OF_THEIR_OWN[0]}."
        yield context.problem(setting, f"such that {left} layers divide equally among {among}", advice)
    elif virtual := context.count(chunks):
        counts = {*ends.values(), left // stages} if stages else {*ends.values()}
        if size == 1:
            yield context.problem(chunks, f"null with {setting}=1", "One stage has no chunks to take turns: remove it.")
        elif any(count % virtual for count in counts):
            allowed = f"a divisor of the layers of each stage, {' and '.join(map(str, sorted(counts)))}"
            yield context.problem(chunks, allowed, "A stage is divided into as many chunks, which take turns.")


def _tensor(context: RuleContext, setting: str, shape: ModelShape, more: Mapping[str, int]) -> Iterator[Problem]:
    found = list(_attention(context, setting, shape))
    mlp = {"columns of the MLP": shape.mlp} if shape.dense_layers else {}
    yield from found or _divides(context, setting, {**mlp, **more})


def _attention(context: RuleContext, setting: str, shape: ModelShape) -> Iterator[Problem]:
    """Heads are divided; those of keys and values may be repeated instead."""
    size = context.count(setting) or 1
    if shape.heads % size:
        yield from _divides(context, setting, {"attention heads": shape.heads})
    elif shape.kv_heads % size and size % shape.kv_heads:
        allowed = f"a divisor or a multiple of the model's {shape.kv_heads} heads of keys and values"
        yield context.problem(setting, allowed, "Each rank has an equal number, or one that others have too.")


def _divides(context: RuleContext, setting: str, wholes: Mapping[str, int]) -> Iterator[Problem]:
    """The first of ``wholes`` that a size does not divide."""
    size = context.count(setting) or 1
    what = next((what for what, whole in wholes.items() if whole % size), None)
    if what is not None:
        allowed = f"a divisor of the model's {wholes[what]} {what}"
        yield context.problem(setting, allowed, "Each rank has an equal number.")

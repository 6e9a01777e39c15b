# SPDX-License-Identifier: Apache-2.0
"""Checks that tensor-, pipeline-, expert- and sequence-parallel sizes divide the dimensions of a run's models.

Contract: sizes with which an engine could not build its model are refused before anything starts. The checks cover the
policy in rollout, trainer and log-prob servers, the critic, the reward model and the teachers. Shown by
tests/config/test_parallel_sizes.py, which compares the checks with Megatron's own assertions.
"""

from collections.abc import Iterator, Mapping

from recipe.async_engine.config.plan import teachers
from recipe.async_engine.config.problems import Problem
from recipe.async_engine.config.rules.context import REWARD_MODEL, RuleContext
from recipe.async_engine.config.rules.experts import RETURNED, replay_mode
from recipe.async_engine.config.rules.parallel import PARALLEL, SERVERS, SHARING
from recipe.async_engine.config.verl_types import ACTOR, ROLLOUT
from recipe.plan.memory.shape import ModelShape, model_of

STAGES_OF_THEIR_OWN = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
COUNTED_AS_LAYERS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def parallel_sizes(context: RuleContext) -> Iterator[Problem]:
    """Yield a problem for each parallel size that does not fit its model, for all models of known shape."""
    policy, critic = model_of(context, "actor_rollout_ref.model.path"), model_of(context, "critic.model.path")
    if policy is not None:
        yield from _rollout(context, ROLLOUT, policy)
        yield from _training(context, ACTOR, policy)
        if context.get(RETURNED) and not policy.experts:
            yield _no_experts(context, RETURNED, "false")
        if (mode := replay_mode(context)) is not None and not policy.experts:
            yield _no_experts(context, mode, "disabled")
        if context.settings.servers.backend == "megatron":
            yield from _megatron(context, f"{SERVERS}.engine", policy)
        elif context.settings.servers.enabled:
            yield from _ulysses(context, f"{SERVERS}.engine", policy)
    if critic is not None:
        yield from _training(context, "critic", critic)
    judge = model_of(context, f"{REWARD_MODEL}.model_path")
    if judge is not None:
        yield from _rollout(context, f"{REWARD_MODEL}.rollout", judge)
    for teacher in teachers(context.config):
        if (shape := model_of(context, f"{teacher}.model_path")) is not None:
            yield from _rollout(context, f"{teacher}.inference", shape)


def _rollout(context: RuleContext, section: str, shape: ModelShape) -> Iterator[Problem]:
    """Check, as the engine's layers do, that a rollout engine's parallel sizes fit the model."""
    in_parallel = (context.count(f"{section}.expert_parallel_size") or 1) > 1
    yield from _tensor(context, f"{section}.tensor_{PARALLEL}", shape, {} if in_parallel else _experts(shape))
    if in_parallel and not shape.experts:
        yield _no_experts(context, f"{section}.expert_parallel_size")


def _training(context: RuleContext, section: str, shape: ModelShape) -> Iterator[Problem]:
    strategy = context.get(f"{section}.strategy")
    if strategy == "megatron":
        yield from _megatron(context, f"{section}.megatron", shape)
        yield from _split_sequences(context, f"{section}.megatron", shape)
    elif strategy not in SHARING:
        yield from _ulysses(context, section, shape)


def _ulysses(context: RuleContext, section: str, shape: ModelShape) -> Iterator[Problem]:
    """Check that the Ulysses sequence-parallel size fits the heads (verl/models/transformers/monkey_patch.py:344)."""
    yield from _attention(context, f"{section}.ulysses_sequence_parallel_size", shape)


def _megatron(context: RuleContext, section: str, shape: ModelShape) -> Iterator[Problem]:
    """Check that Megatron's tensor-, pipeline- and expert-parallel sizes fit the model.

    The checks are Megatron's own (megatron/core/transformer/transformer_config.py:920, core/tensor_parallel/layers.py).
    """
    of_experts = f"{section}.expert_tensor_parallel_size"
    # If no tensor-parallel size is set for experts, Megatron also uses that of the other layers for the experts.
    inherited = {} if context.count(of_experts) else _experts(shape)
    # mbridge does not pad the vocabulary, so the tensor-parallel size must divide it. Megatron-Bridge is not checked.
    vocabulary = {"entries of the vocabulary": shape.vocab} if context.get(f"{section}.vanilla_mbridge") else {}
    yield from _tensor(context, f"{section}.tensor_{PARALLEL}", shape, {**vocabulary, **inherited})
    yield from _divides(context, of_experts, _experts(shape))
    yield from _stages(context, section, shape.layers)
    setting = f"{section}.expert_{PARALLEL}"
    if shape.experts:
        yield from _divides(context, setting, {"experts": shape.experts})
    elif (context.count(setting) or 1) > 1:
        yield _no_experts(context, setting)


def _split_sequences(context: RuleContext, section: str, shape: ModelShape) -> Iterator[Problem]:
    """Check that a model with experts and tensor parallelism is trained with sequence parallelism.

    Megatron requires this (megatron/core/transformer/moe/moe_layer.py:379).
    """
    setting, tensor = f"{section}.sequence_parallel", f"{section}.tensor_{PARALLEL}"
    if shape.experts and (context.count(tensor) or 1) > 1 and not context.get(setting, True):
        advice = "Megatron's experts require it with tensor parallelism: remove the setting."
        yield context.problem(setting, f"true with {tensor}={context.count(tensor)} and a model with experts", advice)


def _no_experts(context: RuleContext, setting: str, allowed: str = "1") -> Problem:
    return context.problem(setting, f"{allowed} with a model without experts", "Remove it.")


def _experts(shape: ModelShape) -> dict[str, int]:
    """Return {name: size} of the dimension of experts that tensor parallelism splits; {} without experts."""
    return {"columns of an expert": shape.expert_mlp} if shape.experts else {}


def _stages(context: RuleContext, section: str, layers: int) -> Iterator[Problem]:
    """Check that layers divide among pipeline stages (megatron/core/transformer/transformer_config.py:1350-1480).

    All stages must have equally many layers, with one of two exceptions: the first and last stage may have their own
    numbers of layers, or embedding and loss may count as one layer each. If a setting lists the layers of each stage,
    only Megatron checks that list.
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
            yield context.problem(chunks, f"null with {setting}=1", "Interleaving needs several stages: remove it.")
        elif any(count % virtual for count in counts):
            allowed = f"a divisor of the layers of each stage, {' and '.join(map(str, sorted(counts)))}"
            yield context.problem(chunks, allowed, "It is the number of interleaved chunks of a stage.")


def _tensor(context: RuleContext, setting: str, shape: ModelShape, more: Mapping[str, int]) -> Iterator[Problem]:
    found = list(_attention(context, setting, shape))
    mlp = {"columns of the MLP": shape.mlp} if shape.dense_layers else {}
    yield from found or _divides(context, setting, {**mlp, **more})


def _attention(context: RuleContext, setting: str, shape: ModelShape) -> Iterator[Problem]:
    """Check that a parallel size divides the attention heads, and divides the KV heads or is a multiple of them."""
    size = context.count(setting) or 1
    if shape.heads % size:
        yield from _divides(context, setting, {"attention heads": shape.heads})
    elif shape.kv_heads % size and size % shape.kv_heads:
        allowed = f"a divisor or a multiple of the model's {shape.kv_heads} heads of keys and values"
        yield context.problem(setting, allowed, "A rank holds one or more heads, or several ranks share one.")


def _divides(context: RuleContext, setting: str, wholes: Mapping[str, int]) -> Iterator[Problem]:
    """Yield a problem for the first dimension in ``wholes`` that is not divisible by the parallel size ``setting``."""
    size = context.count(setting) or 1
    what = next((what for what, whole in wholes.items() if whole % size), None)
    if what is not None:
        allowed = f"a divisor of the model's {wholes[what]} {what}"
        yield context.problem(setting, allowed, "Each rank has an equal number.")

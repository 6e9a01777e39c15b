# SPDX-License-Identifier: Apache-2.0
"""Rules that know the models' shapes: parallel sizes that divide them, and memory that has room for them."""

from collections.abc import Iterator

from recipe.async_engine.settings.memory.estimate import (
    ERROR,
    Models,
    Verdict,
    parts_of,
    told,
    verdicts,
)
from recipe.async_engine.settings.memory.items import GIB, Part, gib
from recipe.async_engine.settings.memory.model import ModelShape
from recipe.async_engine.settings.problems import Problem
from recipe.async_engine.settings.rules.context import RuleContext
from recipe.async_engine.settings.verl_types import ACTOR, ROLLOUT

STAGES_OF_THEIR_OWN = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
COUNTED_AS_LAYERS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
POLICY, SERVER_ENGINE = "actor_rollout_ref.model.path", "model_engine_server.engine"


def parallel_sizes(context: RuleContext) -> Iterator[Problem]:
    """What the engines assert when they build a model's layers."""
    shape = context.model(POLICY)
    if shape is None:
        return
    yield from _divides(context, f"{ROLLOUT}.tensor_model_parallel_size", shape.heads, "attention heads")
    if context.get(f"{ACTOR}.strategy") == "megatron":
        yield from _megatron(context, f"{ACTOR}.megatron", shape)
    else:
        yield from _divides(context, f"{ACTOR}.ulysses_sequence_parallel_size", shape.heads, "attention heads")
    if context.settings.servers.backend == "megatron":
        yield from _megatron(context, SERVER_ENGINE, shape)


def _megatron(context: RuleContext, section: str, shape: ModelShape) -> Iterator[Problem]:
    yield from _divides(context, f"{section}.tensor_model_parallel_size", shape.heads, "attention heads")
    yield from _stages(context, section, shape.layers)
    experts = context.count(f"{section}.expert_model_parallel_size") or 1
    if experts > 1 and not shape.experts:
        setting = f"{section}.expert_model_parallel_size"
        yield context.problem(setting, "1 with a model without experts", "Remove it.")
    elif shape.experts:
        yield from _divides(context, f"{section}.expert_model_parallel_size", shape.experts, "experts")


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
    setting, chunks = (f"{section}.{kind}pipeline_model_parallel_size" for kind in ("", "virtual_"))
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


def _divides(context: RuleContext, setting: str, whole: int, what: str) -> Iterator[Problem]:
    size = context.count(setting)
    if size is not None and whole % size:
        yield context.problem(setting, f"a divisor of the model's {whole} {what}", "Each rank has an equal number.")


def parts(context: RuleContext) -> list[Part]:
    """The run's parts with what each takes of its accelerators; none where the model's shape is not known."""
    policy = context.model(POLICY)
    if policy is None or context.on_cpu:
        return []
    models = Models(policy, context.model("critic.model.path"))
    return parts_of(context.config, context.settings, models, device_bytes(context))


def device_bytes(context: RuleContext) -> int | None:
    """Memory of an accelerator: as the settings say, else as was found."""
    asked = context.settings.async_training.device_memory_gib
    if asked is not None:
        return int(asked * GIB)
    return context.available.device_bytes if context.available else None


def memory(context: RuleContext) -> Iterator[Problem]:
    """What cannot fit; what is only near is `warnings`."""
    for verdict in _verdicts(context):
        if verdict.refused:
            setting, *others = verdict.part.settings
            device = device_bytes(context) or 0
            fits = "what fits" if verdict.moment.certain > device else f"what fits within {ERROR:.0%}"
            advice = f"{told(verdict, device)}. Lower it, or change {', '.join(others)}; see docs/memory.md."
            yield context.problem(setting, f"{fits} into {gib(device)}", advice)


def warnings(context: RuleContext) -> list[str]:
    """What may not fit."""
    device = device_bytes(context) or 0
    return [
        f"may not fit: {told(verdict, device)}; to need less, change {', '.join(verdict.part.settings)}"
        for verdict in _verdicts(context)
        if not verdict.refused
    ]


def _verdicts(context: RuleContext) -> list[Verdict]:
    device = device_bytes(context)
    return [] if device is None else list(verdicts(parts(context), device))

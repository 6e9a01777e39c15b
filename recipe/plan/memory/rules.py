# SPDX-License-Identifier: Apache-2.0
"""Whether memory has room for the models, whose shapes are known: what a main has judge its configuration, too."""

from collections.abc import Iterator

from recipe.async_engine.config.problems import Problem
from recipe.async_engine.config.rules.context import RuleContext
from recipe.async_engine.config.verl_types import ROLLOUT
from recipe.plan.memory.estimate import (
    ERROR,
    Models,
    Verdict,
    parts_of,
    told,
    verdicts,
)
from recipe.plan.memory.generation import rollout_engine, room
from recipe.plan.memory.items import GIB, Part, gib

POLICY = "actor_rollout_ref.model.path"
MODELS_OWN = f"{ROLLOUT}.max_model_len, which is the number of the model's positions where it is null"


def parts(context: RuleContext) -> list[Part]:
    """The run's parts with what each takes of its accelerators; none where the model's shape is not known."""
    policy = context.model(POLICY)
    strategies = {context.get(f"{section}.strategy") for section in context.trained}
    if policy is None or context.on_cpu or not strategies <= {"fsdp", "fsdp2", "megatron"}:
        return []
    models = Models(policy, context.model("critic.model.path"), context.positions)
    return parts_of(context.config, context.settings, models, device_bytes(context))


def device_bytes(context: RuleContext) -> int | None:
    """Memory of an accelerator: as the settings say, else as was found."""
    asked = context.settings.async_training.device_memory_gib
    if asked is not None:
        return int(asked * GIB)
    return context.available.device_bytes if context.available else None


def problems(context: RuleContext) -> Iterator[Problem]:
    """What cannot fit; what is only near is `warnings`."""
    for verdict in _verdicts(context):
        if verdict.refused:
            setting, *others = verdict.part.settings
            device = device_bytes(context) or 0
            fits = "what fits" if verdict.moment.certain > device else f"what fits within {ERROR:.0%}"
            advice = f"{told(verdict, device)}. Lower it, or change {', '.join(others)}; see docs/memory.md."
            yield context.problem(setting, f"{fits} into {gib(device)}", advice)

    yield from _cache(context)


def _cache(context: RuleContext) -> Iterator[Problem]:
    """vLLM starts only with a KV cache for one request of the longest length (vllm/v1/core/kv_cache_utils.py)."""
    shape, device = context.model(POLICY), device_bytes(context)
    windowed = context.policy.get("sliding_window") and context.policy.get("use_sliding_window", True)
    other_size = context.get(f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype")
    if shape is None or device is None or context.on_cpu or windowed or other_size:
        return
    engine, request = rollout_engine(context.config, shape), room(context.config, context.positions)
    tokens = engine.cache_tokens(device)
    if tokens < request:
        weights = f"its share of {gib(device)} has room for {tokens} beside weights of {gib(engine.weights)}"
        longest = f"{ROLLOUT}.max_model_len={request}" if context.get(f"{ROLLOUT}.max_model_len") else MODELS_OWN
        advice = f"{weights}. Raise it, lower {longest}, or raise {ROLLOUT}.tensor_model_parallel_size."
        setting = f"{ROLLOUT}.gpu_memory_utilization"
        yield context.problem(setting, f"enough for a KV cache of one request of {request} tokens", advice)


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

# SPDX-License-Identifier: Apache-2.0
"""Rules over memory that has room for the models, whose shapes are known."""

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
from recipe.async_engine.settings.problems import Problem
from recipe.async_engine.settings.rules.context import RuleContext

POLICY = "actor_rollout_ref.model.path"


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

# SPDX-License-Identifier: Apache-2.0
"""Rules that refuse values with which a run would end without having learned anything.

verl accepts such values: a temperature of 0 makes every gradient 0, and `optim.clip_grad=0` makes every update 0.
"""

import math
from collections.abc import Iterator, Mapping

from recipe.async_engine.config.fields import is_count
from recipe.async_engine.config.problems import Problem
from recipe.async_engine.config.rules.context import RuleContext
from recipe.async_engine.config.verl_types import ACTOR, ROLLOUT, Expected, number

CORRECTION = "algorithm.rollout_correction"


GREEDY = "All answers to a prompt would be the same, and their gradients 0."
ROOM, NORM = "0 leaves no room for a change.", "Larger gradients are scaled down to it; a large number limits none."
LIMITS: Mapping[str, Expected] = {
    f"{ROLLOUT}.temperature": number(f"{GREEDY} 1 samples from the policy itself.", above=0),
    f"{ROLLOUT}.top_p": number("It is the probability mass to sample from; 1 takes all tokens.", above=0, most=1),
    f"{ROLLOUT}.repetition_penalty": number("1 means no penalty.", above=0),
    f"{ROLLOUT}.val_kwargs.temperature": number("0 samples greedily.", least=0),
    f"{ROLLOUT}.val_kwargs.top_p": number("1 takes all tokens.", above=0, most=1),
    f"{ACTOR}.optim.lr": number("0 trains nothing.", least=0),
    f"{ACTOR}.clip_ratio": number(ROOM, least=0),
    f"{ACTOR}.clip_ratio_low": number(ROOM, least=0),
    f"{ACTOR}.clip_ratio_high": number(ROOM, least=0),
    f"{ACTOR}.clip_ratio_c": number("verl's loss requires this.", above=1),
    f"{ACTOR}.optim.weight_decay": number("0 means no decay.", least=0),
    f"{ACTOR}.optim.lr_warmup_steps_ratio": number("It is a share of all steps.", least=0, most=1),
    f"{ROLLOUT}.gpu_memory_utilization": number("It is a share of an accelerator's memory.", above=0, most=1),
    f"{ACTOR}.kl_loss_coef": number("0 means no penalty.", least=0),
    "algorithm.gamma": number("1 discounts nothing.", least=0, most=1),
    "algorithm.lam": number("1 uses full returns.", least=0, most=1),
    "critic.optim.lr": number("0 trains nothing.", least=0),
    "critic.cliprange_value": number(ROOM, above=0),
}
"""The accepted numbers of each setting; null is always accepted, and verl handles it."""


def learning(context: RuleContext) -> Iterator[Problem]:
    """Refuse numbers outside of `LIMITS`, greedy sampling, and settings that prevent every update."""
    for setting, limit in LIMITS.items():
        is_used = context.has_critic or not setting.startswith("critic.")
        value = context.get(setting)
        if is_used and value is not None and not limit.fits(value):
            yield context.problem(setting, limit.allowed, limit.advice)
    top_k = context.get(f"{ROLLOUT}.top_k", -1)
    if type(top_k) is not int or top_k < -1 or top_k == 1:
        yield context.problem(f"{ROLLOUT}.top_k", "an integer >= 2, or -1 for all tokens", f"1 is greedy. {GREEDY}")
    for section in context.trained:
        if not is_count(context.get(f"{section}.ppo_epochs", 1)):
            yield context.problem(f"{section}.ppo_epochs", "an integer >= 1", "With 0 nothing would be trained.")
        clip, norm = context.get(f"{section}.optim.clip_grad"), number(NORM, above=0)
        # For Megatron, 0 is accepted: it means that gradients are not clipped.
        if context.get(f"{section}.strategy") != "megatron" and clip is not None and not norm.fits(clip):
            yield context.problem(f"{section}.optim.clip_grad", norm.allowed, norm.advice)
    yield from _thresholds(context)


def _thresholds(context: RuleContext) -> Iterator[Problem]:
    """Check the thresholds of importance weights and rejection, each a number or text with several numbers."""
    for kind, what in (("is", "Larger weights are truncated"), ("rs", "Larger values are rejected")):
        setting = f"{CORRECTION}.rollout_{kind}_threshold"
        value = context.get(setting)
        if context.get(f"{CORRECTION}.rollout_{kind}") is None or value is None:
            continue
        parts = [part for option in str(value).split(",") for part in option.split("_")]
        if isinstance(value, bool) or not all(_above_0(part) for part in parts):
            allowed = "a number > 0, or two with an underscore between them" + (", or several" if kind == "rs" else "")
            yield context.problem(setting, allowed, f"{what}: with 0 nothing would be trained.")


def _above_0(text: str) -> bool:
    try:
        return math.isfinite(float(text)) and float(text) > 0
    except ValueError:
        return False


def trains_nothing(context: RuleContext) -> Iterator[str]:
    """Warn about accepted values that leave the policy unchanged."""
    if context.get(f"{ACTOR}.optim.lr") == 0:
        yield f"{ACTOR}.optim.lr=0: the policy stays as it is"
    if all(context.get(f"{ACTOR}.clip_ratio{which}") == 0 for which in ("", "_low", "_high")):
        yield f"{ACTOR}.clip_ratio=0: the policy stays as it is beyond a batch's first update"
    steps, warmup = context.count("trainer.total_training_steps"), context.count("trainer.critic_warmup")
    if steps is not None and warmup is not None and warmup >= steps:
        yield f"trainer.critic_warmup={warmup}: none of the {steps} steps trains the policy"

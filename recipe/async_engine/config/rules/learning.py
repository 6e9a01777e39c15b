# SPDX-License-Identifier: Apache-2.0
"""Rules over settings with which a run goes on to its end and trains nothing, or nothing but noise.

verl takes them: a temperature of 0 makes every gradient 0, and a norm to clip to of 0 every update.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from recipe.async_engine.config.fields import is_count
from recipe.async_engine.config.problems import Problem
from recipe.async_engine.config.rules.context import RuleContext
from recipe.async_engine.config.verl_types import ACTOR, ROLLOUT

CORRECTION = "algorithm.rollout_correction"


@dataclass(frozen=True, slots=True)
class Limit:
    """A number that a setting must be, if it is set."""

    setting: str
    why: str
    least: float = 0.0
    most: float = math.inf
    least_too: bool = False

    def fits(self, value: Any) -> bool:
        if value is None:
            return True
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return False
        return value <= self.most and (value > self.least or (self.least_too and value == self.least))

    @property
    def allowed(self) -> str:
        most = f" and at most {self.most:g}" if math.isfinite(self.most) else ""
        return f"a number {'>=' if self.least_too else '>'} {self.least:g}{most}"


GREEDY = "All answers to a prompt would be the same, and their gradients 0."
LIMITS = (
    Limit(f"{ROLLOUT}.temperature", f"{GREEDY} 1 samples from the policy itself."),
    Limit(f"{ROLLOUT}.top_p", "It is the share of probability that is sampled from; 1 is all.", most=1),
    Limit(f"{ROLLOUT}.repetition_penalty", "1 is none."),
    Limit(f"{ROLLOUT}.val_kwargs.temperature", "0 is greedy.", least_too=True),
    Limit(f"{ROLLOUT}.val_kwargs.top_p", "1 is all.", most=1),
    Limit(f"{ACTOR}.optim.lr", "0 trains nothing.", least_too=True),
    Limit(f"{ACTOR}.clip_ratio", "0 leaves no room for a change.", least_too=True),
    Limit(f"{ACTOR}.clip_ratio_low", "0 leaves no room for a change.", least_too=True),
    Limit(f"{ACTOR}.clip_ratio_high", "0 leaves no room for a change.", least_too=True),
    Limit(f"{ACTOR}.clip_ratio_c", "verl's loss asserts that.", least=1),
    Limit(f"{ACTOR}.optim.weight_decay", "0 is none.", least_too=True),
    Limit(f"{ACTOR}.optim.lr_warmup_steps_ratio", "It is a share of all steps.", most=1, least_too=True),
    Limit(f"{ROLLOUT}.gpu_memory_utilization", "It is a share of an accelerator's memory.", most=1),
    Limit(f"{ACTOR}.kl_loss_coef", "0 is none.", least_too=True),
    Limit("algorithm.gamma", "1 discounts nothing.", most=1, least_too=True),
    Limit("algorithm.lam", "1 takes whole returns.", most=1, least_too=True),
    Limit("critic.optim.lr", "0 trains nothing.", least_too=True),
    Limit("critic.cliprange_value", "0 leaves no room for a change."),
)


def learning(context: RuleContext) -> Iterator[Problem]:
    for limit in LIMITS:
        used = context.has_critic or not limit.setting.startswith("critic.")
        if used and not limit.fits(context.get(limit.setting)):
            yield context.problem(limit.setting, limit.allowed, limit.why)
    top_k = context.get(f"{ROLLOUT}.top_k", -1)
    if type(top_k) is not int or top_k < -1 or top_k == 1:
        yield context.problem(f"{ROLLOUT}.top_k", "an integer >= 2, or -1 for all tokens", f"1 is greedy. {GREEDY}")
    for section in context.trained:
        if not is_count(context.get(f"{section}.ppo_epochs", 1)):
            yield context.problem(f"{section}.ppo_epochs", "an integer >= 1", "With none nothing would be trained.")
        clip = context.get(f"{section}.optim.clip_grad", 1.0)
        # Megatron takes 0 for no clipping.
        if context.get(f"{section}.strategy") != "megatron" and not Limit("", "").fits(clip):
            advice = "Each gradient would be scaled to that norm; a large number is no limit."
            yield context.problem(f"{section}.optim.clip_grad", "a number > 0", advice)
    yield from _thresholds(context)


def _thresholds(context: RuleContext) -> Iterator[Problem]:
    """Of weights and rejection, which verl has as numbers or as text."""
    for kind, what in (("is", "Weights are cut there"), ("rs", "What lies above is rejected")):
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
    """What is accepted, since somebody may want it, and leaves the policy as it is."""
    if context.get(f"{ACTOR}.optim.lr") == 0:
        yield f"{ACTOR}.optim.lr=0: the policy stays as it is"
    if all(context.get(f"{ACTOR}.clip_ratio{which}") == 0 for which in ("", "_low", "_high")):
        yield f"{ACTOR}.clip_ratio=0: the policy stays as it is beyond a batch's first update"
    steps, warmup = context.count("trainer.total_training_steps"), context.count("trainer.critic_warmup")
    if steps is not None and warmup is not None and warmup >= steps:
        yield f"trainer.critic_warmup={warmup}: none of the {steps} steps trains the policy"

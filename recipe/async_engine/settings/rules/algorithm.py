# SPDX-License-Identifier: Apache-2.0
"""Rules over advantages, losses and corrections; see :mod:`recipe.async_engine.settings.validation`.

What they accept runs, and what they refuse of verl's own does not: tests/integration/test_algorithms.py calls each of
verl's functions with what a batch has here.
"""

from collections.abc import Iterator
from typing import TypeGuard

from recipe.async_engine.settings.log_prob_servers import Proximal
from recipe.async_engine.settings.plan import proximal_source
from recipe.async_engine.settings.problems import Problem
from recipe.async_engine.settings.rules.context import RuleContext
from recipe.async_engine.settings.verl_types import ACTOR, ROLLOUT

# The advantage estimators of verl 0.9.1 that need no second, greedy answer for each prompt.
ADVANTAGE_ESTIMATORS = (
    "gae",
    "gdpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "grpo_vectorized",
    "opo",
    "optimal_token_baseline",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rloo",
    "rloo_vectorized",
    "tir_optimal_token_baseline",
)
# Those that compare the answers of one group with each other: with one answer every advantage is zero or undefined.
GROUP_ESTIMATORS = frozenset(ADVANTAGE_ESTIMATORS) - {"gae", "gpg", "reinforce_plus_plus"}
TOKEN_BASELINES = ("optimal_token_baseline", "tir_optimal_token_baseline")
KL_ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
REJECTIONS = (
    *(f"token_k{number}" for number in (1, 2, 3)),
    *(f"seq_{over}_k{number}" for over in ("sum", "mean") for number in (1, 2, 3)),
    *("seq_max_k2", "seq_max_k3"),
)


def advantages(context: RuleContext) -> Iterator[Problem]:
    estimator = str(context.get("algorithm.adv_estimator"))
    if estimator == "remax":
        advice = "It needs a greedy answer for each prompt, which is not supported yet; choose another estimator."
        yield context.problem("algorithm.adv_estimator", f"one of {', '.join(ADVANTAGE_ESTIMATORS)}", advice)
    if estimator == "gae" and context.get("critic.enable") is False:
        advice = "gae takes its advantages from a critic's values; remove the setting, or choose another estimator."
        yield context.problem("critic.enable", "true or null with algorithm.adv_estimator=gae", advice)
    if estimator in GROUP_ESTIMATORS and context.count(f"{ROLLOUT}.n") == 1:
        advice = f"{estimator} compares the answers to one prompt: with a single one there is nothing to learn from."
        yield context.problem(f"{ROLLOUT}.n", "an integer >= 2", advice)
    if estimator == "gdpo" and not context.get("algorithm.gdpo_reward_keys"):
        advice = "It compares the answers by several fields of what the reward function returns: name them."
        yield context.problem("algorithm.gdpo_reward_keys", "a list of names with algorithm.adv_estimator=gdpo", advice)
    if estimator in TOKEN_BASELINES:
        yield from _token_baseline(context, estimator)
    if context.get("algorithm.filter_groups.enable"):
        yield from _group_filter(context)


def _group_filter(context: RuleContext) -> Iterator[Problem]:
    if not context.get("algorithm.filter_groups.metric"):
        advice = "reward is the reward itself; others are fields of what the reward function returns, such as acc."
        yield context.problem("algorithm.filter_groups.metric", "a name with filter_groups.enable=true", advice)
    if context.count(f"{ROLLOUT}.n") == 1:
        advice = "A group of one answer is always as good as itself: nothing would be filtered. Remove the setting."
        yield context.problem("algorithm.filter_groups.enable", f"false with {ROLLOUT}.n=1", advice)


def _token_baseline(context: RuleContext, estimator: str) -> Iterator[Problem]:
    """They weigh tokens by the whole distribution that each was drawn from, which only the trainer's pass gives."""
    if not context.get(f"{ACTOR}.calculate_sum_pi_squared"):
        allowed = f"true with algorithm.adv_estimator={estimator}"
        yield context.problem(f"{ACTOR}.calculate_sum_pi_squared", allowed, "Set it, or choose another estimator.")
    if proximal_source(context.config, context.settings) is not Proximal.RECOMPUTE:
        allowed = f"recompute with algorithm.adv_estimator={estimator}"
        advice = "No other source of log-probs gives the sums of squared probabilities that it needs."
        yield context.problem("async_training.proximal_log_probs", allowed, advice)
    if context.get("actor_rollout_ref.model.use_fused_kernels"):
        allowed = f"false with algorithm.adv_estimator={estimator}"
        advice = "Fused kernels never have the distribution that it needs; remove the setting."
        yield context.problem("actor_rollout_ref.model.use_fused_kernels", allowed, advice)


def losses(context: RuleContext) -> Iterator[Problem]:
    setting = f"{ACTOR}.policy_loss.loss_mode"
    mode = str(context.get(setting, "vanilla"))
    if mode.startswith("recipe_"):
        advice = "It is derived from async_training.proximal_log_probs: set that, and remove this."
        yield context.problem(setting, "a loss of verl's, or one that you registered", advice)
    if mode == "bypass_mode" and proximal_source(context.config, context.settings) is not Proximal.BYPASS:
        allowed = "another loss where async_training.proximal_log_probs is not bypass"
        yield context.problem(setting, allowed, "It takes old log-probs for those of the policy that sampled.")
    beta = context.get(f"{ACTOR}.policy_loss.dro_beta")
    if mode == "dro" and not (_is_number(beta) and beta > 0):
        yield context.problem(f"{ACTOR}.policy_loss.dro_beta", f"a number > 0 with {setting}=dro", "Set it.")


def correction(context: RuleContext) -> Iterator[Problem]:
    """What verl would find out at the first batch, or with the sources that correct in the loss at the first update."""
    section = "algorithm.rollout_correction"
    rejection = context.get(f"{section}.rollout_rs")
    if rejection is None:
        return
    options = [option.strip() for option in str(rejection).split(",")]
    if not set(options) <= set(REJECTIONS):
        allowed = f"null, or of {', '.join(REJECTIONS)}"
        yield context.problem(f"{section}.rollout_rs", allowed, "Separate them by commas.")
    elif context.get(f"{section}.rollout_rs_threshold") is None:
        allowed = f"a threshold, or one for each of {rejection}, separated by commas"
        yield context.problem(f"{section}.rollout_rs_threshold", allowed, f"Set it, or {section}.rollout_rs=null.")


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)

# SPDX-License-Identifier: Apache-2.0
"""Rules for advantages, losses and corrections.

verl's functions that the rules accept work on batches of this package, and those that the rules refuse fail:
tests/integration/test_algorithms.py calls all of them with the columns of such a batch.
"""

from collections.abc import Iterator

from recipe.async_engine.config.fields import is_number
from recipe.async_engine.config.log_prob_servers import Proximal
from recipe.async_engine.config.plan import proximal_source
from recipe.async_engine.config.problems import Problem
from recipe.async_engine.config.rules.context import RuleContext
from recipe.async_engine.config.verl_types import ACTOR, ROLLOUT

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
"""The advantage estimators of verl 0.9.1, except remax, which needs an additional greedy answer to each prompt."""
# Estimators that compare the answers of one group: with a single answer every advantage is zero or undefined.
GROUP_ESTIMATORS = frozenset(ADVANTAGE_ESTIMATORS) - {"gae", "gpg", "reinforce_plus_plus"}
TOKEN_BASELINES = ("optimal_token_baseline", "tir_optimal_token_baseline")
KL_ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
REJECTIONS = (
    *(f"token_k{number}" for number in (1, 2, 3)),
    *(f"seq_{over}_k{number}" for over in ("sum", "mean") for number in (1, 2, 3)),
    *("seq_max_k2", "seq_max_k3"),
)
# Losses with a ratio to the proximal policy. With bypassed log-probs, the proximal policy is the policy that sampled
# the answers, so the ratio is the importance weight.
RATIO_LOSSES = ("vanilla", "cispo", "clip_cov", "dppo_kl", "dppo_tv", "geo_mean", "gspo", "kl_cov", "sapo")
# The two names of verl's PPO loss.
PPO = ("vanilla", "bypass_mode")


def has_ratio(loss: str) -> bool:
    """Return whether a loss has a ratio to the proximal policy.

    A user's own loss counts as a loss without a ratio, so it is multiplied by importance weights if the settings ask
    for them.
    """
    return loss in RATIO_LOSSES


def chosen_loss(mode: str, loss_type: str | None, source: Proximal) -> str:
    """Return the name of the loss: ``mode`` or, if ``mode`` is verl's PPO loss, the loss that ``loss_type`` selects."""
    if mode not in PPO:
        return mode
    return "reinforce" if loss_type == "reinforce" and source is Proximal.BYPASS else "vanilla"


def advantages(context: RuleContext) -> Iterator[Problem]:
    """Check the settings that the advantage estimator requires."""
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
    """Check that the filter of prompt groups has a metric, and that a group has more than one answer."""
    if not context.get("algorithm.filter_groups.metric"):
        advice = "reward is the reward itself; others are fields of what the reward function returns, such as acc."
        yield context.problem("algorithm.filter_groups.metric", "a name with filter_groups.enable=true", advice)
    if context.count(f"{ROLLOUT}.n") == 1:
        advice = "A single answer cannot be compared with others, so nothing would be filtered. Remove the setting."
        yield context.problem("algorithm.filter_groups.enable", f"false with {ROLLOUT}.n=1", advice)


def _token_baseline(context: RuleContext, estimator: str) -> Iterator[Problem]:
    """Check the settings for estimators that need each token's full distribution, which only the trainer computes."""
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
    """Check that the loss fits the source of proximal log-probs."""
    setting, mode = f"{ACTOR}.policy_loss.loss_mode", _loss(context)
    if mode.startswith("recipe_"):
        advice = "It is derived from async_training.proximal_log_probs: set that, and remove this."
        yield context.problem(setting, "a loss of verl's, or one that you registered", advice)
    if mode == "bypass_mode" and proximal_source(context.config, context.settings) is not Proximal.BYPASS:
        allowed = "another loss where async_training.proximal_log_probs is not bypass"
        yield context.problem(setting, allowed, "This loss takes the old log-probs to be those of the sampling policy.")
    beta = context.get(f"{ACTOR}.policy_loss.dro_beta")
    if mode == "dro" and not (is_number(beta) and beta > 0):
        yield context.problem(f"{ACTOR}.policy_loss.dro_beta", f"a number > 0 with {setting}=dro", "Set it.")


def correction(context: RuleContext) -> Iterator[Problem]:
    """Check the off-policy correction; verl itself would fail only at the first batch or update."""
    section = "algorithm.rollout_correction"
    yield from _in_loss(context, section)
    rejection = context.get(f"{section}.rollout_rs")
    if rejection is None:
        return
    options = [option.strip() for option in str(rejection).split(",")]
    if not set(options) <= set(REJECTIONS):
        allowed = f"null, or one or several of {', '.join(REJECTIONS)}"
        yield context.problem(f"{section}.rollout_rs", allowed, "Separate them by commas.")
    elif context.get(f"{section}.rollout_rs_threshold") is None:
        allowed = f"a threshold, or one for each of {rejection}, separated by commas"
        yield context.problem(f"{section}.rollout_rs_threshold", allowed, f"Set it, or {section}.rollout_rs=null.")


def _in_loss(context: RuleContext, section: str) -> Iterator[Problem]:
    """Check settings that are redundant or contradictory if the loss itself corrects for off-policy data."""
    if proximal_source(context.config, context.settings) is not Proximal.BYPASS:
        return
    mode, loss_type = _loss(context), context.get(f"{section}.loss_type", "ppo_clip")
    if loss_type is None:
        yield context.problem(f"{section}.loss_type", "ppo_clip or reinforce", "verl needs one of them here.")
    elif loss_type == "reinforce" and mode not in PPO:
        advice = f"It names a loss, and so does {ACTOR}.policy_loss.loss_mode={mode}: choose one of them."
        yield context.problem(f"{section}.loss_type", f"ppo_clip with {ACTOR}.policy_loss.loss_mode={mode}", advice)
    if context.get(f"{section}.rollout_is") and mode not in PPO and has_ratio(mode):
        advice = (
            f"With bypassed log-probs the ratio of {mode} is already the importance weight: set null, or "
            f"{section}.bypass_mode=false, with which weights apply to every loss. Rejection (rollout_rs) applies to "
            "every loss in both cases."
        )
        yield context.problem(f"{section}.rollout_is", f"null with {ACTOR}.policy_loss.loss_mode={mode}", advice)


def without_effect(context: RuleContext) -> Iterator[str]:
    """Warn about importance weights without effect: with bypassed log-probs, verl's PPO loss only reports them."""
    section = "algorithm.rollout_correction"
    level = context.get(f"{section}.rollout_is")
    if proximal_source(context.config, context.settings) is not Proximal.BYPASS or not level:
        return
    if _loss(context) in PPO and context.get(f"{section}.loss_type", "ppo_clip") == "ppo_clip":
        yield (
            f"{section}.rollout_is={level} is reported and not applied: with bypassed log-probs PPO's ratio is already "
            f"the importance weight. Set {section}.bypass_mode=false to apply weights in addition to the ratio"
        )


def _loss(context: RuleContext) -> str:
    return str(context.get(f"{ACTOR}.policy_loss.loss_mode", "vanilla"))

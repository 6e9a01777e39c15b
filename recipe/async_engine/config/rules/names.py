# SPDX-License-Identifier: Apache-2.0
"""Checks the names of estimators, losses, loggers, dtypes and others that verl looks up only during a run.

Contract: some names are fixed in verl, and an unknown one is refused here. Other names are in verl's registries, to
which plugins and a model's ``external_lib`` may add. If such a name is not one of verl's own (`unusual`),
`inspection/verl_check` imports verl and looks the name up. tests/integration/test_late_names.py compares the lists in
this module with verl's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipe.async_engine.config.facts import VERLS_LOOPS, VERLS_MANAGERS
from recipe.async_engine.config.packages import ATTENTION
from recipe.async_engine.config.problems import Problem
from recipe.async_engine.config.rules.algorithm import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS
from recipe.async_engine.config.rules.context import RuleContext
from recipe.async_engine.config.sections import SHARED
from recipe.async_engine.config.verl_types import ACTOR, ROLLOUT
from recipe.async_engine.outside import HOST_BACKEND, HOST_MODULE

BACKEND = f"{ROLLOUT}.checkpoint_engine.backend"
MODULE = f"{ROLLOUT}.checkpoint_engine.custom_backend_module"
OWN_ENGINES = {
    HOST_MODULE: HOST_BACKEND,
    "recipe.async_engine.weights.nccl_engine": "nccl",
}
UNTRIED_ENGINES = ("kimi_ckpt_engine", "mooncake", "nixl")
DTYPES = ("fp16", "float16", "fp32", "float32", "bf16", "bfloat16")
CORRECTION = "algorithm.rollout_correction"
# The package that each logger needs. If it is missing, verl fails only after everything else has started.
LOGGERS: Mapping[str, str] = {
    "clearml": "clearml",
    "console": "",
    "file": "",
    "mlflow": "mlflow",
    "rl_insight": "rl_insight",
    "swanlab": "swanlab",
    "tensorboard": "tensorboard",
    "tracking": "wandb",
    "trackio": "trackio",
    "vemlp_wandb": "volcengine_ml_platform",
    "wandb": "wandb",
}


def _is_no_described_loop(context: RuleContext) -> bool:
    """Return whether the default agent loop must be in verl's registry, because no file of agent loops describes it."""
    setting = f"{ROLLOUT}.agent.agent_loop_config_path"
    described = next((fact.columns for fact in context.files if fact.setting == setting), None)
    if described is None:
        return context.get(setting) is None
    return context.get(f"{ROLLOUT}.agent.default_agent_loop") not in described


@dataclass(frozen=True, slots=True)
class Name:
    """A setting whose value is a name that verl looks up during the run.

    Attributes:
        own: the names that verl itself has.
        registry: the ``module:attribute`` of verl's registry of these names; empty if they are fixed.
        external: whether the processes that look up the name have imported the model's ``external_lib``, which may add
            names.
        used: a function that returns whether a run looks up the name at all.
    """

    setting: str
    own: Sequence[str]
    registry: str = ""
    external: bool = True
    used: Callable[[RuleContext], bool] = lambda context: True


KL = tuple(f"{name}{more}" for name in KL_ESTIMATORS for more in ("", "+"))
CORE, AGENT, LOSS = "verl.trainer.ppo.core_algos", "verl.experimental.agent_loop", f"{ACTOR}.policy_loss.loss_mode"
LOSSES = (
    *("bypass_mode", "cispo", "clip_cov", "dppo_kl", "dppo_tv", "dro", "geo_mean", "gpg", "gspo", "kl_cov", "sapo"),
    "vanilla",
)
PARSERS = ("deepseek_v4", "gemma4", "glm", "gpt-oss", "hermes", "kimi", "minimax", "qwen3_coder", "seed")


def _is_on(setting: str, *values: Any) -> Callable[[RuleContext], bool]:
    """Return a function that tests whether a setting has one of ``values``; without values, whether it is true."""
    return lambda context: context.get(setting) in values if values else bool(context.get(setting))


NAMES: tuple[Name, ...] = (
    Name("algorithm.adv_estimator", (*ADVANTAGE_ESTIMATORS, "remax"), f"{CORE}:ADV_ESTIMATOR_REGISTRY"),
    Name(
        LOSS,
        LOSSES,
        f"{CORE}:POLICY_LOSS_REGISTRY",
        used=lambda context: not str(context.get(LOSS)).startswith("recipe_"),
    ),
    Name(
        "reward.reward_manager.name",
        VERLS_MANAGERS,
        "verl.experimental.reward_loop.reward_manager.registry:REWARD_MANAGER",
        external=False,
        used=_is_on("reward.reward_manager.source", "register", None),
    ),
    Name(
        f"{ROLLOUT}.agent.default_agent_loop",
        VERLS_LOOPS,
        f"{AGENT}.agent_loop:_agent_loop_registry",
        used=_is_no_described_loop,
    ),
    Name(f"{ROLLOUT}.multi_turn.format", PARSERS, f"{AGENT}.tool_parser:ToolParser._registry"),
    Name(
        BACKEND,
        ("naive", "nccl", "delta_sharded", *UNTRIED_ENGINES),
        "verl.checkpoint_engine.base:CheckpointEngineRegistry._registry",
        used=lambda context: context.settings.async_training.placement != SHARED,
    ),
    Name(
        ATTENTION,
        ("eager", "flash_attention_2", "flash_attention_3", "flex_attention", "sdpa"),
        "transformers.modeling_utils:ALL_ATTENTION_FUNCTIONS",
        # A name with a slash is a kernel on the Hugging Face hub, and not in this registry.
        used=lambda context: "/" not in str(context.get(ATTENTION)),
    ),
    *(
        Name(
            f"{section}.optim.optimizer",
            ("Adam", "AdamW", "SGD"),
            "torch.optim:__dict__",
            used=_is_on(f"{section}.optim.optimizer_impl", "torch.optim"),
        )
        for section in (ACTOR, "critic")
    ),
    Name("reward.reward_manager.source", ("register", "importlib")),
    Name(f"{ROLLOUT}.trace.backend", ("mlflow", "trackio", "weave")),
    Name(f"{ROLLOUT}.multi_turn.tool_response_truncate_side", ("left", "middle", "right")),
    Name("algorithm.pf_ppo.reweight_method", ("pow", "max_min", "max_random"), used=_is_on("algorithm.use_pf_ppo")),
    Name(f"{ROLLOUT}.scheduling_policy", ("fcfs", "priority")),
    Name(
        f"{ROLLOUT}.logprobs_mode",
        ("processed_logprobs", "raw_logprobs"),
        used=lambda context: not context.on_sglang,
    ),
    Name(f"{ROLLOUT}.dtype", ("auto", "half", "float16", "bfloat16", "float", "float32")),
    Name(f"{CORRECTION}.loss_type", ("ppo_clip", "reinforce")),
    Name(f"{CORRECTION}.rollout_is", ("token", "sequence")),
    Name("algorithm.kl_penalty", KL, used=_is_on("algorithm.use_kl_in_reward")),
    Name(f"{ACTOR}.kl_loss_type", KL, used=_is_on(f"{ACTOR}.use_kl_loss")),
    Name("trainer.resume_mode", ("auto", "disable", "resume_path")),
    Name("algorithm.kl_ctrl.type", ("fixed", "adaptive"), used=_is_on("algorithm.use_kl_in_reward")),
    *(
        Name(f"{ACTOR}.fsdp_config.{name}", DTYPES)
        for name in ("model_dtype", *(f"mixed_precision.{part}_dtype" for part in ("param", "reduce", "buffer")))
    ),
)


def names(context: RuleContext) -> Iterator[Problem]:
    """Refuse unsuitable checkpoint engines, unknown loggers, and other unknown names for which verl has no registry."""
    for name in NAMES:
        value = context.get(name.setting)
        if not name.registry and value is not None and name.used(context) and value not in name.own:
            yield unknown(context, name.setting, name.own)
    for logger in asked(context.get("trainer.logger")):
        if str(logger) not in LOGGERS:
            yield unknown(context, "trainer.logger", tuple(LOGGERS))
    if context.settings.async_training.placement != SHARED:
        yield from _checkpoint_engine(context)


def asked(loggers: Any) -> list[Any]:
    """Return the names in ``loggers``, the value of a setting that accepts one name or a list of names."""
    return list(loggers) if isinstance(loggers, list) else [loggers] if loggers is not None else []


def unknown(context: RuleContext, setting: str, known: Sequence[str]) -> Problem:
    """Return the `Problem` for a name that verl would not find."""
    advice = "verl would look it up during the run, and fail; correct the name."
    return context.problem(setting, f"one of {', '.join(sorted(map(str, known)))}", advice)


def unusual(context: RuleContext) -> list[Name]:
    """Return the settings whose value is not one of verl's own names, and must be looked up in verl's registry."""
    ours = OWN_ENGINES.get(context.get(MODULE))
    asked = ((name, context.get(name.setting)) for name in NAMES if name.registry and name.used(context))
    return [name for name, value in asked if value is not None and value not in (*name.own, ours)]


def _checkpoint_engine(context: RuleContext) -> Iterator[Problem]:
    """Check that the checkpoint engine can send whole weights to other processes."""
    backend, publish = context.get(BACKEND), context.settings.weights.publish
    usual = "recipe_gloo" if context.on_cpu else "nccl"
    if backend == "naive":
        advice = f"naive copies within one process; set {BACKEND}={usual}."
        yield context.problem(BACKEND, "a backend that reaches other processes", advice)
    elif backend == "delta_sharded":
        advice = f"It changes live weights in place, while this package swaps whole versions; set {BACKEND}={usual}."
        yield context.problem(BACKEND, "nccl, or another one that sends whole weights", advice)
    elif backend == "kimi_ckpt_engine" and publish == "beside":
        advice = "With this engine every rank sends its own part, but beside training only rank 0 sends."
        yield context.problem("async_training.weights.publish", f"inline with {BACKEND}=kimi_ckpt_engine", advice)
    elif backend in OWN_ENGINES.values() and backend != "nccl" and OWN_ENGINES.get(context.get(MODULE)) != backend:
        module = next(module for module, engine in OWN_ENGINES.items() if engine == backend)
        if context.get(MODULE) is None or context.get(MODULE) in OWN_ENGINES:
            yield context.problem(MODULE, f"{module} with {BACKEND}={backend}", "This module has the engine.")


def untried(context: RuleContext) -> Iterator[str]:
    """Warn about checkpoint engines that are accepted but have never been tried with this package."""
    backend = context.get(BACKEND)
    if backend in UNTRIED_ENGINES and context.settings.async_training.placement != SHARED:
        yield f"{BACKEND}={backend} was never tried with this package; nccl was"

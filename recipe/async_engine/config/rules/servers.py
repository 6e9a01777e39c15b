# SPDX-License-Identifier: Apache-2.0
"""Rules for the settings of the log-prob servers, and of the servers of reward model and teachers."""

import math
from collections.abc import Iterator

from recipe.async_engine.config.log_prob_servers import Proximal
from recipe.async_engine.config.plan import (
    DEFAULT_TEACHER,
    has_adapter,
    proximal_source,
    teacher_size,
    teachers,
    uses_kl,
)
from recipe.async_engine.config.problems import Problem
from recipe.async_engine.config.rules.context import REWARD_MODEL, RuleContext
from recipe.async_engine.config.sections import SHARED
from recipe.async_engine.config.verl_types import ACTOR
from recipe.async_engine.core.scoring import Anchor

SERVERS, DISTILLATION = "model_engine_server", "distillation"
PARALLEL_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


def proximal_log_probs(context: RuleContext) -> Iterator[Problem]:
    """Check that the source of proximal log-probs fits the log-prob servers and the loss."""
    servers, setting = context.settings.servers, "async_training.proximal_log_probs"
    source = proximal_source(context.config, context.settings)
    if source is Proximal.SERVER and not servers.enabled:
        advice = "It needs log-prob servers: add model_engine_server=fsdp2 or model_engine_server=megatron."
        yield context.problem(setting, "bypass, recompute or loglinear without log-prob servers", advice)
    if source is not Proximal.SERVER and servers.enabled:
        advice = "The log-prob servers would compute nothing: remove the setting, or set model_engine_server=disabled."
        yield context.problem(setting, "server or null with log-prob servers", advice)
    loss = str(context.get(f"{ACTOR}.policy_loss.loss_mode", "vanilla"))
    if source is Proximal.LOGLINEAR and loss != "vanilla":
        advice = "The interpolation is done inside PPO's clipped loss; choose another source of log-probs for it."
        yield context.problem(f"{ACTOR}.policy_loss.loss_mode", f"vanilla with {setting}=loglinear", advice)


def log_prob_servers(context: RuleContext) -> Iterator[Problem]:
    """Check that the settings of the log-prob servers suit the mode, the weight sync and the accelerators."""
    servers = context.settings.servers
    yield from _reference(context)
    if not servers.enabled:
        return
    if context.settings.async_training.placement == SHARED:
        advice = "Log-prob servers are for the modes that train and generate at the same time; remove them."
        yield context.problem(f"{SERVERS}.backend", "disabled with async_training.placement=shared", advice)
    if servers.backend == "megatron" and context.on_cpu:
        advice = "Megatron's layers need an accelerator; take model_engine_server=fsdp2."
        yield context.problem(f"{SERVERS}.backend", "fsdp2 where trainer.device=cpu", advice)
    if servers.anchor == Anchor.LATEST and context.settings.weights.publish == "beside":
        advice = (
            "A batch is trained before the servers have the version that should score it: remove the setting, or"
            f" set {SERVERS}.anchor=generation."
        )
        yield context.problem("async_training.weights.publish", f"inline with {SERVERS}.anchor=latest", advice)
    held = context.settings.weights.at_swap == "keep"
    if held and servers.anchor == Anchor.GENERATION:
        advice = (
            "The versions of an answer's tokens are known only when the answer ends. If it is held at a swap, the"
            f" servers have newer weights by then: set {SERVERS}.anchor=latest, or at_swap=interrupt."
        )
        yield context.problem(f"{SERVERS}.anchor", "latest with async_training.weights.at_swap=keep", advice)
    total = servers.shared_accelerators
    if total % servers.replicas:
        advice = f"The servers share {total} accelerators; change that number or this one."
        yield context.problem(f"{SERVERS}.replicas", f"a divisor of {total}", advice)
        return
    ranks = servers.ranks
    if ranks % min(ranks, servers.n_gpus_per_node):
        allowed = f"such that a server's {ranks} ranks fill whole nodes of {servers.n_gpus_per_node}"
        yield context.problem(f"{SERVERS}.replicas", allowed, f"Change it or {SERVERS}.n_gpus_per_node.")
    if servers.backend == "megatron":
        sizes = [context.count(f"{SERVERS}.engine.{size}") or 1 for size in PARALLEL_SIZES]
        if ranks % math.prod(sizes):
            advice = f"The parallel sizes are {' x '.join(map(str, sizes))}; change them, accelerators or replicas."
            allowed = f"parallel sizes whose product divides a server's {ranks} ranks"
            yield context.problem(f"{SERVERS}.engine.{PARALLEL_SIZES[0]}", allowed, advice)


def _reference(context: RuleContext) -> Iterator[Problem]:
    """Check that log-prob servers of the reference policy, if configured, would be used."""
    servers, setting = context.settings.servers, f"{SERVERS}.reference_replicas"
    if servers.reference_replicas == 0:
        return
    if not servers.enabled:
        advice = "Add model_engine_server=fsdp2 or model_engine_server=megatron, or remove it."
        yield context.problem(setting, "0 without log-prob servers", advice)
    if not uses_kl(context.config):
        advice = f"Nothing would use them: set {ACTOR}.use_kl_loss or algorithm.use_kl_in_reward, or remove it."
        yield context.problem(setting, "0 where no reference policy is used", advice)
    if has_adapter(context.config):
        advice = "With LoRA the reference policy is the actor without its adapter, and needs no weights of its own."
        yield context.problem(setting, "0 with LoRA", advice)


def reward_model(context: RuleContext) -> Iterator[Problem]:
    """Check that the reward model has accelerators, and that its servers divide them evenly."""
    if not context.get(f"{REWARD_MODEL}.enable"):
        return
    for setting in ("nnodes", "n_gpus_per_node"):
        if context.count(f"{REWARD_MODEL}.{setting}") is None:
            advice = "Set the accelerators that the reward model's servers are started on."
            yield context.problem(f"{REWARD_MODEL}.{setting}", "an integer >= 1", advice)
    rollout = f"{REWARD_MODEL}.rollout"
    size = context.count(f"{rollout}.tensor_model_parallel_size") or 1
    total = reward_accelerators(context)
    # If the total is 0, the loop above has reported it.
    if total and total % size:
        advice = f"The accelerators are the {total} of {REWARD_MODEL}.nnodes * n_gpus_per_node."
        allowed = "a divisor of the reward model's accelerators"
        yield context.problem(f"{rollout}.tensor_model_parallel_size", allowed, advice)


def teachers_servers(context: RuleContext) -> Iterator[Problem]:
    """Check that teachers' servers take all of the teachers' accelerators (verl/workers/config/distillation.py:282)."""
    sections = teachers(context.config)
    if not sections:
        return
    for setting in ("nnodes", "n_gpus_per_node"):
        if context.count(f"{DISTILLATION}.{setting}") is None:
            advice = "Set the accelerators that the teachers' servers are started on."
            yield context.problem(f"{DISTILLATION}.{setting}", "an integer >= 1", advice)
    several = DEFAULT_TEACHER not in sections
    if several and context.get(f"{DEFAULT_TEACHER}.model_path"):
        advice = "verl leaves the entry teacher_model out if there are others: give this teacher another name."
        yield context.problem(f"{DEFAULT_TEACHER}.model_path", "null beside other teachers", advice)
    total, needed = teachers_accelerators(context), 0
    for section in sections:
        size = teacher_size(context.config, section)
        needed += size * teacher_servers(context, section)
        yield from _teacher(context, section, several)
        if not several and total % size:
            advice = f"A server takes {size}: tensor x data x pipeline parallel size."
            yield context.problem(f"{DISTILLATION}.n_gpus_per_node", f"such that {total} divides by {size}", advice)
    if several and total and needed != total:
        advice = f"The servers of all teachers (num_replicas) take {needed}, and nnodes * n_gpus_per_node is {total}."
        yield context.problem(f"{DISTILLATION}.n_gpus_per_node", "as many as the servers take", advice)
    loglinear = proximal_source(context.config, context.settings) is Proximal.LOGLINEAR
    if loglinear and context.get(f"{DISTILLATION}.distillation_loss.use_policy_gradient"):
        advice = "verl's distillation loss would take the shares of the interpolation for importance weights."
        setting = f"{DISTILLATION}.distillation_loss.use_policy_gradient"
        yield context.problem(setting, "false with async_training.proximal_log_probs=loglinear", advice)


def _teacher(context: RuleContext, section: str, several: bool) -> Iterator[Problem]:
    for name in ("model_path", *(("key", "num_replicas") if several else ())):
        if not context.get(f"{section}.{name}"):
            yield context.problem(f"{section}.{name}", "a value", "verl needs it for each teacher; set it.")
    if context.get(f"{section}.inference.name") != "vllm":
        advice = f"Other engines were not tried for teachers; set {section}.inference.name=vllm."
        yield context.problem(f"{section}.inference.name", "vllm", advice)
    if context.get(f"{section}.inference.router_config_path"):
        advice = "Calls go to the teacher's server with the fewest; remove it."
        yield context.problem(f"{section}.inference.router_config_path", "null", advice)
    setting, needed_room = f"{section}.inference.max_model_len", context.longest + 1
    room = context.count(setting) or context.positions_of(f"{section}.model_path")
    if room is not None and room < needed_room:
        advice = f"The teacher gets prompt and response, and samples one token; it has room for {room}."
        yield context.problem(setting, f"at least {needed_room}, or a teacher with as many positions", advice)


def teacher_servers(context: RuleContext, section: str) -> int:
    """Return the number of a teacher's servers: `num_replicas`, but a single teacher has all of the accelerators."""
    if section != DEFAULT_TEACHER:
        return context.count(f"{section}.num_replicas") or 0
    return teachers_accelerators(context) // teacher_size(context.config, section)


def teachers_accelerators(context: RuleContext) -> int:
    if not teachers(context.config):
        return 0
    return (context.count(f"{DISTILLATION}.nnodes") or 0) * (context.count(f"{DISTILLATION}.n_gpus_per_node") or 0)


def reward_accelerators(context: RuleContext) -> int:
    if not context.get(f"{REWARD_MODEL}.enable") or not context.get(f"{REWARD_MODEL}.enable_resource_pool"):
        return 0
    return (context.count(f"{REWARD_MODEL}.nnodes") or 0) * (context.count(f"{REWARD_MODEL}.n_gpus_per_node") or 0)

# SPDX-License-Identifier: Apache-2.0
"""Validates configurations of verl's own v1 trainers that use log-prob servers or other additions of this package."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from recipe.async_engine.config.facts import FileFact, Resources
from recipe.async_engine.config.problems import ConfigError, Problem
from recipe.async_engine.config.rules import parallel
from recipe.async_engine.config.rules.context import RuleContext
from recipe.async_engine.config.rules.servers import SERVERS, log_prob_servers, proximal_log_probs
from recipe.async_engine.config.sections import SHARED, RolloutResources, Settings, Weights, read_settings
from recipe.async_engine.config.validation import Judge
from recipe.async_engine.config.verl_types import ACTOR, ROLLOUT, well_formed

MANAGER = "recipe.async_engine.v1.agent_loops.ScoringAgentLoopManager"
SEPARATE = "separate_async"


def read_v1(config: Mapping[str, Any], trainer: str = "") -> Settings:
    """Read this package's sections of the configuration of verl's v1 trainer ``trainer``.

    Raises:
        ConfigError: the configuration cannot run; the error has every problem found.
    """
    problems, context = judge_v1(config, trainer)
    if problems:
        raise ConfigError(problems)
    return context.settings


def judge_v1(
    config: Mapping[str, Any],
    trainer: str,
    available: Resources | None = None,
    files: Sequence[FileFact] = (),
    judges: Sequence[Judge] = (),
) -> tuple[list[Problem], RuleContext]:
    """Check a v1 trainer's configuration. Return all problems, including those that ``judges`` find.

    Also return the context of the rules: the configuration, and the settings that were read from it.
    """
    config, problems = well_formed(config, misses=False)
    settings, own = read_settings(config)
    problems += own
    context = RuleContext(config, settings, None, available, files)
    if not problems:
        problems = [*_rules(context, trainer), *parallel.micro_batches(context)]
        placed = as_placed(context, trainer)
        problems += parallel.ranks(placed)
        for other in judges:
            problems += other.problems(placed)
    return problems, context


def as_placed(context: RuleContext, trainer: str) -> RuleContext:
    """Return a copy of ``context`` with the placement, weight transfer and rollout resources of a v1 trainer.

    ``trainer`` is the trainer's name.
    """
    training = context.settings.async_training
    rollout = {
        name: context.count(f"{ROLLOUT}.{name}") or default for name, default in (("nnodes", 1), ("n_gpus_per_node", 8))
    }
    training = dataclasses.replace(
        training,
        placement="separate" if trainer == SEPARATE else SHARED,
        weights=Weights(staging="none", publish="inline"),
    )
    settings = dataclasses.replace(context.settings, async_training=training, rollout=RolloutResources(**rollout))
    return dataclasses.replace(context, settings=settings)


def _rules(context: RuleContext, trainer: str) -> Iterator[Problem]:
    """Check the settings that this package's additions to a v1 trainer need, above all the log-prob servers."""
    servers = context.settings.servers
    if context.get("rehearse_only"):
        advice = "Only this package's own trainers rehearse; use +recipe=fully_async or +recipe=partial_rollout."
        yield context.problem("rehearse_only", "false with a trainer of verl's", advice)
    if context.get("distillation.enabled"):
        advice = "Take one of this package's own modes, +recipe=fully_async, or verl's trainer without +recipe."
        yield context.problem("distillation.enabled", "false with a trainer of verl's and +recipe", advice)
    if context.get(f"{ROLLOUT}.name") != "vllm":
        yield context.problem(f"{ROLLOUT}.name", "vllm", "With verl's own trainers, only vLLM's servers were tried.")
    if trainer == SEPARATE:
        yield from _separate(context)
    yield from log_prob_servers(context)
    if not servers.enabled:
        return
    yield from proximal_log_probs(context)
    if servers.reference_replicas:
        advice = "In verl's own trainers the reference policy stays with the trainer's workers; remove it."
        yield context.problem(f"{SERVERS}.reference_replicas", "0 with a trainer of verl's", advice)
    if context.get(f"{ROLLOUT}.checkpoint_engine.backend") == "naive":
        backend = "recipe_gloo" if context.on_cpu else "nccl"
        advice = f"naive does not reach log-prob servers; set {ROLLOUT}.checkpoint_engine.backend={backend}."
        yield context.problem(f"{ROLLOUT}.checkpoint_engine.backend", "a backend that reaches other processes", advice)
    if context.get(f"{ROLLOUT}.agent.agent_loop_manager_class") != MANAGER:
        advice = "Agent loops ask the log-prob servers through it; remove the setting, or the servers."
        yield context.problem(f"{ROLLOUT}.agent.agent_loop_manager_class", f"{MANAGER} with log-prob servers", advice)


def _separate(context: RuleContext) -> Iterator[Problem]:
    """Check what verl's `separate_async` trainer asserts only after Ray has started (trainer_separate_async.py:55)."""
    steps = context.count("trainer.v1.separate_async.parameter_sync_step")
    mini, batch = context.count(f"{ACTOR}.ppo_mini_batch_size"), context.get("data.train_batch_size")
    if steps is not None and mini is not None and batch != steps * mini:
        advice = f"This trainer takes {steps} mini-batches of {mini} prompts from one weight sync to the next."
        allowed = f"parameter_sync_step x ppo_mini_batch_size, {steps * mini}"
        yield context.problem("data.train_batch_size", allowed, advice)
    for name in ("nnodes", "n_gpus_per_node"):
        if context.count(f"{ROLLOUT}.{name}") is None:
            advice = "This trainer generates on nodes and accelerators of its own: set how many."
            yield context.problem(f"{ROLLOUT}.{name}", "an integer >= 1", advice)
    backend = f"{ROLLOUT}.checkpoint_engine.backend"
    if context.get(backend) == "naive" and not context.settings.servers.enabled:
        advice = f"naive copies within one process; set {backend}={'recipe_gloo' if context.on_cpu else 'nccl'}."
        yield context.problem(backend, "a backend that reaches other processes", advice)

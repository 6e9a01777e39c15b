# SPDX-License-Identifier: Apache-2.0
"""What stock verl's v1 trainers need of a configuration to have this package's parts beside them."""

from collections.abc import Iterator, Mapping
from typing import Any

from recipe.async_engine.settings.problems import ConfigError, Problem
from recipe.async_engine.settings.rules.context import RuleContext
from recipe.async_engine.settings.rules.servers import SERVERS, log_prob_servers, proximal_log_probs
from recipe.async_engine.settings.sections import Settings, read_settings
from recipe.async_engine.settings.verl_types import ROLLOUT

MANAGER = "recipe.async_engine.verl_v1.agent_loops.ScoringAgentLoopManager"


def read_v1(config: Mapping[str, Any]) -> Settings:
    """This package's sections of a v1 trainer's configuration.

    Raises:
        ConfigError: something in it cannot run; the error has every problem found.
    """
    settings, problems = read_settings(config)
    if not problems:
        problems = list(_rules(RuleContext(config, settings, None, None, ())))
    if problems:
        raise ConfigError(problems)
    return settings


def _rules(context: RuleContext) -> Iterator[Problem]:
    servers = context.settings.servers
    if context.get(f"{ROLLOUT}.name") != "vllm":
        yield context.problem(f"{ROLLOUT}.name", "vllm", "The first-weights gate is there for vLLM's servers only.")
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

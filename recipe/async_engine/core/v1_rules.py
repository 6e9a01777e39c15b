# SPDX-License-Identifier: Apache-2.0
"""What stock verl's v1 trainers need of a configuration to have this package's parts beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from recipe.async_engine.core.case import ROLLOUT, Case
from recipe.async_engine.core.config import Settings, read_settings
from recipe.async_engine.core.problems import ConfigError, Problem
from recipe.async_engine.core.server_rules import SERVERS, log_prob_servers, proximal_log_probs

MANAGER = "recipe.async_engine.v1.agent_loops.ScoringAgentLoopManager"


def read_v1(config: Mapping[str, Any]) -> Settings:
    """This package's sections of a v1 trainer's configuration.

    Raises:
        ConfigError: something in it cannot run; the error has every problem found.
    """
    settings, problems = read_settings(config)
    if not problems:
        problems = list(_rules(Case(config, settings, None, None, ())))
    if problems:
        raise ConfigError(problems)
    return settings


def _rules(case: Case) -> Iterator[Problem]:
    servers = case.settings.servers
    if case.get(f"{ROLLOUT}.name") != "vllm":
        yield case.problem(f"{ROLLOUT}.name", "vllm", "The first-weights gate is there for vLLM's servers only.")
    yield from log_prob_servers(case)
    if not servers.enabled:
        return
    yield from proximal_log_probs(case)
    if servers.reference_replicas:
        advice = "In verl's own trainers the reference policy stays with the trainer's workers; remove it."
        yield case.problem(f"{SERVERS}.reference_replicas", "0 with a trainer of verl's", advice)
    if case.get(f"{ROLLOUT}.checkpoint_engine.backend") == "naive":
        backend = "recipe_gloo" if case.on_cpu else "nccl"
        advice = f"naive does not reach log-prob servers; set {ROLLOUT}.checkpoint_engine.backend={backend}."
        yield case.problem(f"{ROLLOUT}.checkpoint_engine.backend", "a backend that reaches other processes", advice)
    if case.get(f"{ROLLOUT}.agent.agent_loop_manager_class") != MANAGER:
        advice = "Agent loops ask the log-prob servers through it; remove the setting, or the servers."
        yield case.problem(f"{ROLLOUT}.agent.agent_loop_manager_class", f"{MANAGER} with log-prob servers", advice)

# SPDX-License-Identifier: Apache-2.0
"""Refuses configurations that cannot run, before any process starts.

Contract: `validate` is a pure function of a configuration and of facts about the outside; it finds all problems at
once, and each names the setting, its value, what is allowed and what to change. The rules are in
`recipe.async_engine.config.rules`; tests/config/test_config.py has one case for each.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from recipe.async_engine.config import notices
from recipe.async_engine.config.facts import FileFact, Resources
from recipe.async_engine.config.legacy import migrated
from recipe.async_engine.config.plan import RunPlan, plan_of
from recipe.async_engine.config.problems import Problem, lookup
from recipe.async_engine.config.rules import (
    algorithm,
    batches,
    data,
    engines,
    learning,
    names,
    parallel,
    rewards,
    servers,
)
from recipe.async_engine.config.rules.context import RuleContext
from recipe.async_engine.config.sections import read_settings
from recipe.async_engine.config.verdicts import refusals
from recipe.async_engine.config.verl_types import well_formed

RULES: tuple[Callable[[RuleContext], Iterator[Problem]], ...] = (
    refusals,
    batches.staleness,
    batches.whole_batches,
    batches.admission_policy,
    batches.shared_placement,
    batches.batch,
    parallel.division,
    names.names,
    algorithm.advantages,
    algorithm.losses,
    algorithm.correction,
    learning.learning,
    engines.engine,
    engines.critic,
    parallel.micro_batches,
    parallel.ranks,
    engines.lora,
    engines.experts,
    engines.weights,
    engines.rollout,
    engines.cpu,
    engines.packages,
    servers.proximal_log_probs,
    servers.log_prob_servers,
    rewards.reward_model,
    engines.resources,
    engines.builtin_task,
    data.files,
    data.lengths,
    data.saving,
)


def validate(
    config: Mapping[str, Any],
    *,
    dataset_rows: int | None = None,
    available: Resources | None = None,
    files: Sequence[FileFact] = (),
) -> list[Problem]:
    """All problems of a configuration; none means that it may run.

    Args:
        config: The composed configuration as a plain, resolved mapping.
        dataset_rows: Prompts in the training data, where known; else `training_rows`.
        available: What there is to place workers on, where known.
        files: What was found at the paths that the configuration names.
    """
    return judge(config, available, files, dataset_rows)[0]


class Judge(Protocol):
    """What a main has judge its configuration beside the rules of the engine; `recipe.plan.memory.estimate` is one."""

    def problems(self, context: RuleContext) -> Iterable[Problem]:
        """What cannot run."""

    def warnings(self, context: RuleContext) -> Iterable[str]:
        """What may not run well."""


WARNINGS: tuple[Callable[[RuleContext], Iterator[str]], ...] = (
    batches.tight_bound,
    engines.early_ends,
    algorithm.without_effect,
    notices.beside_others,
    names.untried,
    learning.trains_nothing,
)


def warnings_of(context: RuleContext, judges: Sequence[Judge] = (), of_v1: bool = False) -> list[str]:
    """What may not run well, or has no effect, of what is accepted; in a trainer of verl's own by the judges alone."""
    rules = (*(other.warnings for other in judges), *(() if of_v1 else (*WARNINGS, notices.notices)))
    return [text for rule in rules for text in rule(context)]


@dataclass(frozen=True)
class Findings:
    """What was found of a configuration."""

    problems: list[Problem]
    warnings: list[str]
    context: RuleContext

    @property
    def plan(self) -> RunPlan:
        """What the run does.

        Raises:
            ConfigError: nothing bounds the number of its steps.
        """
        return plan_of(self.context.config, self.context.settings, self.context.dataset_rows)


def judge(
    config: Mapping[str, Any],
    available: Resources | None,
    files: Sequence[FileFact],
    dataset_rows: int | None = None,
    judges: Sequence[Judge] = (),
) -> tuple[list[Problem], RuleContext]:
    """All problems of a configuration, those that ``judges`` find too, and what all of them looked at.

    For the other arguments see `validate`.
    """
    config, problems = well_formed(migrated(config))
    settings, own = read_settings(config)
    problems += own
    if dataset_rows is None:
        dataset_rows = training_rows(config, files)
    context = RuleContext(config, settings, dataset_rows, available, files)
    named = {problem.setting for problem in problems}
    found = [problem for rule in (*RULES, *(other.problems for other in judges)) for problem in rule(context)]
    return problems + [problem for problem in found if problem.setting not in named], context


def training_rows(config: Mapping[str, Any], files: Sequence[FileFact]) -> int | None:
    """Prompts in the training data, or None where a file's rows are not known without loading it."""
    counts = [fact.rows for fact in files if fact.setting == "data.train_files"]
    known = [count for count in counts if count is not None]
    if not known or len(known) < len(counts):
        return None
    limit = lookup(config, "data.train_max_samples")
    return min(sum(known), limit) if limit is not None and limit > 0 else sum(known)

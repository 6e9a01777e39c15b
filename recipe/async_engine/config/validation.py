# SPDX-License-Identifier: Apache-2.0
"""Refuses configurations that cannot run, before any process starts.

Contract: `judge` is a pure function of a configuration and of facts about files and nodes. It returns all problems, and
each problem has the setting, its value, the allowed values and what to change. The rules are in
`recipe.async_engine.config.rules`; tests/config/test_config.py has one case for each rule.
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
    experts,
    learning,
    names,
    parallel,
    servers,
    sglang,
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
    experts.families,
    experts.router_replay,
    experts.expert_parallel,
    engines.weights,
    engines.rollout,
    sglang.sglang,
    engines.cpu,
    engines.packages,
    servers.proximal_log_probs,
    servers.log_prob_servers,
    servers.reward_model,
    servers.teachers_servers,
    engines.resources,
    engines.builtin_task,
    data.files,
    data.lengths,
    data.saving,
)


class Judge(Protocol):
    """A check that an entry point adds to the rules, such as `recipe.plan.memory.estimate`."""

    def problems(self, context: RuleContext) -> Iterable[Problem]:
        """Return the problems that prevent the run."""

    def warnings(self, context: RuleContext) -> Iterable[str]:
        """Return the warnings, which do not prevent the run."""


WARNINGS: tuple[Callable[[RuleContext], Iterator[str]], ...] = (
    batches.tight_bound,
    engines.early_ends,
    algorithm.without_effect,
    notices.beside_others,
    names.untried,
    learning.trains_nothing,
)


def warnings_of(context: RuleContext, judges: Sequence[Judge] = (), of_v1: bool = False) -> list[str]:
    """Return the warnings about a configuration. For verl's v1 trainers (``of_v1``), only ``judges`` give warnings."""
    rules = (*(other.warnings for other in judges), *(() if of_v1 else (*WARNINGS, notices.notices)))
    return [text for rule in rules for text in rule(context)]


@dataclass(frozen=True)
class Findings:
    """The problems and warnings of a configuration, and the context that the rules used."""

    problems: list[Problem]
    warnings: list[str]
    context: RuleContext

    @property
    def plan(self) -> RunPlan:
        """The plan of the run.

        Raises:
            ConfigError: no setting limits the number of steps.
        """
        return plan_of(self.context.config, self.context.settings, self.context.dataset_rows)


def judge(
    config: Mapping[str, Any],
    available: Resources | None = None,
    files: Sequence[FileFact] = (),
    dataset_rows: int | None = None,
    judges: Sequence[Judge] = (),
) -> tuple[list[Problem], RuleContext]:
    """Return all problems of a configuration, including those that ``judges`` find, and the rules' context.

    ``config`` is the composed configuration as a plain, resolved mapping. ``dataset_rows`` is the number of prompts in
    the training data; if None, `training_rows` determines it from ``files``.
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
    """Return the number of prompts in the training data; None if a file's number of rows is not known."""
    counts = [fact.rows for fact in files if fact.setting == "data.train_files"]
    known = [count for count in counts if count is not None]
    if not known or len(known) < len(counts):
        return None
    limit = lookup(config, "data.train_max_samples")
    return min(sum(known), limit) if limit is not None and limit > 0 else sum(known)

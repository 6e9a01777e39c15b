# SPDX-License-Identifier: Apache-2.0
"""Prints the plan of a run without starting it (``plan_only=true``): processes, placement, batches and memory.

Contract: no process is started, and nothing is written except for the cache of the library `datasets`. The plan is for
the platform that the configuration names (`trainer.device`), not for the present machine, so that a laptop can plan for
a cluster.
"""

from __future__ import annotations

import sys

from omegaconf import DictConfig

from recipe.async_engine.config.legacy import placement
from recipe.async_engine.config.sections import SHARED
from recipe.async_engine.config.v1_validation import as_placed, judge_v1
from recipe.async_engine.config.validation import Findings, Judge, warnings_of
from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.inspection.check import file_facts, look, plain
from recipe.async_engine.outside import MODES
from recipe.mains.arguments import PREFIX, take_arguments
from recipe.plan.memory import estimate as memory
from recipe.plan.plan_report import report
from recipe.programs import check as programs

JUDGES: tuple[Judge, ...] = (memory, programs)
"""Checks of a configuration in addition to those of `recipe.async_engine`: whether the run fits into memory, and
whether the reward for programming tasks can run.
"""
V1_JUDGES: tuple[Judge, ...] = (memory,)
"""The additional checks for verl's own v1 trainers, which do not compute rewards with this package."""


def findings(config: DictConfig, trainer: str) -> Findings:
    """Return the problems and warnings of a configuration; ``trainer`` is the value of `trainer.v1.trainer_mode`."""
    mode = trainer.removeprefix(PREFIX)
    if not trainer.startswith(PREFIX):
        has_task = config.get("builtin_task") is not None
        return look(plain(config), with_verl=True, makes_task=has_task, judges=JUDGES)
    if mode in MODES:
        take_arguments(config, mode)
        return look(plain(config), with_verl=True, judges=JUDGES)
    settings = plain(config)
    problems, context = judge_v1(settings, mode, files=file_facts(settings), judges=V1_JUDGES)
    placed = as_placed(context, mode)
    return Findings(problems, warnings_of(placed, V1_JUDGES, of_v1=True), placed)


def show(config: DictConfig, trainer: str) -> int:
    """Print the plan or the error; return exit status 0 if the configuration can run, otherwise 1."""
    name = trainer.removeprefix(PREFIX) if trainer.startswith(PREFIX) else _mode(config)
    try:
        found = findings(config, trainer)
        text = report(name, found, of_verl=trainer.startswith(PREFIX) and trainer.removeprefix(PREFIX) not in MODES)
    except RecipeError as error:
        sys.stderr.write(f"\n{type(error).__name__}: {error}\n")
        return 1
    sys.stdout.write(text)
    return 1 if found.problems else 0


def _mode(config: DictConfig) -> str:
    """Return the name of the RL mode that the settings for placement and admission policy amount to."""
    if placement(config) == SHARED:
        return "partial_rollout"
    return "one_step_off" if config.async_training.get("admission_policy") == "whole_batches" else "fully_async"

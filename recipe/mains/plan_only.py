# SPDX-License-Identifier: Apache-2.0
"""``plan_only=true``: what a run would be, without one.

Contract: nothing is started, and nothing written but what the library `datasets` keeps of the data in its cache. The
plan is of the platform that the configuration names (`trainer.device`), whatever machine it is made on, so that a
laptop can plan for a cluster.
"""

from __future__ import annotations

import sys

from omegaconf import DictConfig

from recipe.async_engine.config.sections import SHARED
from recipe.async_engine.config.v1_validation import as_placed, judge_v1
from recipe.async_engine.config.validation import Findings, warnings_of
from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.inspection.check import file_facts, look, plain
from recipe.async_engine.outside import MODES
from recipe.mains.arguments import PREFIX, take_arguments
from recipe.mains.judges import JUDGES, V1_JUDGES
from recipe.plan.plan_report import report


def findings(config: DictConfig, trainer: str) -> Findings:
    """What is found of a main's configuration; ``trainer``: `trainer.v1.trainer_mode`, which a flag sets.

    Raises:
        FlagError: a setting that the mode of a flag cannot take.
    """
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
    """Print the plan; returns the process's exit status."""
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
    """The mode that a main's settings are of."""
    training = config.async_training
    if training.get("placement") == SHARED:
        return "partial_rollout"
    return "one_step_off" if training.get("admission_policy") == "whole_batches" else "fully_async"

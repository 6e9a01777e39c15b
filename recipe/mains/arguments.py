# SPDX-License-Identifier: Apache-2.0
"""Adapts the configuration of a script for stock verl to the mode that a flag (``+recipe=...``) selects."""

from __future__ import annotations

import os

from omegaconf import DictConfig, open_dict, read_write

from recipe.async_engine.config.fields import is_count
from recipe.async_engine.config.legacy import placement
from recipe.async_engine.config.problems import ConfigError, Problem, render
from recipe.async_engine.config.sections import SHARED
from recipe.async_engine.config.verdicts import PLACEHOLDER as MANAGER
from recipe.async_engine.outside import MODES

PREFIX = "recipe_"
CHOSEN = "chosen_by_flag"
"""Setting in which the configuration group of a flag stores the name of the trainer that the flag selects."""
MAIN = "verl.trainer.main_ppo"


def refused(setting: str, value: object, allowed: str, advice: str) -> ConfigError:
    """Return an error for a setting's value that a mode cannot use. The message says what is allowed instead."""
    return ConfigError([Problem(setting, render(value), allowed, advice)])


def check_main(config: DictConfig, main: str) -> None:
    """Raise ConfigError if the main program, whose module is named ``main``, would ignore the flag.

    A user's own main program is assumed to use the flag. If it does not, `recipe.mains.trainer.NoAgentLoops` ends the
    run.
    """
    ours = main.startswith("recipe.") and any(main == f"recipe.{mode}.main" for mode in MODES)
    if config.get(CHOSEN) and main != MAIN and (ours or main.split(".")[0] == "verl"):
        advice = f"{main} would ignore it: give the flag to {MAIN}{' or leave it out' if ours else ''}."
        raise refused("+recipe", config[CHOSEN].removeprefix(PREFIX), f"a flag for {MAIN} only", advice)


def settle(config: DictConfig) -> list[str]:
    """Write the trainer that the flag selects into ``config``; return a message for each setting that is overridden.

    Raise ConfigError if the configuration already names another trainer of this package. Without a flag, do nothing.
    """
    chosen, trainer = config.get(CHOSEN), config.trainer
    if not chosen:
        return []
    asked = str(trainer.v1.trainer_mode)
    if asked != chosen and asked.startswith(PREFIX):
        raise refused("trainer.v1.trainer_mode", asked, str(chosen), "+recipe chose that; leave this setting out.")
    without = [f"trainer.v1.trainer_mode={asked}"] * (asked != chosen) + ["trainer.use_v1=false"] * (not trainer.use_v1)
    with read_write(config), open_dict(config):
        trainer.use_v1, trainer.v1.trainer_mode = True, chosen
    return [f"{setting} has no effect: +recipe has chosen {chosen}" for setting in without]


def take_arguments(config: DictConfig, mode: str) -> None:
    """Change ``config``, which was written for stock verl, so that ``mode`` (the mode of this package) can run it.

    Raise ConfigError if the mode cannot use one of the settings.
    """
    manager = config.actor_rollout_ref.rollout.agent.agent_loop_manager_class
    if manager != MANAGER:
        advice = "The modes have an agent-loop manager of their own, which this cannot replace; leave the setting out."
        raise refused("actor_rollout_ref.rollout.agent.agent_loop_manager_class", manager, MANAGER, advice)
    with open_dict(config):
        config.trainer.default_local_dir = os.path.abspath(config.trainer.default_local_dir)
        config.transfer_queue.enable = False
        # A script for synchronous DAPO sets the number of prompts that are generated at a time. The modes start prompts
        # one by one, so unset it.
        config.data.gen_batch_size = None
        if placement(config) != SHARED:
            _take_resources(config)
        if MODES[mode].counts_mini_batches:
            _count_in_mini_batches(config)


def _take_resources(config: DictConfig) -> None:
    """Set the resources for generation, ``rollout.nnodes`` and ``rollout.n_gpus_per_node``, where they are null.

    The values are taken from ``actor_rollout_ref.rollout``, where verl's v1 trainers have them, or else are 1 and 8.
    """
    asked, theirs = config.rollout, config.actor_rollout_ref.rollout
    named_by_v1 = is_count(theirs.get("nnodes"))
    for name, default in (("nnodes", 1), ("n_gpus_per_node", 8)):
        of_v1 = theirs.get(name) if named_by_v1 else None
        if asked[name] is not None and of_v1 is not None and asked[name] != of_v1:
            theirs_too = f"actor_rollout_ref.rollout.{name}={of_v1}"
            advice = f"{theirs_too} has the same meaning and another value; leave one of them out."
            raise refused(f"rollout.{name}", asked[name], str(of_v1), advice)
        if asked[name] is None:
            asked[name] = default if of_v1 is None else of_v1


def _count_in_mini_batches(config: DictConfig) -> None:
    """Set `async_training.require_batches` to the number of mini-batches in a batch.

    This number is `data.train_batch_size` divided by `ppo_mini_batch_size`. The mode reads it instead of the batch's
    size, which is set to 0.
    """
    size, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    if size % mini:
        allowed = f"a multiple of actor_rollout_ref.actor.ppo_mini_batch_size={mini}"
        raise refused("data.train_batch_size", size, allowed, "This mode collects a step's prompts in mini-batches.")
    config.async_training.require_batches = size // mini
    config.data.train_batch_size = 0
    config.data.gen_batch_size = 1

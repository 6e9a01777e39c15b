# SPDX-License-Identifier: Apache-2.0
"""A stock script's configuration as a mode takes it, when a flag has chosen the mode (docs/flags.md)."""

from __future__ import annotations

import os

from omegaconf import DictConfig, open_dict, read_write

from recipe.async_engine.config.fields import is_count
from recipe.async_engine.config.sections import SHARED
from recipe.async_engine.config.verdicts import PLACEHOLDER as MANAGER
from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.outside import MODES

PREFIX = "recipe_"
CHOSEN = "chosen_by_flag"
"""Where a flag's group says which trainer it chose."""
MAIN = "verl.trainer.main_ppo"


class FlagError(RecipeError):
    """A setting of stock verl that the mode which a flag chose cannot take."""


def check_main(config: DictConfig, main: str) -> None:
    """Refuse a flag in a main that would not look at it; ``main``: the name of its module.

    A main of the user's own is taken for one that has verl's task runner; if it has another, that ends with an error
    where it makes its agent loops.

    Raises:
        FlagError: it is such a main.
    """
    ours = main.startswith("recipe.") and any(main == f"recipe.{mode}.main" for mode in MODES)
    if config.get(CHOSEN) and main != MAIN and (ours or main.split(".")[0] == "verl"):
        raise FlagError(
            f"+recipe has chosen {config[CHOSEN]}, and {main} would never look at it: give the flag to {MAIN}"
            + (f", or leave it out of {main}" if ours else "")
        )


def settle(config: DictConfig) -> list[str]:
    """Have ``config`` ask for the trainer that its flag chose; returns what of the script has no effect then.

    Raises:
        FlagError: the script asks for another one of this package's.
    """
    chosen, trainer = config.get(CHOSEN), config.trainer
    if not chosen:
        return []
    asked = str(trainer.v1.trainer_mode)
    if asked != chosen and asked.startswith(PREFIX):
        raise FlagError(f"trainer.v1.trainer_mode={asked}: +recipe has chosen {chosen}; leave one of them out")
    without = [f"trainer.v1.trainer_mode={asked}"] * (asked != chosen) + ["trainer.use_v1=false"] * (not trainer.use_v1)
    with read_write(config), open_dict(config):
        trainer.use_v1, trainer.v1.trainer_mode = True, chosen
    return [f"{setting} has no effect: +recipe has chosen {chosen}" for setting in without]


def take_arguments(config: DictConfig, mode: str) -> None:
    """Change ``config`` to what its mode reads.

    Raises:
        FlagError: a setting that the mode cannot take.
    """
    manager = config.actor_rollout_ref.rollout.agent.agent_loop_manager_class
    if manager != MANAGER:
        raise FlagError(
            f"actor_rollout_ref.rollout.agent.agent_loop_manager_class={manager}: the modes have an agent-loop "
            "manager of their own, which this cannot replace; leave the setting out"
        )
    with open_dict(config):
        config.trainer.default_local_dir = os.path.abspath(config.trainer.default_local_dir)
        config.transfer_queue.enable = False
        # Of a synchronous DAPO script: prompts to generate at a time. Here they are issued one by one.
        config.data.gen_batch_size = None
        if config.async_training.placement != SHARED:
            _take_resources(config)
        if MODES[mode].counts_mini_batches:
            _count_in_mini_batches(config)


def _take_resources(config: DictConfig) -> None:
    """Accelerators of generation: by ``rollout``, or where verl's v1 trainers have them, or the default."""
    asked, theirs = config.rollout, config.actor_rollout_ref.rollout
    named_by_v1 = is_count(theirs.get("nnodes"))
    for name, default in (("nnodes", 1), ("n_gpus_per_node", 8)):
        of_v1 = theirs.get(name) if named_by_v1 else None
        if asked[name] is not None and of_v1 is not None and asked[name] != of_v1:
            raise FlagError(
                f"rollout.{name}={asked[name]} and actor_rollout_ref.rollout.{name}={of_v1} both say where the mode "
                "generates; leave one of them out"
            )
        if asked[name] is None:
            asked[name] = default if of_v1 is None else of_v1


def _count_in_mini_batches(config: DictConfig) -> None:
    size, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    if size % mini:
        raise FlagError(
            f"data.train_batch_size={size} is no multiple of actor_rollout_ref.actor.ppo_mini_batch_size={mini}; "
            "this mode collects a step's prompts in mini-batches, so make it one"
        )
    config.async_training.require_batches = size // mini
    config.data.train_batch_size = 0
    config.data.gen_batch_size = 1

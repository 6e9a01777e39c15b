# SPDX-License-Identifier: Apache-2.0
"""Whether a run may go on from what an earlier one saved, with the settings that it has now."""

from collections.abc import Iterable, Mapping
from enum import Enum, auto
from typing import Any

from recipe.async_engine.core.errors import SnapshotError

STATE_FORMAT = 1
"""Of the rollout side of a checkpoint, which has a ledger's snapshot in it."""
BATCH = "groups of a batch (ppo_mini_batch_size * require_batches)"
PER_VERSION = "async_training.trigger_parameter_sync_step"
WHOLE = "whole batches (async_training.admission_policy)"


RESUMED_PARTS = ("model", "optimizer", "extra")
"""Of verl's checkpoints, what training goes on from: weights, the optimizer's state, learning-rate schedule and RNG."""


def not_carried(contents: Iterable[str], strategy: str) -> list[str]:
    """Of `RESUMED_PARTS`, those that such contents of a checkpoint leave out.

    Megatron's engine takes its weights from ``hf_model`` too (utils/checkpoint/megatron_checkpoint_manager.py:256).
    """
    has = {*contents}
    if strategy == "megatron" and "hf_model" in has:
        has.add("model")
    return [part for part in RESUMED_PARTS if part not in has]


class Changed(Enum):
    """What a change of a setting since the checkpoint means."""

    NOTED = auto()
    WITHOUT_EFFECT = auto()
    """Noted: verl goes on with the value that is in the checkpoint."""
    REFUSED_WITH_ANSWERS = auto()
    """Refused where groups were live: their answers have the shape of the value that they were made with."""
    REFUSED = auto()


RULES: dict[str, Changed] = {
    "actor_rollout_ref.rollout.n": Changed.REFUSED_WITH_ANSWERS,
    "data.max_prompt_length": Changed.REFUSED_WITH_ANSWERS,
    "data.max_response_length": Changed.REFUSED_WITH_ANSWERS,
    # Which groups may be trained when depends on these.
    BATCH: Changed.REFUSED,
    PER_VERSION: Changed.REFUSED,
    WHOLE: Changed.REFUSED,
    "async_training.placement": Changed.REFUSED,
    # The ledger refuses a bound that its groups don't fit.
    "async_training.max_staleness": Changed.NOTED,
    # verl's FSDP checkpoints are one file a rank.
    "actor_rollout_ref.actor.strategy": Changed.REFUSED,
    "trainer.nnodes * trainer.n_gpus_per_node": Changed.REFUSED,
    # A prompt is known by its epoch and its row.
    "data.train_files": Changed.REFUSED,
    "rows of data.train_files": Changed.REFUSED,
    "data.shuffle": Changed.REFUSED,
    "data.seed": Changed.REFUSED,
    "trainer.total_epochs": Changed.NOTED,
    # Tensors of other shapes; adapters that are scaled otherwise, or are of another base model.
    "sizes of actor_rollout_ref.model.path": Changed.REFUSED,
    "sizes of critic.model.path": Changed.REFUSED,
    "LoRA": Changed.REFUSED,
    # The state of one optimizer is nothing to another one.
    "actor_rollout_ref.actor.optim.optimizer": Changed.REFUSED,
    "critic.optim.optimizer": Changed.REFUSED,
    "critic.strategy": Changed.REFUSED,
    "actor_rollout_ref.actor.optim.lr": Changed.WITHOUT_EFFECT,
    "critic.optim.lr": Changed.WITHOUT_EFFECT,
    "tokenizer": Changed.REFUSED,
    "chat template": Changed.NOTED,
}
"""The settings, and what follows from them, that a checkpoint is made with."""


def changes(saved: Mapping[str, Any], present: Mapping[str, Any], live: int) -> list[str]:
    """What has changed since a checkpoint with so many live groups was made, one text each.

    Raises `SnapshotError` where the run cannot go on with the present values; it names each, with the saved one.
    """
    known = [name for name in RULES if name in saved and name in present]
    found = {name: f"{saved[name]} -> {present[name]}" for name in known if saved[name] != present[name]}
    refused = [
        f"{name} = {present[name]}, but the checkpoint was made with {saved[name]}"
        for name in found
        if RULES[name] is Changed.REFUSED or (RULES[name] is Changed.REFUSED_WITH_ANSWERS and live)
    ]
    if refused:
        raise SnapshotError(
            "; ".join(refused) + ". Resume with the values of the checkpoint, or start a new run from its weights "
            "(actor_rollout_ref.model.path, trainer.resume_mode=disable)."
        )
    also = {Changed.WITHOUT_EFFECT: ", without effect: the checkpoint's goes on"}
    return [f"{name}: {change}{also.get(RULES[name], '')}" for name, change in found.items()]

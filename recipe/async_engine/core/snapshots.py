# SPDX-License-Identifier: Apache-2.0
"""Decides whether a run may resume from a checkpoint although some of its settings have changed."""

from collections.abc import Iterable, Mapping
from enum import Enum, auto
from typing import Any

from recipe.async_engine.core.errors import SnapshotError

STATE_FORMAT = 1
"""Version of the file format in which a checkpoint has the ledger's state and the unfinished answers."""
BATCH = "groups of a batch (ppo_mini_batch_size * require_batches)"
PER_VERSION = "async_training.trigger_parameter_sync_step"
WHOLE = "whole batches (async_training.admission_policy)"


RESUMED_PARTS = ("model", "optimizer", "extra")
"""Parts of verl's checkpoints from which training resumes.

"model" is the weights, "optimizer" is the optimizer's state, and "extra" is the learning-rate schedule and the RNG.
"""


def not_carried(contents: Iterable[str], strategy: str) -> list[str]:
    """Return those of `RESUMED_PARTS` that are missing in ``contents``, the list of parts that checkpoints contain.

    For Megatron, ``hf_model`` counts as ``model``, because verl's engine can load the weights from it
    (verl/utils/checkpoint/megatron_checkpoint_manager.py:256).
    """
    has = {*contents}
    if strategy == "megatron" and "hf_model" in has:
        has.add("model")
    return [part for part in RESUMED_PARTS if part not in has]


class Changed(Enum):
    """The consequence of resuming from a checkpoint that was written with another value of a setting."""

    NOTED = auto()
    WITHOUT_EFFECT = auto()
    """The change is reported, but verl continues with the checkpoint's value."""
    REFUSED_WITH_ANSWERS = auto()
    """The change is refused if the checkpoint has unfinished prompt groups, whose answers depend on the saved value."""
    REFUSED = auto()


RULES: dict[str, Changed] = {
    "actor_rollout_ref.rollout.n": Changed.REFUSED_WITH_ANSWERS,
    "data.max_prompt_length": Changed.REFUSED_WITH_ANSWERS,
    "data.max_response_length": Changed.REFUSED_WITH_ANSWERS,
    "distillation": Changed.REFUSED_WITH_ANSWERS,
    # The state of the staleness gate in the checkpoint depends on these settings.
    BATCH: Changed.REFUSED,
    PER_VERSION: Changed.REFUSED,
    WHOLE: Changed.REFUSED,
    "async_training.placement": Changed.REFUSED,
    # A change is only reported, because `SampleLedger.restore` refuses a max_staleness that the checkpoint's groups
    # would violate.
    "async_training.max_staleness": Changed.NOTED,
    # verl writes one checkpoint file per FSDP rank, so strategy and ranks must stay the same.
    "actor_rollout_ref.actor.strategy": Changed.REFUSED,
    "trainer.nnodes * trainer.n_gpus_per_node": Changed.REFUSED,
    # A prompt is identified by its epoch and row, so the order of the data must stay the same.
    "data.train_files": Changed.REFUSED,
    "rows of data.train_files": Changed.REFUSED,
    "data.shuffle": Changed.REFUSED,
    "data.seed": Changed.REFUSED,
    "trainer.total_epochs": Changed.NOTED,
    # These three determine the shapes of the models' tensors, and the scaling and base model of LoRA adapters.
    "sizes of actor_rollout_ref.model.path": Changed.REFUSED,
    "sizes of critic.model.path": Changed.REFUSED,
    "LoRA": Changed.REFUSED,
    # An optimizer cannot use the state of another one.
    "actor_rollout_ref.actor.optim.optimizer": Changed.REFUSED,
    "critic.optim.optimizer": Changed.REFUSED,
    "critic.strategy": Changed.REFUSED,
    "actor_rollout_ref.actor.optim.lr": Changed.WITHOUT_EFFECT,
    "critic.optim.lr": Changed.WITHOUT_EFFECT,
    "tokenizer": Changed.REFUSED,
    "chat template": Changed.NOTED,
}
"""The consequence if a setting, or a value derived from settings, differs from the one saved in the checkpoint."""


def changes(saved: Mapping[str, Any], present: Mapping[str, Any], live: int) -> list[str]:
    """Return a text for each setting whose present value differs from the one that is ``saved`` in the checkpoint.

    ``live`` is the number of unfinished prompt groups in the checkpoint.

    Raises:
        SnapshotError: a setting that must not change has changed; the message has both of its values.
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
    also = {Changed.WITHOUT_EFFECT: ", without effect: the checkpoint's value is used"}
    return [f"{name}: {change}{also.get(RULES[name], '')}" for name, change in found.items()]

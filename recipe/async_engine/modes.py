# SPDX-License-Identifier: Apache-2.0
"""The modes: what a run of each is made of, by name. Their settings are in the YAML of ``recipe/MODE/config``."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mode:
    """What tells a mode from the others, besides its settings.

    Attributes:
        trainer: the fully qualified name of its `AsyncPPOTrainer`.
        counts_mini_batches: whether a step's batch is counted in mini-batches (``async_training.require_batches``),
            where verl has ``data.train_batch_size``.
    """

    trainer: str = "recipe.async_engine.trainer.base.AsyncPPOTrainer"
    counts_mini_batches: bool = False


MODES = {
    "fully_async": Mode(counts_mini_batches=True),
    "one_step_off": Mode(),
    "partial_rollout": Mode("recipe.partial_rollout.trainer.PartialRolloutTrainer"),
}

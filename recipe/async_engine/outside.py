# SPDX-License-Identifier: Apache-2.0
"""All that the engine knows by name of what stands outside of it, in one table.

Contract: the engine imports none of these. What adds a mode, a feature or a transfer of its own adds a row here, and
nothing else in the engine.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mode:
    """What tells a mode from the others, besides its settings, which are in the YAML of ``recipe/MODE/config``.

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

FEATURES = (
    ("VERL_PLATFORM", "cpu", "recipe.laptop.platform.cpu"),
    ("RECIPE_V1_TRAINERS", "1", "recipe.mains.register"),
)
"""An environment variable, what it must be (compared without case and blanks), and the module whose ``install()`` then
does it: imported only when asked for, and harmless when called twice."""

HOST_BACKEND, HOST_MODULE = "recipe_gloo", "recipe.laptop.transfer.gloo_engine"
"""The checkpoint engine that sends through host memory, and the module that registers it with verl."""

CPU_WORKER_EXTENSION = "recipe.laptop.platform.engine_extension.CPUStagingExtension"
"""What a rollout engine on a CPU takes its weights by."""

FORK_SERVER = "recipe.laptop.prefork.server "
"""In the command line of the process that a local run's workers are forked from."""

# SPDX-License-Identifier: Apache-2.0
"""Names of modules and classes outside of the engine that the engine uses without importing them itself.

Contract: whoever adds a mode, a feature or a transfer of weights adds a row here, and changes nothing else in the
engine.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mode:
    """A mode; its settings are in the YAML of ``recipe/MODE/config``.

    Attributes:
        trainer: the fully qualified name of its `AsyncPPOTrainer`.
        counts_mini_batches: whether a step's batch is counted in mini-batches (``async_training.require_batches``),
            instead of in prompts, as by verl's ``data.train_batch_size``.
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
"""For each feature: an environment variable, its value, and the module whose ``install()`` is called with that value.

Values are compared without case and surrounding blanks. The module is imported only then; it may be called twice."""

HOST_BACKEND, HOST_MODULE = "recipe_gloo", "recipe.laptop.transfer.gloo_engine"
"""The checkpoint engine that sends through host memory, and the module that registers it with verl."""

CPU_WORKER_EXTENSION = "recipe.laptop.platform.engine_extension.CPUStagingExtension"
"""The extension of vLLM's worker by which a rollout engine on a CPU receives weights."""

FORK_SERVER = "recipe.laptop.prefork.server "
"""A part of the command line of the process from which a local run's workers are forked."""

# SPDX-License-Identifier: Apache-2.0
"""Names of modules and classes outside `recipe.async_engine` that this package loads without an import statement.

Contract: adding a mode, a feature or a weight transfer takes one row in this file and no other change in
`recipe.async_engine`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mode:
    """An asynchronous mode, such as ``one_step_off``; the YAML files in ``recipe/MODE/config`` have its settings.

    Attributes:
        trainer: the fully qualified name of the mode's subclass of `AsyncPPOTrainer`, or of that class itself.
        counts_mini_batches: whether the batch of a step is set as a number of mini-batches
            (``async_training.require_batches``) instead of a number of prompts (verl's ``data.train_batch_size``).
    """

    trainer: str = "recipe.async_engine.trainer.base.AsyncPPOTrainer"
    counts_mini_batches: bool = False


MODES = {
    "fully_async": Mode(counts_mini_batches=True),
    "one_step_off": Mode(),
    "partial_rollout": Mode(),
}

FEATURES = (
    ("VERL_PLATFORM", "cpu", "recipe.laptop.platform.cpu"),
    ("RECIPE_V1_TRAINERS", "1", "recipe.mains.register"),
)
"""For each feature: an environment variable, a value, and a module. If the variable has this value (in any case, with
or without surrounding blanks), the module is imported and its ``install()`` is called, possibly twice."""

HOST_BACKEND, HOST_MODULE = "recipe_gloo", "recipe.laptop.transfer.gloo_engine"
"""Name of the checkpoint engine that sends weights through host memory, and the module that registers it with verl."""

CPU_WORKER_EXTENSION = "recipe.laptop.engines.engine_extension.CPUStagingExtension"
"""Class with which the workers of a rollout engine on a CPU are extended, so that they can receive weights."""

FORK_SERVER = "recipe.laptop.prefork.server "
"""Part of the fork server's command line, by which its process is found. It forks the workers of a local run."""

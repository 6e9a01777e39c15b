# SPDX-License-Identifier: Apache-2.0
"""Names of modules and classes in other packages that `recipe.async_engine` loads by name, without an import statement.

Contract: adding a mode, a feature or a weight transfer takes one row in this file and no other change in the package.
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
"""For each feature, an environment variable, its value, and a module. If the variable has this value (in any case, with
or without surrounding blanks), the module is imported and its ``install()`` is called, possibly twice."""

HOST_BACKEND, HOST_MODULE = "recipe_gloo", "recipe.laptop.transfer.gloo_engine"
"""The checkpoint engine that sends through host memory, and the module that registers it with verl."""

CPU_WORKER_EXTENSION = "recipe.laptop.engines.engine_extension.CPUStagingExtension"
"""The class that extends the workers of a rollout engine on a CPU, so that it can receive weights."""

FORK_SERVER = "recipe.laptop.prefork.server "
"""Text in the command line of the process from which a local run forks its workers, to recognize that process."""

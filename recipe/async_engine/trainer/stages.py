# SPDX-License-Identifier: Apache-2.0
"""The interface between the training loop and a trainer: the stages of a step, and saving and loading.

Contract: the loop calls the stages of a step in the order of the methods of `Stages`, from `begin_step` on, and passes
the result of each stage to the next. The loop uses no other members of a trainer. `trainer.verl_trainer` implements
this interface with verl's trainer, and other implementations are possible.
"""

from __future__ import annotations

from typing import Any, Protocol

from verl import DataProto

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.engines.reservation import Reservations


class TrainingFailed(RecipeError):
    """Training cannot start or continue. The message says why, and what to change."""


class Stages(Protocol):
    """The stages of a step, and everything else that the training loop needs from a trainer.

    Attributes:
        actor_rollout_wg: verl's group of the workers that train the policy.
        all_wg: the groups of all training workers, by role.
        prompts: verl's loader of the training data.
        val_dataloader: verl's loader of the validation data.
    """

    actor_rollout_wg: Any
    all_wg: dict[str, Any]
    prompts: Any
    val_dataloader: Any

    @property
    def uses_reference(self) -> bool: ...

    def start(self, reservations: Reservations) -> None:
        """Start the training workers on their reserved accelerators, and have them build their models."""

    def use_rollout(self, agents: Any, servers: Any, rewards: Any, publisher: Any) -> None:
        """Store the agent-loop manager, the rollout servers, the reward manager and the publisher.

        Validation and profiling use them.
        """

    def begin_step(self, step: int, metrics: dict[str, Any], timing: dict[str, float]) -> None:
        """Begin a step. Its stages add metrics to ``metrics``, and their durations in seconds to ``timing``."""

    def balance(self, batch: DataProto, metrics: dict[str, Any]) -> None:
        """Reorder the rows of a batch in place, so that all ranks get about the same number of tokens."""

    def rewards(self, batch: DataProto) -> DataProto:
        """Extract the rewards that the agent-loop workers have put into the batch."""

    def old_log_probs(self, batch: DataProto) -> tuple[DataProto, float]:
        """Compute ``old_log_probs`` and ``entropys`` with the current weights; return a batch of them, and the MFU."""

    def reference_log_probs(self, batch: DataProto) -> DataProto:
        """Add the reference policy's log-probs, if the run has a reference policy."""

    def values(self, batch: DataProto) -> DataProto:
        """Add the critic's values, if the run has a critic."""

    def advantages(self, batch: DataProto) -> DataProto:
        """Add advantages and returns."""

    def update_critic(self, batch: DataProto) -> DataProto:
        """Update the critic, if the run has one."""

    def update_actor(self, batch: DataProto) -> DataProto:
        """Update the policy, unless the critic's warm-up is still going on."""

    def dump(self, batch: DataProto) -> None:
        """Write the batch's answers to files, if the settings name a folder for them."""

    def measure(self, batch: DataProto) -> None:
        """Add the metrics of a finished step, and call the data set's hook that is called after each trained batch."""

    def validate(self, step: int, generations: Any) -> dict[str, Any]:
        """Validate the published weights, and return the metrics. ``generations`` sends answers to trackers."""

    def save(self, step: int) -> None:
        """Write models, optimizers and the position in the data into the folder of this step."""

    def load(self) -> int:
        """Load the checkpoint that `trainer.resume_mode` selects, and return its step, or 0 if there is none."""

    def load_weights(self, folder: str) -> None:
        """Load only the weights of another run's checkpoint."""

    def profile(self, start: bool, run_hook: bool = False) -> None:
        """Start or stop the workers' profilers. ``run_hook`` says whether to run verl's finish hook after stopping."""

    def close(self) -> None:
        """Stop the thread that writes the files of `dump`."""

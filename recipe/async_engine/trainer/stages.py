# SPDX-License-Identifier: Apache-2.0
"""What the training loop asks of a trainer: the stages of a step, and its weights on disk.

Contract: the loop calls the stages of a step in the order in which they stand here, from `begin_step` on, and gives
each stage the batch that the one before returned. It knows nothing else about a trainer. `trainer.verl_trainer`
implements the stages with verl's trainer, and another trainer can implement them too.
"""

from __future__ import annotations

from typing import Any, Protocol

from verl import DataProto

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.engines.reservation import Reservations


class TrainingFailed(RecipeError):
    """A run cannot start or continue to train. The message says why, and what to change."""


class Stages(Protocol):
    """The interface of the module's contract.

    Attributes:
        actor_rollout_wg: verl's group of the workers that train the policy.
        all_wg: the groups of all training workers, by their roles.
        uses_reference: whether there is a reference policy.
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
        """Start the training workers where their accelerators are reserved, and have them make their models."""

    def use_rollout(self, agents: Any, servers: Any, rewards: Any, publisher: Any) -> None:
        """Take the rollout side, which validation and profiling need."""

    def begin_step(self, step: int, metrics: dict[str, Any], timing: dict[str, float]) -> None:
        """Begin the step of this number, whose stages add to ``metrics`` and, in seconds, to ``timing``."""

    def balance(self, batch: DataProto, metrics: dict[str, Any]) -> None:
        """Reorder the rows of a batch in place, so that the ranks get about as many tokens each."""

    def rewards(self, batch: DataProto) -> DataProto:
        """Read the rewards that came with the answers."""

    def old_log_probs(self, batch: DataProto) -> tuple[DataProto, float]:
        """Compute log-probs by the present weights.

        The result is a batch with ``old_log_probs`` and ``entropys``, and the model FLOPs utilization.
        """

    def reference_log_probs(self, batch: DataProto) -> DataProto:
        """Add the reference policy's log-probs, if there is one."""

    def values(self, batch: DataProto) -> DataProto:
        """Add the critic's values, if there is one."""

    def advantages(self, batch: DataProto) -> DataProto:
        """Add advantages and returns."""

    def update_critic(self, batch: DataProto) -> DataProto:
        """Update the critic, if there is one."""

    def update_actor(self, batch: DataProto) -> DataProto:
        """Update the policy, once the critic's warm-up is over."""

    def dump(self, batch: DataProto) -> None:
        """Write the batch's answers, if the settings name a folder for them."""

    def measure(self, batch: DataProto) -> None:
        """Add the metrics of a finished step, and tell the data set about its batch."""

    def validate(self, step: int, generations: Any) -> dict[str, Any]:
        """Validate, and return the metrics. ``generations`` logs answers to trackers."""

    def save(self, step: int) -> None:
        """Write models, optimizers and the position in the data into the folder of this step."""

    def load(self) -> int:
        """Load what `trainer.resume_mode` asks for, and return its step, or 0 if the run starts from the beginning."""

    def load_weights(self, folder: str) -> None:
        """Load only the weights of another run's checkpoint."""

    def profile(self, start: bool, run_hook: bool = False) -> None:
        """Start or stop the workers' profilers. With ``run_hook`` the finish hook runs when they stop."""

    def close(self) -> None:
        """End the thread that writes answers."""

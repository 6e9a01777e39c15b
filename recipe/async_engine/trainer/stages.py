# SPDX-License-Identifier: Apache-2.0
"""What the loop of a run asks of whatever trains: the stages of a step, and its weights on disk.

Contract: the loop calls the stages of a step in the order in which they stand here, from `begin_step` on, and hands
each the batch that the one before returned. It knows nothing else of a trainer. `trainer.verl_trainer` has verl's;
another trainer's stages can stand beside them.
"""

from __future__ import annotations

from typing import Any, Protocol

from verl import DataProto

from recipe.async_engine.engines.reservation import Reservations


class Stages(Protocol):
    """See the module's contract.

    Attributes:
        actor_rollout_wg: verl's group of the workers that train the policy.
        all_wg: the groups of all training workers, by their roles.
        uses_reference: whether there is a reference policy.
        prompts: verl's loader of training data.
        val_dataloader: that of the validation's.
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
        """Have the rollout side, which validation and profiling ask."""

    def begin_step(self, step: int, metrics: dict[str, Any], timing: dict[str, float]) -> None:
        """The step of this number begins; its stages add to ``metrics`` and, in seconds, to ``timing``."""

    def balance(self, batch: DataProto, metrics: dict[str, Any]) -> None:
        """Put the rows of a batch in an order in which the ranks get about as many tokens each, in place."""

    def rewards(self, batch: DataProto) -> DataProto:
        """Read the rewards that came with the answers."""

    def old_log_probs(self, batch: DataProto) -> tuple[DataProto, float]:
        """Compute log-probs by the present weights: a batch with ``old_log_probs`` and ``entropys``, and the MFU."""

    def reference_log_probs(self, batch: DataProto) -> DataProto:
        """Add the reference policy's log-probs, where there is one."""

    def values(self, batch: DataProto) -> DataProto:
        """Add the critic's values, where there is one."""

    def advantages(self, batch: DataProto) -> DataProto:
        """Add advantages and returns."""

    def update_critic(self, batch: DataProto) -> DataProto:
        """Update the critic, where there is one."""

    def update_actor(self, batch: DataProto) -> DataProto:
        """Update the policy, once the critic's warm-up is over."""

    def dump(self, batch: DataProto) -> None:
        """Write the batch's answers, where a folder is named for them."""

    def measure(self, batch: DataProto) -> None:
        """Add the metrics of a step that is over, and tell the data set of its batch."""

    def validate(self, step: int, generations: Any) -> dict[str, Any]:
        """Have the validation's prompts answered; returns its metrics. ``generations``: logs answers to trackers."""

    def save(self, step: int) -> None:
        """Write models, optimizers and the position in the data into the folder of this step."""

    def load(self) -> int:
        """Load what `trainer.resume_mode` asks for; returns its step, 0 where the run begins."""

    def load_weights(self, folder: str) -> None:
        """Take the weights of another run's checkpoint, and nothing else of it."""

    def profile(self, start: bool, run_hook: bool = False) -> None:
        """Start or stop the workers' profilers; ``run_hook``: the finish hook runs then."""

    def close(self) -> None:
        """End what writes answers."""

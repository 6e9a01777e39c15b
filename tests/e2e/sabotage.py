# SPDX-License-Identifier: Apache-2.0
"""One-step-off trainers with deliberate errors, each of which the comparison with synchronous training has to find."""

from __future__ import annotations

from typing import Any

from recipe.async_engine.trainer.base import AsyncPPOTrainer

WRONG_STEP = 2


class WrongVersionLabel(AsyncPPOTrainer):
    """Tells the servers that they hold version 2 while giving them the weights of version 1."""

    def _publish(self) -> None:
        wrong = self.ledger.version + 1 == WRONG_STEP
        if wrong:
            self.actor_rollout_wg.save_model_to_cpu("right")
            self.actor_rollout_wg.restore_model_from_cpu("older")
        super()._publish()
        if wrong:
            self.actor_rollout_wg.restore_model_from_cpu("right")
        self.actor_rollout_wg.save_model_to_cpu("older")


class WrongBatchOrder(AsyncPPOTrainer):
    """Trains the groups of a batch in reverse order."""

    def _assemble(self, groups: list[Any]) -> Any:
        return super()._assemble(groups[::-1] if self.global_steps == WRONG_STEP else groups)


class DoubleUpdate(AsyncPPOTrainer):
    """Trains a batch twice."""

    def _update(self, batch: Any) -> Any:
        if self.global_steps == WRONG_STEP:
            super()._update(batch)
        return super()._update(batch)

# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""One-step-off trainers that are wrong on purpose: the comparison with synchronous training has to find each."""

from __future__ import annotations

from typing import Any

from recipe.one_step_off.trainer import OneStepOffTrainer

WRONG_STEP = 2


class WrongVersionLabel(OneStepOffTrainer):
    """The servers are told that they hold version 2, and are given the weights of version 1."""

    def _publish(self) -> None:
        wrong = self.ledger.version + 1 == WRONG_STEP
        if wrong:
            self.actor_rollout_wg.save_model_to_cpu("right")
            self.actor_rollout_wg.restore_model_from_cpu("older")
        super()._publish()
        if wrong:
            self.actor_rollout_wg.restore_model_from_cpu("right")
        self.actor_rollout_wg.save_model_to_cpu("older")


class WrongBatchOrder(OneStepOffTrainer):
    """The groups of a batch are trained in the opposite order."""

    def _assemble(self, groups: list[Any]) -> Any:
        return super()._assemble(groups[::-1] if self.global_steps == WRONG_STEP else groups)


class DoubleUpdate(OneStepOffTrainer):
    """A batch is trained twice."""

    def _fit_update_actor(self, batch: Any) -> Any:
        if self.global_steps == WRONG_STEP:
            super()._fit_update_actor(batch)
        return super()._fit_update_actor(batch)

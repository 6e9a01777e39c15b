# SPDX-License-Identifier: Apache-2.0
"""A fully-asynchronous trainer that stores each version's weights and each batch in the folder ``RECORDED``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from verl.single_controller.base.decorator import Dispatch, register

from recipe.async_engine.core.columns import TOKEN_VERSIONS
from recipe.async_engine.trainer.actor_worker import ActorWorker
from recipe.async_engine.trainer.base import AsyncPPOTrainer

COLUMNS = ("input_ids", "attention_mask", "position_ids", "responses", "rollout_log_probs", TOKEN_VERSIONS)


class KeepingWorker(ActorWorker):
    """An actor worker that writes its weights to a file on demand."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def keep_weights(self, file: str) -> None:
        """Write all weights as they are in training."""
        weights, _ = self.actor.engine.get_per_tensor_param()
        torch.save({name: tensor.clone() for name, tensor in weights}, file)


class KeepingTrainer(AsyncPPOTrainer):
    """A trainer that stores weights and batches, as the module describes."""

    actor_worker = KeepingWorker

    def _keep(self, version: int) -> None:
        self.actor_rollout_wg.keep_weights(str(Path(os.environ["RECORDED"]) / f"version_{version}.pt"))

    def _publish(self) -> None:
        self._keep(self.ledger.version + 1)
        super()._publish()

    def _publish_again(self) -> None:
        self._keep(self.ledger.version)
        super()._publish_again()

    def _update(self, batch: Any) -> Any:
        kept = {name: batch.batch[name].clone() for name in COLUMNS} | {"version": self.ledger.version}
        torch.save(kept, Path(os.environ["RECORDED"]) / f"batch_{self.global_steps}.pt")
        return super()._update(batch)

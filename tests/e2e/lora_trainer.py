# SPDX-License-Identifier: Apache-2.0
"""Trainers that store the adapter of each version and each trained batch in the folder ``RECORDED``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from verl.single_controller.base.decorator import Dispatch, register

from recipe.async_engine.trainer.actor_worker import ActorWorker
from recipe.async_engine.trainer.base import AsyncPPOTrainer
from recipe.async_engine.trainer.shared_worker import HybridActorWorker

COLUMNS = ("input_ids", "attention_mask", "responses", "rollout_log_probs", "old_log_probs", "ref_log_prob")

VERSIONS = ("token_versions", "old_log_prob_versions")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Dumping:
    """Mixed into a training worker to write its adapter to a file."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def dump_adapter(self, file: str) -> None:
        """Write the adapter, and a checksum of the base weights, as they are in training."""
        state = {name: whole(tensor).clone() for name, tensor in self.actor.engine.module.state_dict().items()}
        adapter = {name: tensor for name, tensor in state.items() if ".lora_" in name}
        base = {name: tensor for name, tensor in state.items() if ".lora_" not in name}
        if self.rank == 0:
            torch.save({"adapter": adapter, "base": base}, file)


class DumpingWorker(Dumping, ActorWorker):
    """The training worker of separate placement."""


class DumpingHybridWorker(Dumping, HybridActorWorker):
    """The training worker of shared placement."""


class Recording:
    """Mixed into a trainer to store versions and batches."""

    @property
    def _folder(self) -> Path:
        return Path(os.environ["RECORDED"])

    def _dump(self, version: int) -> None:
        self.actor_rollout_wg.dump_adapter(str(self._folder / f"version_{version}.pt"))

    def _publish(self) -> None:
        self._dump(self.ledger.version + 1)
        super()._publish()
        # A transfer must not change the trainer's weights.
        self.actor_rollout_wg.dump_adapter(str(self._folder / f"after_{self.ledger.version}.pt"))

    def _publish_again(self) -> None:
        if not self.is_within_version:
            self._dump(self.ledger.version)
        super()._publish_again()

    def _update(self, batch: Any) -> Any:
        kept = {name: batch.batch[name].clone() for name in (*COLUMNS, *VERSIONS) if name in batch.batch}
        torch.save(kept | {"version": self.ledger.version}, self._folder / f"batch_{self.global_steps}.pt")
        return super()._update(batch)


class Apart(Recording, AsyncPPOTrainer):
    """The recording trainer with separate placement."""

    actor_worker = DumpingWorker


class InTurns(Recording, AsyncPPOTrainer):
    """The recording trainer with shared placement."""

    actor_worker = DumpingHybridWorker


def base_alone(engine: Any) -> Any:
    """Yield what verl sends if adapters are not merged and trainer and rollout are separate (verl #7495)."""
    for name, tensor in engine.module.state_dict().items():
        if ".lora_" not in name:
            yield name.replace("base_model.model.", "").replace(".base_layer", ""), whole(tensor)


class SendingBase:
    """Mixed into a training worker to reproduce the defect of verl #7495."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()
        self.actor.engine.get_per_tensor_param = lambda **_: (base_alone(self.actor.engine), None)


class SendingBaseWorker(SendingBase, ActorWorker):
    """The defective worker of separate placement."""


class SendingBaseHybridWorker(SendingBase, HybridActorWorker):
    """The defective worker of shared placement."""


class FrozenApart(AsyncPPOTrainer):
    """A trainer with the defective worker, for separate placement."""

    actor_worker = SendingBaseWorker


class FrozenInTurns(AsyncPPOTrainer):
    """A trainer with the defective worker, for shared placement."""

    actor_worker = SendingBaseHybridWorker

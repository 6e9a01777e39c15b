# SPDX-License-Identifier: Apache-2.0
"""Trainers that store each trained batch and, if asked, kill log-prob servers between steps.

Environment variables: ``RECORDED`` is the folder of the batches. ``KILL_SERVERS`` has pairs step:server, "3:0 6:1": the
ranks and the server of that number get SIGKILL at the beginning of that step. ``LOSE_SCORES``=n: every
n-th answer of a batch, from the first on, loses what the servers computed.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
import torch

from recipe.async_engine.core.columns import SCORES
from recipe.async_engine.trainer.base import AsyncPPOTrainer
from recipe.async_engine.trainer.log_probs.proximal import ProximalLogProbs

COLUMNS = (
    "input_ids",
    "attention_mask",
    "responses",
    "response_mask",
    "old_log_probs",
    "rollout_log_probs",
    "ref_log_prob",
)
VERSIONS = ("token_versions", "old_log_prob_versions")


def kills() -> list[tuple[int, int]]:
    pairs = [pair.split(":") for pair in os.environ.get("KILL_SERVERS", "").split()]
    return [(int(step), int(server)) for step, server in pairs]


def pid_of(actor: Any) -> int:
    return ray.get(actor.__ray_call__.remote(lambda actor: os.getpid()), timeout=30)


def kill(replica: Any) -> None:
    # Collect all process ids first, because a server ends by itself when its worker has died.
    for pid in [pid_of(actor) for actor in (*replica.workers, *replica.servers)]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class KeepingStage(ProximalLogProbs):
    """Stores the entropies of a batch and, if asked, what the trainer computes for it."""

    def report_entropy(self, batch: Any, entropy: torch.Tensor, metrics: dict[str, Any]) -> None:
        self.kept = {"entropy": entropy.clone()}
        if os.environ.get("RECOMPUTE_TOO"):
            log_probs, again = self.recompute(batch, {}, {})
            self.kept |= {"recomputed_log_probs": log_probs, "recomputed_entropy": again}
        super().report_entropy(batch, entropy, metrics)


class Recording:
    """Mixed into a trainer to store batches."""

    def init_workers(self) -> None:
        self.log_probs = KeepingStage(self.config, self.plan, self.by_published_weights)
        super().init_workers()

    def _use_servers(self, replicas: list[Any], servers: Any) -> None:
        super()._use_servers(replicas, servers)
        self.server_replicas = replicas

    def _train(self, groups: list[Any]) -> Any:
        for step, server in kills():
            if step == self.global_steps:
                kill(self.server_replicas[server])
        return super()._train(groups)

    def _assemble(self, groups: list[Any]) -> Any:
        batch = super()._assemble(groups)
        if "LOSE_SCORES" in os.environ:
            batch.non_tensor_batch[SCORES][:: int(os.environ["LOSE_SCORES"])] = None
        return batch

    def _update(self, batch: Any) -> Any:
        kept = {name: batch.batch[name].clone() for name in (*COLUMNS, *VERSIONS) if name in batch.batch}
        kept |= self.log_probs.kept | {"version": self.ledger.version}
        torch.save(kept, Path(os.environ["RECORDED"]) / f"{self.global_steps}.pt")
        return super()._update(batch)


class RecordingApart(Recording, AsyncPPOTrainer):
    """The recording trainer with separate placement."""

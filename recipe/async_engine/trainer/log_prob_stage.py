# SPDX-License-Identifier: Apache-2.0
"""The stage of a step that gives a batch its proximal log-probs, wherever they come from.

Contract: the metrics ``timing_s/old_log_prob`` (the trainer's own forward pass, 0 without one) and ``rollout_corr/*``
are there in every step, under verl's names, whatever the source. Shown by tests/e2e/test_model_engine.py and, for later
batches of a version, tests/e2e/test_fully_async.py.
"""

import logging
import time

import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.utils.debug import marked_timer
from verl.utils.debug.metrics import calculate_debug_metrics

from recipe.async_engine.core.columns import REFERENCE
from recipe.async_engine.logprobs.columns import reference_column
from recipe.async_engine.logprobs.mismatch import entropy_metric
from recipe.async_engine.logprobs.sources import LogProbSource
from recipe.async_engine.trainer.staged import StagedTrainer

logger = logging.getLogger(__name__)

IN_LOSS = "actor/rollout_corr/"


class LogProbStage(StagedTrainer):
    """See the module's contract."""

    _log_probs: LogProbSource

    def _fit_compute_log_prob(self, batch: DataProto) -> DataProto:
        """Proximal log-probs, from where the settings say."""
        # Present in every run: seconds of log-prob work that training waited for.
        self.timing_raw.setdefault("old_log_prob", 0.0)
        began = time.monotonic()
        self.metrics.update(self._log_probs(batch, self.ledger.version))
        self.metrics["log_probs/critical_path_seconds"] = time.monotonic() - began
        if "entropys" in batch.batch:
            self._report_entropy(batch)
        return batch

    def _fit_compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Log-probs of the reference policy: those that its servers computed, the others by the trainer."""
        if not (self.use_reference_policy and self.plan.settings.servers.reference_replicas):
            return super()._fit_compute_ref_log_prob(batch)
        rows = batch.non_tensor_batch.pop(REFERENCE, [None] * len(batch))
        column, missing = reference_column(rows, batch.batch["responses"].shape[1])
        if missing.any():
            logger.warning("the trainer computes the reference log-probs of %d rows", int(missing.sum()))
            batch = super()._fit_compute_ref_log_prob(batch)
            column = torch.where(missing[:, None], batch.batch["ref_log_prob"], column)
        batch.batch["ref_log_prob"] = column
        self.metrics["model_engine_server/reference_fallback_rows"] = int(missing.sum())
        return batch

    def _report_entropy(self, batch: DataProto) -> None:
        """As verl does where it has computed the column."""
        entropy, mask = batch.batch.pop("entropys"), batch.batch["response_mask"]
        self.metrics.update(entropy_metric(entropy, mask, self.config.actor_rollout_ref.actor))
        self.metrics.update(calculate_debug_metrics(batch))

    def _recompute(self, batch: DataProto) -> tuple[torch.Tensor, torch.Tensor]:
        """By the trainer: log-probs of the newest published version, for every batch of that version, and entropies."""
        with marked_timer("old_log_prob", self.timing_raw, color="blue"):
            computed, mfu = self._by_published_weights(batch)
        self.metrics["perf/mfu/actor_infer"] = mfu
        log_probs, entropy = computed.batch.pop("old_log_probs"), computed.batch.pop("entropys")
        replay = OmegaConf.select(self.config, "actor_rollout_ref.actor.megatron.router_replay.mode")
        for name, column in computed.batch.items():
            # What experts the trainer chose is wanted only where verl replays the trainer's choice.
            if name != "routed_experts" or name not in batch.batch or replay == "R2":
                batch.batch[name] = column
        return log_probs, entropy

    def _by_published_weights(self, batch: DataProto) -> tuple[DataProto, float]:
        # The batch under way has been taken already.
        if self.ledger.batches_left == self.plan.batches_per_version - 1:
            return self._compute_old_log_prob(batch)
        with self.published.in_use():
            return self._compute_old_log_prob(batch)

    def _fit_update_actor(self, batch: DataProto) -> DataProto:
        batch = super()._fit_update_actor(batch)
        # verl puts "actor/" before whatever a loss reports.
        for name in [name for name in self.metrics if name.startswith(IN_LOSS)]:
            self.metrics[name.removeprefix("actor/")] = self.metrics.pop(name)
        return batch

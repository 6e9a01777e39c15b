# SPDX-License-Identifier: Apache-2.0
"""verl's trainer with what this package adds to its stages, each of which is an object or a function of this room.

Contract: `train_on` runs verl's stages in verl's order. verl calls them, and the calls of its worker groups, by names
of its own; each is overridden here and nowhere else, calls verl's and hands a stage what it needs. Calls of worker
groups are phases of the timeline. Shown by tests/integration/test_finite_stage.py and the end-to-end runs.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from verl import DataProto
from verl.experimental.separation.ray_trainer import SeparateRayPPOTrainer

from recipe.async_engine.config.log_prob_servers import Proximal
from recipe.async_engine.config.plan import RunPlan
from recipe.async_engine.config.sections import Timeouts
from recipe.async_engine.core.alarms import Alarms, UnchangedWeights
from recipe.async_engine.core.ledger import SampleLedger
from recipe.async_engine.record.events import SCORES
from recipe.async_engine.record.timeline import Timeline
from recipe.async_engine.trainer.actor_worker import PublishedWeights
from recipe.async_engine.trainer.alarm_stage import note_answers, note_rewards, note_update
from recipe.async_engine.trainer.batch import mask_off_policy
from recipe.async_engine.trainer.finite_stage import COMPUTED, DERIVED, LEFT_OUT, leave_out, with_scores
from recipe.async_engine.trainer.log_prob_stage import LogProbStage, fill_reference, rename_loss_metrics
from recipe.async_engine.trainer.record_stage import COMPUTE, UPDATE, RecordStage


class StagedTrainer(SeparateRayPPOTrainer):
    """See the module's contract."""

    config: Any
    train_dataloader: Any
    reward_extra_infos_dict: dict[str, Any]
    plan: RunPlan
    timeouts: Timeouts
    ledger: SampleLedger
    timeline: Timeline
    log_probs: LogProbStage
    record: RecordStage
    actor_rollout_wg: Any
    tokenizer: Any
    alarms: Alarms
    unchanged: UnchangedWeights
    published: PublishedWeights
    """There from `init_workers` on."""
    # Of the step under way.
    metrics: dict[str, Any]
    timing_raw: dict[str, float]
    max_steps_duration: float

    def train_on(self, batch: DataProto) -> DataProto:
        """Train one assembled batch."""
        self.metrics.update(note_answers(batch, self.tokenizer.all_special_ids, self.alarms))
        batch = self._fit_compute_reward(batch)
        batch = self._fit_compute_log_prob(batch)
        batch = self._fit_compute_ref_log_prob(batch)
        batch = self._fit_compute_critic(batch)
        batch = self._fit_compute_advantage(batch)
        limit = self.plan.settings.async_training.off_policy_mask
        if limit is not None:
            self.metrics.update(mask_off_policy(batch, self.ledger.version, limit))
        return self._fit_update_actor(self._fit_update_critic(batch))

    def by_published_weights(self, batch: DataProto) -> tuple[DataProto, float]:
        """verl's forward pass for old log-probs, by the weights that were published last."""
        # The batch under way has been taken already.
        if self.ledger.batches_left == self.plan.batches_per_version - 1:
            return self._compute_old_log_prob(batch)
        with self.published.in_use():
            return self._compute_old_log_prob(batch)

    # verl's stages.

    def _fit_compute_log_prob(self, batch: DataProto) -> DataProto:
        # The trainer waits for its servers, where they have them.
        with self.timeline.phase(SCORES) if self.plan.proximal is Proximal.SERVER else nullcontext():
            batch = self.log_probs.fill(batch, self.ledger.version, self.metrics, self.timing_raw)
        self.log_probs.report_entropy(batch, self.metrics)
        return batch

    def _fit_compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        compute = super()._fit_compute_ref_log_prob
        if self.use_reference_policy and self.plan.settings.servers.reference_replicas:
            return fill_reference(batch, self.metrics, compute)
        return compute(batch)

    def _fit_compute_advantage(self, batch: DataProto) -> DataProto:
        left_out = leave_out(batch, COMPUTED)
        batch = super()._fit_compute_advantage(batch)
        note_rewards(batch, self.alarms)
        self.metrics[LEFT_OUT] = left_out + leave_out(batch, DERIVED)
        return batch

    def _fit_update_actor(self, batch: DataProto) -> DataProto:
        batch = super()._fit_update_actor(batch)
        rename_loss_metrics(self.metrics)
        return batch

    def _val_metrics_update(
        self, data_sources: Sequence[str], uids: list[Any], infos: dict[str, list[Any]], turns: list[Any]
    ) -> dict[str, float]:
        data_sources, uids, infos, turns, without = with_scores(data_sources, uids, infos, turns)
        metrics = super()._val_metrics_update(data_sources, uids, infos, turns)
        return {**metrics, "val-aux/num_failed": without}

    # verl's calls of its worker groups.

    def _compute_values(self, batch: DataProto) -> DataProto:
        with self.timeline.phase(COMPUTE):
            return super()._compute_values(batch)

    def _compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        with self.timeline.phase(COMPUTE):
            return super()._compute_ref_log_prob(batch)

    def _compute_old_log_prob(self, batch: DataProto) -> Any:
        with self.timeline.phase(COMPUTE):
            return super()._compute_old_log_prob(batch)

    def _update_critic(self, batch: DataProto) -> DataProto:
        with self.timeline.phase(UPDATE):
            output = super()._update_critic(batch)
        self.metrics.update(note_update("critic", output, self.alarms))
        return output

    def _update_actor(self, batch: DataProto) -> DataProto:
        with self.timeline.phase(UPDATE):
            output = super()._update_actor(batch)
        self.metrics.update(note_update("actor", output, self.alarms))
        metrics = output.meta_info["metrics"]
        self.unchanged.updated(np.atleast_1d(metrics["actor/grad_norm"]), float(np.max(metrics["actor/lr"])))
        return output

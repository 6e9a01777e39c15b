# SPDX-License-Identifier: Apache-2.0
"""A training step: it assembles a batch from groups and trains the batch with a trainer's `Stages`.

Contract: the stages are called in verl's order. Before anything is trained, the staleness of every token is checked.
Between the stages, this module updates alarms, handles numbers that are NaN or infinite, and adds log-probs from the
configured source. Shown by tests/integration/test_finite_stage.py, test_alarm_stage.py and the end-to-end runs.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
from verl import DataProto

from recipe.async_engine.config.log_prob_servers import Proximal
from recipe.async_engine.core.alarms import Alarms, UnchangedWeights
from recipe.async_engine.core.columns import SCORES, VERSION_RUNS
from recipe.async_engine.core.ledger import SampleLedger
from recipe.async_engine.record.events import SCORES as ANSWER_SCORES
from recipe.async_engine.record.timeline import Timeline
from recipe.async_engine.rollout.group_run import GroupRun
from recipe.async_engine.rollout.scheduler import RolloutScheduler
from recipe.async_engine.rollout.trajectory_codec import unpack
from recipe.async_engine.trainer.alarm_stage import note_answers, note_rewards, note_update
from recipe.async_engine.trainer.batch import assemble, balanced, mask_off_policy, staleness_metrics
from recipe.async_engine.trainer.finite_stage import COMPUTED, DERIVED, LEFT_OUT, leave_out
from recipe.async_engine.trainer.log_probs.proximal import (
    ProximalLogProbs,
    fill_reference,
    rename_loss_metrics,
    scores_column,
)
from recipe.async_engine.trainer.record_stage import RecordStage
from recipe.async_engine.trainer.startup import Startup
from recipe.async_engine.trainer.step_metrics import StepMetrics


class TrainingStep(Startup):
    """The part of a trainer that carries out training steps.

    ``metrics`` and ``timing_raw`` (in seconds) are those of the current step.
    """

    tokenizer: Any
    ledger: SampleLedger
    timeline: Timeline
    record: RecordStage
    alarms: Alarms
    unchanged: UnchangedWeights
    log_probs: ProximalLogProbs
    step_metrics: StepMetrics
    scheduler: RolloutScheduler | None
    metrics: dict[str, Any]
    timing_raw: dict[str, float]

    @property
    def running(self) -> RolloutScheduler:
        """The scheduler, which exists only after the training loop (`fit`) has begun."""
        assert self.scheduler is not None
        return self.scheduler

    def _train(self, groups: list[GroupRun]) -> DataProto:
        batch = self._assemble(groups)
        self.record.ages(batch, self.ledger.version)
        self.metrics.update(staleness_metrics(batch, self.ledger.version, self.plan.max_staleness))
        self.metrics.update(self.step_metrics.of_batch(batch, groups, self.async_rollout_manager, self.timing_raw))
        # From here on, the column `TOKEN_VERSIONS` has the versions of tokens, so remove their run-length code.
        del batch.non_tensor_batch[VERSION_RUNS]
        batch = self.train_on(batch)
        self.running.batch_trained()
        self.stages.dump(batch)
        return batch

    def train_on(self, batch: DataProto) -> DataProto:
        stages, version = self.stages, self.ledger.version
        self.metrics.update(note_answers(batch, self.tokenizer.all_special_ids, self.alarms))
        batch = stages.rewards(batch)
        # If log-prob servers are the source, the time account has the wait for their log-probs as a phase of its own.
        with self.timeline.phase(ANSWER_SCORES) if self.plan.proximal is Proximal.SERVER else nullcontext():
            self.log_probs.fill(batch, version, self.metrics, self.timing_raw)
        if stages.uses_reference and self.plan.settings.servers.reference_replicas:
            batch = fill_reference(batch, self.metrics, stages.reference_log_probs)
        else:
            batch = stages.reference_log_probs(batch)
        batch = self._advantages(stages.values(batch))
        limit = self.plan.settings.async_training.off_policy_mask
        if limit is not None:
            self.metrics.update(mask_off_policy(batch, version, limit))
        return self._update(batch)

    def _advantages(self, batch: DataProto) -> DataProto:
        """Compute advantages. Answers with NaN or infinite numbers are left out of the loss."""
        left_out = leave_out(batch, COMPUTED)
        batch = self.stages.advantages(batch)
        note_rewards(batch, self.alarms)
        self.metrics[LEFT_OUT] = left_out + leave_out(batch, DERIVED)
        return batch

    def _update(self, batch: DataProto) -> DataProto:
        batch = self.stages.update_actor(self.stages.update_critic(batch))
        rename_loss_metrics(self.metrics)
        return batch

    def by_published_weights(self, batch: DataProto) -> tuple[DataProto, float]:
        """Return what `Stages.old_log_probs` returns, but computed with the weights that were published last."""
        # For the first batch after a publication, the trainer's own weights are the published ones. `batches_left` no
        # longer counts the present batch.
        if self.ledger.batches_left == self.plan.batches_per_version - 1:
            return self.stages.old_log_probs(batch)
        with self.published.in_use():
            return self.stages.old_log_probs(batch)

    def _updated(self, model: str, output: DataProto) -> None:
        """Update alarms and metrics after an update of ``model``. ``output`` has the metrics of the model's ranks."""
        self.metrics.update(note_update(model, output, self.alarms))
        if model == "actor":
            metrics = output.meta_info["metrics"]
            self.unchanged.updated(np.atleast_1d(metrics["actor/grad_norm"]), float(np.max(metrics["actor/lr"])))

    def _assemble(self, groups: list[GroupRun]) -> DataProto:
        by_group = [[unpack(payload) for payload in group.fetched] for group in groups]
        for group in groups:
            group.fetched = []
        balance = partial(self.stages.balance, metrics=self.metrics)
        order = None
        if self.config.trainer.balance_batch:
            order = balanced(groups, by_group, balance, self.plan.trainer_ranks)
        batch = assemble(groups, by_group, self.async_rollout_manager.join, order)
        if groups[0].scores:
            scores = scores_column(
                [
                    (score, number)
                    for group, outputs in zip(groups, by_group, strict=True)
                    for score, rows in zip(group.scores, outputs, strict=True)
                    for number in range(len(rows))
                ]
            )
            batch.non_tensor_batch[SCORES] = scores if order is None else scores[order]
        batch.meta_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
        batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(dim=-1).tolist()
        images = [row["images_seqlens"] for row in batch.non_tensor_batch.get("multi_modal_inputs", ()) if row]
        batch.meta_info["images_seqlens"] = [length for row in images for length in row.tolist()]
        return batch

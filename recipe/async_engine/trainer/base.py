# SPDX-License-Identifier: Apache-2.0
"""The training loop of all modes.

Contract: the loop makes no decisions of its own. The scheduler decides which batch is next, the publisher knows which
replicas have a version, and the ledger knows the state of every prompt. A trainer's `Stages` compute rewards,
log-probs, advantages and updates. A step trains one batch of prompt groups. After a fixed number of steps the weights
become a new version. Checkpoints and validations take place at the end of a version. ``fit`` yields after every step,
so that its caller sees the progress and may end the run. Shown by tests/e2e/test_fully_async.py, test_crash.py and
test_faults.py.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import ray
from omegaconf import OmegaConf
from ray.exceptions import GetTimeoutError, RayError
from verl.trainer.ppo.utils import need_critic
from verl.utils.debug import marked_timer

from recipe.async_engine.actors.watch import RunWatch
from recipe.async_engine.config.plan import batch_size, derive, epoch_prompts, rehearses
from recipe.async_engine.config.sections import read_settings
from recipe.async_engine.core.alarms import UnchangedWeights
from recipe.async_engine.core.scoring import Anchor
from recipe.async_engine.log_prob_servers.meter import ServerMeter
from recipe.async_engine.record.contents import lacking
from recipe.async_engine.record.events import RECORDED, Class
from recipe.async_engine.record.figures import TRAINER_DOES
from recipe.async_engine.record.timeline import Timeline
from recipe.async_engine.rollout.group_run import GroupRun
from recipe.async_engine.rollout.kept_answers import TokenAccount
from recipe.async_engine.rollout.prompts import PromptSource
from recipe.async_engine.rollout.scheduler import RolloutScheduler
from recipe.async_engine.rollout.worker_pool import TracedGroups, WorkerPool
from recipe.async_engine.trainer.alarm_stage import (
    new_alarms,
    note_validation,
    nothing_trained,
)
from recipe.async_engine.trainer.checkpoints import RunState
from recipe.async_engine.trainer.data_sets import data_sets
from recipe.async_engine.trainer.figures_stage import LEDGER_COUNTS, FiguresStage, PrometheusExporter
from recipe.async_engine.trainer.hybrid_rehearsal import HybridRehearsal
from recipe.async_engine.trainer.lending_stage import LendingStage
from recipe.async_engine.trainer.log_probs.proximal import (
    ProximalLogProbs,
)
from recipe.async_engine.trainer.made_with import made_with
from recipe.async_engine.trainer.profile_stage import ProfileStage
from recipe.async_engine.trainer.publish_stage import PublishStage
from recipe.async_engine.trainer.record_stage import RecordStage
from recipe.async_engine.trainer.rehearsal import Rehearsal
from recipe.async_engine.trainer.rollout_state import new_ledger
from recipe.async_engine.trainer.save_stage import SavedRun, SaveStage, teller
from recipe.async_engine.trainer.shared_worker import HybridActorWorker
from recipe.async_engine.trainer.startup import scheduler_settings
from recipe.async_engine.trainer.step_metrics import StepMetrics
from recipe.async_engine.trainer.trackers import Trackers, begin_tracking
from recipe.async_engine.trainer.verl_settings import derive_verl_settings
from recipe.async_engine.trainer.verl_trainer import VerlTrainer
from recipe.async_engine.weights.publisher import WeightPublisher

logger = logging.getLogger(__name__)


class AsyncPPOTrainer(SavedRun):
    """The trainer of a run, whose generator `fit` is the training loop.

    The constructor changes ``config`` in place: it writes derived settings to the places where verl reads them.
    """

    rehearsal: Rehearsal | None = None

    def __init__(self, config: Any, tokenizer: Any, processor: Any = None) -> None:
        settings = OmegaConf.to_container(config)
        batch = batch_size(settings, read_settings(settings)[0].async_training)
        data = data_sets(config, tokenizer, processor, batch)
        self.config, self.tokenizer, self.processor = config, tokenizer, processor
        self.plan = derive(settings, dataset_rows=len(data[0]))
        derive_verl_settings(config, self.plan)
        self.timeline = Timeline(time.monotonic, self.plan.engine_places)
        if self.plan.hybrid_replicas:
            self.actor_role = "actor_rollout"
            if not issubclass(self.actor_worker, HybridActorWorker):
                self.actor_worker = HybridActorWorker
        workers = self.actor_worker, self.actor_role, self.timeline.phase, self._updated
        self.stages = VerlTrainer(config, tokenizer, processor, data, *workers)
        self.timeouts = self.plan.settings.async_training.timeouts
        # `prompts` needs no lock: the position from a checkpoint is restored before the scheduler starts, and from then
        # on only the thread that feeds prompts uses `prompts`.
        used = epoch_prompts(len(data[0]), self.plan.batch_groups, self.plan.settings.async_training)
        self.prompts = PromptSource(self.stages.prompts, config.trainer.total_epochs, used)
        self.record = RecordStage(config, self.plan, self.timeline, self._asked, self._agents)
        lacks = partial(lacking, config, self.plan.trainer_ranks, need_critic(config))
        self.saved = RunState(config, self.plan, made_with(config, self.plan, data[0], tokenizer), lacks)
        self.ledger = new_ledger(self.plan)
        self.scheduler: RolloutScheduler | None = None
        self.figures: FiguresStage | None = None
        self.interrupted_tokens = TokenAccount()
        tell = teller(config, self.stages)
        self.saving = SaveStage(self.saved, self.timeline, self.timeouts.checkpoint, self._watched, tell)
        self.profiling = ProfileStage(
            config.global_profiler,
            self._asked,
            self.stages.profile,
            self.timeouts.weight_sync,
        )
        self.step_metrics = StepMetrics(config, self.plan)
        self.log_probs = ProximalLogProbs(config, self.plan, self.by_published_weights)
        self.validation: dict[str, float | None] = {"first": None, "last": None, "failed": 0}
        self.alarms = new_alarms(self.plan)
        self.unchanged = UnchangedWeights()
        self.global_steps, self.is_last_step, self.max_steps_duration = 0, False, 0.0
        self.metrics, self.timing_raw = {}, {}
        self.server_meter = ServerMeter()
        self.lending: LendingStage | None = None
        self._validated_at = -1
        self.trackers: Trackers | None = None
        self.stopped_by: str | None = None

    def _new_scheduler(self) -> RolloutScheduler:
        agents, limits = self.async_rollout_manager, (self.timeouts.startup, self.timeouts.agent_worker)
        samples = self.config.actor_rollout_ref.rollout.trace.get("max_samples_per_step_per_worker")
        traced = TracedGroups(None if samples is None else samples * len(agents.agent_loop_workers))
        pool = WorkerPool(agents.agent_loop_workers, agents.prepare, *limits, traced)
        servers = self.plan.settings.servers
        rescore = servers.enabled and servers.anchor == Anchor.LATEST
        return RolloutScheduler(
            self.ledger,
            self.prompts,
            pool,
            scheduler_settings(self.config, self.plan),
            self.timeline,
            rescore,
            self.alarms.group_ended,
        )

    def publishers(self) -> list[WeightPublisher]:
        """Return the publishers of the hybrid and the standalone replicas, or none before the replicas have started."""
        return [each for each in (self.hybrid, self.publisher) if each is not None] if self.is_up else []

    def _asked(self) -> Sequence[Any]:
        """Return the servers whose activity the event record contains."""
        return [*(replica for each in self.publishers() for replica in each.replicas), *self.references]

    def _live_replicas(self) -> int:
        return sum(publisher.live_replicas for publisher in self.publishers())

    def _agents(self) -> Sequence[Any]:
        """Return the agent-loop workers whose activity the event record contains."""
        return self.async_rollout_manager.agent_loop_workers if self.is_up else ()

    def fit(self, watch: RunWatch) -> Iterator[dict[str, Any]]:
        """Train. Yield first the metrics of the rehearsal and the first validation, and then those of each step.

        ``watch`` enforces the deadlines of reading and writing checkpoints.
        """
        self.watch = watch
        with self._watched("reading the checkpoint"):
            groups = self._load()
        self.logger = self.trackers = begin_tracking(self.config, self.global_steps, self.timeouts.startup)
        self.scheduler = self._new_scheduler()
        self.record.ask()
        self.scheduler.tokens = self.interrupted_tokens
        self.scheduler.restore_groups(groups)
        self.figures = FiguresStage(
            self.ledger,
            self.scheduler,
            self.timeline,
            self.alarms,
            self._live_replicas,
            PrometheusExporter(str(self.config.trainer.experiment_name)),
        )
        self.publishing = PublishStage(
            self.plan,
            self.scheduler,
            self.publisher,
            self.published,
            self.unchanged,
            self.alarms,
            self.timeline,
            self.fail,
        )
        if self.hybrid is not None:
            parts = self.hybrid, self.publisher, self.publishing, self.published
            self.lending = LendingStage(self.plan, self.scheduler, *parts, self.timeline)
        self._publish_again()
        rehearsed = self._rehearse()
        if self.config.get("rehearse_only"):
            yield rehearsed
            return
        if self.lending is not None:
            self.lending.begin()
        self.timeline.restart()
        self.scheduler.start()
        # The scheduler has started, so the first batch is generated during the first validation.
        first = self._validate_now() if self.config.trainer.get("val_before_train", True) else {}
        first |= rehearsed
        if first:
            self.logger.log(data=first, step=self.global_steps)
        yield first
        if self.config.trainer.get("val_only", False):
            return
        try:
            while self.global_steps < self.plan.total_steps and self.stopped_by is None:
                metrics = self._step()
                if metrics is None:
                    break
                yield metrics
                self.alarms.check()
            if self.stopped_by is not None and self.config.trainer.save_freq > 0:
                self.save_once()
            self.publishing.finish(self.metrics)
            self.saving.finish()
            self.judge_the_end()
        except Exception:
            self.saving.complete()
            raise
        self.timeline.stop()

    def end_tracking(self, error: Mapping[str, str] | None, limit_s: float | None = None) -> None:
        """Give the trackers their last rows, and tell them how the run ended. Any thread may call this method.

        Args:
            error: name and message of the error that ended the run, if any.
            limit_s: deadline in seconds, by default the trackers' share of ``async_training.timeouts.stop``.
        """
        if self.trackers is not None:
            self.trackers.finish(self.account(), error, limit_s or self.timeouts.trackers)

    def judge_the_end(self) -> None:
        """At the end of training, raise an error if nothing was trained or if an alarm exceeded its limit."""
        if self.global_steps == 0 < self.plan.total_steps and self.stopped_by is None:
            raise nothing_trained(self.plan, self.running.counts())
        self.alarms.finish()

    def fail(self, error: BaseException) -> None:
        """Make the training loop raise ``error`` when it next waits for a batch. Any thread may call this method."""
        if self.scheduler is not None:
            self.scheduler.fail(error)

    def irreplaceable_actors(self) -> dict[str, Any]:
        """Return, by name, the actors without which the run cannot continue."""
        names: dict[Any, tuple[str, Any]] = {
            None: ("the load balancer of the rollout servers", self.publisher.known.load_balancer)
        }
        for role, group in self.stages.all_wg.items():
            for rank, worker in enumerate(group.workers):
                names.setdefault(worker._actor_id, (f"training worker {rank} ({role})", worker))
        return dict(names.values())

    def request_stop(self, why: str) -> None:
        """End the run after the current step, with a checkpoint if the run saves any. Any thread may call this."""
        self.stopped_by = why
        if self.scheduler is not None:
            self.scheduler.want_no_more()

    def _step(self) -> dict[str, Any] | None:
        self.metrics, self.timing_raw = {}, {}
        if self.saving.is_over:
            self.saving.finish()
        self.profiling.begin(self.global_steps + 1)
        with marked_timer("step", self.timing_raw):
            with self.timeline.phase("wait"), marked_timer("gen", self.timing_raw, color="red"):
                groups = self._fetched_groups()
            if groups is None:
                self._end_without_batch()
                return None
            self.global_steps += 1
            self.is_last_step = self.global_steps >= self.plan.total_steps
            self.stages.begin_step(self.global_steps, self.metrics, self.timing_raw)
            self.profiling.train(self.global_steps)
            with self.timeline.phase("train"):
                batch = self._train(groups)
            self.profiling.end(self.global_steps, self.is_last_step)
            if ends_version := self.ledger.batches_left == 0:
                self._publish()
        self.max_steps_duration = max(self.max_steps_duration, self.timing_raw["step"])
        self._save_if_instance_expires()
        if ends_version or self.is_last_step:
            self._save_and_validate()
        self.stages.measure(batch)
        self.metrics.update(self.step_metrics.of_step(batch, self.metrics, self.timing_raw))
        if self.publishing.is_over:
            self.publishing.finish(self.metrics)
        self.metrics["fully_async/count/restarts"] = self.restarts.begun
        if self.plan.settings.servers.enabled:
            self.metrics.update(self.server_meter.read(self.publisher.told, self.ledger.announced))
        assert self.figures is not None
        self.metrics.update(self.figures.now(self.global_steps))
        self.metrics.update(self.reward_loop_manager.metrics())
        self.logger.log(data=self.metrics, step=self.global_steps)
        self.figures.report(self.metrics)
        return self.metrics

    def _fetched_groups(self) -> list[GroupRun] | None:
        """Return the groups of the next batch with their answers, or None if no further batch can form.

        Answers that were lost with a node are generated again.
        """
        while (groups := self._next_groups()) is not None:
            lost = []
            for group in groups:
                try:
                    group.fetched = ray.get(group.payloads, timeout=self.timeouts.batch_wait)
                except GetTimeoutError:
                    raise
                except RayError as error:
                    logger.error("answers of prompt group %s are lost and generated again: %s", group.group.id, error)
                    lost.append(group.group.id)
            if not lost:
                return groups
            self.running.payloads_lost(lost)
            if self.lending is not None:
                self.lending.again()
        return None

    def _next_groups(self) -> list[GroupRun] | None:
        if self.lending is not None:
            self.lending.wait(self.metrics, self.is_within_version)
        return self.running.take_batch(self.timeouts.batch_wait)

    def _end_without_batch(self) -> None:
        self.profiling.end(self.global_steps + 1, is_last=True)
        if self.stopped_by is None:
            self.is_last_step = True
            self._save_and_validate()
            self.logger.log(data=self.metrics, step=self.global_steps)

    def _save_and_validate(self) -> None:
        """Write a checkpoint if one is due, and validate if a validation is due, each at most once in a step."""
        version = self.ledger.version
        self.save_if_due()
        if self._is_due(self.config.trainer.test_freq) and self._validated_at != self.global_steps:
            self._validated_at = self.global_steps
            self.publishing.finish(self.metrics)
            if self.is_within_version:
                # The run ends after too few steps for a new version. Publish the final weights anyway, so that they
                # can be validated, under the number of the last version.
                self.metrics.update(self.publisher.publish(version))
            self.metrics.update(self._validate_now())

    def _publish(self) -> None:
        """Copy the weights as the next version and send them; with ``publish=inline``, wait until they have arrived."""
        self.publishing.seal(self.metrics, self.timing_raw)
        self.publishing.send(self.metrics, self.timing_raw)

    def _publish_again(self) -> None:
        self.publishing.again(self.is_within_version)

    def _rehearse(self) -> dict[str, float]:
        if not rehearses(self.config, self.plan.settings.async_training):
            return {}
        self.rehearsal = Rehearsal.of(self, self.publisher)
        if self.publisher.replicas:
            self.rehearsal.run()
        if self.hybrid is not None:
            HybridRehearsal.of(self, self.hybrid, self.rehearsal.result).run()
        return self.rehearsal.result.metrics()

    def _validate_now(self) -> dict[str, float]:
        """Validate the published weights on the replicas. Meanwhile standalone replicas also generate for training."""
        with (
            self.timeline.phase("validate"),
            marked_timer("testing", self.timing_raw, color="green"),
            nullcontext() if self.lending is None else self.lending.validating(),
            self.async_rollout_manager.validation(self.timeouts.batch_wait),
        ):
            slots = self.running.manager.slots or self.plan.max_concurrent_trajectories
            self.async_rollout_manager.validation_slots = slots
            metrics = self.stages.validate(self.global_steps, self.trackers and self.trackers.generations)
        self.validation["failed"] = (self.validation.get("failed") or 0) + metrics["val-aux/num_failed"]
        scores = [value for key, value in metrics.items() if key.startswith("val-core/") and "/mean@" in key]
        score = float(sum(scores) / len(scores)) if scores else None
        note_validation(metrics, self.alarms)
        if self.validation["first"] is None:
            self.validation["first"] = score
        self.validation["last"] = score
        return metrics

    def live(self) -> dict[str, Any]:
        """Return the current metrics, and what trainer and rollout are doing. Any thread may call this method."""
        return {TRAINER_DOES: Class.START_UP} if self.figures is None else self.figures.live(self.global_steps)

    def account(self) -> dict[str, Any]:
        """Return a summary of the run so far, with the keys of ``summary.json`` (docs/run-record.md).

        Once the event record is closed, the summary includes a description of the record.
        """
        counts = self.ledger.counts() if self.scheduler is None else self.scheduler.counts()
        rollout = {} if self.scheduler is None else self.scheduler.metrics()
        staleness, alarms = self.ledger.staleness, self.alarms.counts
        return {
            "steps": self.global_steps,
            "versions": self.ledger.version,
            "stopped_by": self.stopped_by,
            "resumed": dict(self.saved.resumed),
            "validation": dict(self.validation),
            "ledger": {name: getattr(counts, name) for name in LEDGER_COUNTS},
            "staleness": {"bound": self.plan.max_staleness, "max": staleness.max, "mean": staleness.mean},
            "alarms": self.alarms.summary(),
            "skipped_updates": alarms.get("skipped_updates", 0) + alarms.get("critic_skipped_updates", 0),
            "unchanged_versions": alarms.get("unchanged_weights", 0),
            "interrupted": rollout.get("fully_async/partial/interrupted_trajectories", 0),
            "trainer_wait_share": self.timeline.trainer_wait_share,
            "rollout_idle_share": rollout.get("fully_async/rollouter/idle_share"),
            "weight_sync_seconds": sum(publisher.seconds for publisher in self.publishers()),
            "rehearsal": None if self.rehearsal is None else self.rehearsal.result.summary(),
            RECORDED: self.record.recorded,
        }

    def end_recording(self, failed: bool = False) -> None:
        """End generation, and complete and close the event record."""
        self.record.end(self.scheduler, failed)

    def close(self, timeout_s: float = 30.0) -> None:
        """Stop the scheduler, and the thread that writes answers to disk."""
        if self.scheduler is not None:
            self.scheduler.stop(timeout_s)
        if self.teachers is not None:
            self.teachers.stop()
        self.stages.close()

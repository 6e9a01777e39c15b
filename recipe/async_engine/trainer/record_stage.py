# SPDX-License-Identifier: Apache-2.0
"""What the run's record of events has of the trainer, and the account that is made of it at the end.

Contract: verl's calls of its worker groups are phases of the timeline, in which the trainer's accelerators compute;
within a step everything else is the driver's own work, for which they wait. The ranks of a call count as one; the part
of it that they wait for the slowest one, in the mean, is told apart where a rank can say (`collectives`). With
``async_training.events=false`` nothing is
recorded and there is no account. Shown by tests/integration/test_recording.py and tests/e2e/accounts.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from omegaconf import OmegaConf
from verl import DataProto

from recipe.async_engine.core.account import NO_TOKENS, Devices, TokenBooks
from recipe.async_engine.core.event_context import SCORES
from recipe.async_engine.core.events import (
    AGENTS,
    LOG_PROBS,
    RANKS,
    ROLLOUT,
    SCHEDULER,
    TOKENS,
    TRAINER,
    WEIGHTS,
    Event,
    Tell,
    ignore,
)
from recipe.async_engine.core.timeline import Timeline
from recipe.async_engine.logprobs.sources import LogProbSource
from recipe.async_engine.rollout.scheduler import RolloutScheduler
from recipe.async_engine.settings.log_prob_servers import Proximal
from recipe.async_engine.settings.plan import RunPlan, replica_size
from recipe.async_engine.settings.sections import SHARED
from recipe.async_engine.trainer.batch import token_ages
from recipe.async_engine.trainer.collectives import mean_wait
from recipe.async_engine.trainer.recording import Recording
from recipe.async_engine.trainer.staged import StagedTrainer
from recipe.async_engine.weights.replica_set import generates

logger = logging.getLogger(__name__)

UPDATE, COMPUTE = "update", "log_probs"
BOOKS_S, BOOKS_OF_A_FAILED_RUN_S = 20.0, 4.0


class RecordStage(StagedTrainer):
    """See the module's contract."""

    timeline: Timeline
    scheduler: RolloutScheduler | None
    references: Sequence[Any]
    recording: Recording | None = None
    _spent: Sequence[float] | None = None
    _tell: Tell = staticmethod(ignore)

    def _begin_recording(self) -> None:
        """From now on what happens is recorded, if it is to be."""
        if not self.plan.settings.async_training.events:
            return
        devices = _devices(self.config, self.plan)
        folder, header = self.config.trainer.default_local_dir, {"settings": _advised(self.config, self.plan)}
        try:
            self.recording = Recording(folder, devices, header, self._recorded)
        except OSError as error:
            logger.error("there is no record of events, the run goes on: %s", error)
            return
        self.recording.follow(TRAINER, self.timeline.lane)
        self._tell = self.recording.tell

    def _record_scheduler(self, scheduler: RolloutScheduler) -> None:
        if self.recording is not None:
            self.recording.follow(SCHEDULER, scheduler.lane)
            self.recording.ask()

    def _recorded(self) -> Mapping[str, Any]:
        """Servers and agent-loop workers, which are asked what they did, by the names of their lanes."""
        if not self.is_up:
            return {}
        replicas = [*self.publisher.replicas, *self.references]
        servers = {
            f"{ROLLOUT if generates(replica) else LOG_PROBS} {replica.replica_rank}": replica.server_handle
            for replica in replicas
        }
        workers = self.async_rollout_manager.agent_loop_workers
        return servers | {f"{AGENTS} {number}": worker for number, worker in enumerate(workers)}

    def end_recording(self, failed: bool = False) -> None:
        """End generation and make the account; what goes wrong with it is logged and costs the account alone."""
        if self.recording is None or self.recording.account is not None:
            return
        self.timeline.stop()
        tokens: TokenBooks | None = NO_TOKENS
        try:
            if self.scheduler is not None:
                within = BOOKS_OF_A_FAILED_RUN_S if failed else BOOKS_S
                tokens = self.scheduler.close_books(self.recording.engine_tokens, within)
        except Exception as error:  # of whatever part does not answer
            logger.error("nobody can say what became of the tokens: %s", error)
            tokens = None
        try:
            account = self.recording.close(self.timeline.end, tokens)
        except Exception:
            logger.exception("there is no account of the run")
            return
        if not account.closes:
            logger.warning("the account of the run does not close: %s", account.summary())

    @contextmanager
    def _during(self, what: str, version: int) -> Iterator[None]:
        """A part of bringing a version to the replicas."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._tell(Event(WEIGHTS, what, began, time.monotonic(), version=version))

    def _record_ages(self, batch: DataProto) -> None:
        """How many tokens of the batch are how old."""
        if self.recording is None:
            return
        now, version = time.monotonic(), self.ledger.version
        for age, count in token_ages(batch, version).items():
            self._tell(Event(TOKENS, str(age), now, now, version=version, tokens=count))

    def _compute_values(self, batch: DataProto) -> DataProto:
        with self.timeline.phase(COMPUTE):
            return super()._compute_values(batch)

    def _compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        with self.timeline.phase(COMPUTE):
            return super()._compute_ref_log_prob(batch)

    def _compute_old_log_prob(self, batch: DataProto) -> Any:
        with self.timeline.phase(COMPUTE), self._ranks_compared():
            return super()._compute_old_log_prob(batch)

    def _update_critic(self, batch: DataProto) -> DataProto:
        with self.timeline.phase(UPDATE):
            return super()._update_critic(batch)

    def _update_actor(self, batch: DataProto) -> DataProto:
        with self.timeline.phase(UPDATE), self._ranks_compared():
            return super()._update_actor(batch)

    @contextmanager
    def _ranks_compared(self) -> Iterator[None]:
        """A call of the actor's ranks, of which each may wait for the slowest one."""
        began = time.monotonic()
        yield
        if self.recording is None or self.plan.trainer_ranks < 2:
            return
        ended = time.monotonic()
        spent = self.actor_rollout_wg.collective_seconds()
        if None in spent:
            return
        before, self._spent = self._spent or [0.0] * len(spent), spent
        wait = mean_wait([now - then for now, then in zip(spent, before, strict=True)])
        self._tell(Event(RANKS, "wait", began, ended, min(1.0, wait / (ended - began))))

    def _while_scored(self, source: LogProbSource) -> LogProbSource:
        """A source of log-probs; the trainer waits for its servers while it is asked."""
        if self.plan.proximal is not Proximal.SERVER:
            return source

        def scored(batch: DataProto, version: int) -> dict[str, float]:
            with self.timeline.phase(SCORES):
                return source(batch, version)

        return scored


def _devices(config: Any, plan: RunPlan) -> Devices:
    sizes = {
        TRAINER: plan.trainer_ranks,
        ROLLOUT: replica_size(OmegaConf.to_container(config)),
        LOG_PROBS: plan.settings.servers.ranks,
    }
    return Devices(sizes, shared=plan.settings.async_training.placement == SHARED)


def _advised(config: Any, plan: RunPlan) -> dict[str, Any]:
    """What the report's advice may name, as it was in this run."""
    training = plan.settings.async_training
    return {
        "max_staleness": plan.max_staleness,
        "pipeline_depth": plan.pipeline_depth,
        "concurrent_samples_per_replica": training.concurrent_samples_per_replica,
        "trigger_parameter_sync_step": training.trigger_parameter_sync_step,
        "max_concurrent_trajectories": plan.max_concurrent_trajectories,
        "engine_places": plan.engine_places,
        "max_num_seqs": OmegaConf.select(config, "actor_rollout_ref.rollout.max_num_seqs"),
        "trainer_ranks": plan.trainer_ranks,
        "rollout_replicas": plan.rollout_replicas,
        "publish": plan.settings.weights.publish,
        "at_swap": plan.settings.weights.at_swap,
        "staging": plan.settings.weights.staging,
        "reward_processes": training.reward_processes,
        "whole_batches": training.whole_batches,
    }

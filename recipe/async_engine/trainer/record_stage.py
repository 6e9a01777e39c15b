# SPDX-License-Identifier: Apache-2.0
"""Starts and ends the event record of a run, and adds the trainer's events to it.

Contract: during a step, the trainer's accelerators count as computing while verl calls a worker group, and as waiting
otherwise. All ranks together count as one device. With ``async_training.events=false`` nothing is recorded. Shown by
tests/integration/test_recording.py and tests/accounts.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from omegaconf import OmegaConf
from verl import DataProto
from verl.workers.rollout.replica import RolloutReplica

from recipe.async_engine.config.plan import RunPlan, replica_size
from recipe.async_engine.config.sections import SHARED
from recipe.async_engine.core.deadlines import BOOKS_OF_A_FAILED_RUN_S, BOOKS_S
from recipe.async_engine.record.events import (
    AGENTS,
    LOG_PROBS,
    NO_TOKENS,
    ROLLOUT,
    SCHEDULER,
    TOKENS,
    TRAINER,
    Devices,
    Event,
    Recorded,
    TokenBooks,
)
from recipe.async_engine.record.timeline import Timeline
from recipe.async_engine.rollout.scheduler import RolloutScheduler
from recipe.async_engine.trainer.batch import token_ages
from recipe.async_engine.trainer.recording import Recording
from recipe.async_engine.weights.replica_set import generates

logger = logging.getLogger(__name__)

UPDATE, COMPUTE = "update", "log_probs"


class RecordStage:
    """The event record of a run, from the launch to the end.

    It includes the activity of the rollout replicas and log-prob servers that ``replicas`` returns, and of the
    agent-loop workers that ``agents`` returns.
    """

    def __init__(
        self,
        config: Any,
        plan: RunPlan,
        timeline: Timeline,
        replicas: Callable[[], Iterable[RolloutReplica]],
        agents: Callable[[], Iterable[Any]],
    ) -> None:
        self._timeline = timeline
        self._recording: Recording | None = None
        if not plan.settings.async_training.events:
            return

        def parts() -> dict[str, Any]:
            servers = {
                f"{ROLLOUT if generates(replica) else LOG_PROBS} {replica.replica_rank}": replica.server_handle
                for replica in replicas()
            }
            return servers | {f"{AGENTS} {number}": worker for number, worker in enumerate(agents())}

        try:
            self._recording = Recording(
                config.trainer.default_local_dir, _devices(config, plan), {"settings": _advised(config, plan)}, parts
            )
        except OSError as error:
            logger.error("the run continues without an event record: %s", error)
            return
        self._recording.follow(TRAINER, timeline.lane)
        self._recording.follow(SCHEDULER, timeline.rollout.lane)
        timeline.listener = self._recording.tell

    def ask(self) -> None:
        """Begin to record the activity of servers and agent-loop workers."""
        if self._recording is not None:
            self._recording.ask()

    def end(self, scheduler: RolloutScheduler | None, failed: bool) -> None:
        """End generation and close the event record. If this fails, the run lacks only token counts or time account."""
        if self._recording is None or self._recording.recorded is not None:
            return
        self._timeline.stop()
        tokens: TokenBooks | None = NO_TOKENS
        try:
            if scheduler is not None:
                within = BOOKS_OF_A_FAILED_RUN_S if failed else BOOKS_S
                tokens = scheduler.close_books(self._recording.engine_tokens, within)
        except Exception as error:  # any process may fail to answer
            logger.error("the token counts of the run are not known: %s", error)
            tokens = None
        try:
            self._recording.close(self._timeline.end, tokens)
        except Exception:
            logger.exception("the event record is incomplete, so the run has no time account")

    @property
    def recorded(self) -> Recorded | None:
        """A description of the event record, or None if there is no record or it is still open."""
        return None if self._recording is None else self._recording.recorded

    def ages(self, batch: DataProto, version: int) -> None:
        """Record how many versions old each token of a batch is when the batch is trained at ``version``."""
        if self._recording is None:
            return
        now = time.monotonic()
        for age, count in token_ages(batch, version).items():
            self._timeline.tell(Event(TOKENS, str(age), now, now, version=version, tokens=count))


def _devices(config: Any, plan: RunPlan) -> Devices:
    sizes = {
        TRAINER: plan.trainer_ranks,
        ROLLOUT: replica_size(OmegaConf.to_container(config)),
        LOG_PROBS: plan.settings.servers.ranks,
    }
    shared = plan.settings.async_training.placement == SHARED
    return Devices(sizes, shared, 0 if shared else plan.hybrid_replicas)


def _advised(config: Any, plan: RunPlan) -> dict[str, Any]:
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
        "reward_workers": OmegaConf.select(config, "reward.num_workers"),
        "whole_batches": training.whole_batches,
    }

# SPDX-License-Identifier: Apache-2.0
"""Publishes the trainer's weights as the next version.

Contract: first a version is sealed, which means that the trainer's weights are copied. Then the replicas stage
the version and swap it in, the ledger announces it, and the replicas resume generation. Meanwhile training continues or
waits (``async_training.weights.publish``). Only one version is transferred at a time, and a version is announced while
no replica generates. Shown by tests/e2e/test_fully_async.py, test_swaps.py and test_faults.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from verl.utils.debug import marked_timer

from recipe.async_engine.config.plan import RunPlan
from recipe.async_engine.core.alarms import Alarms, UnchangedWeights
from recipe.async_engine.record.timeline import Timeline
from recipe.async_engine.rollout.scheduler import RolloutScheduler
from recipe.async_engine.trainer.actor_worker import PublishedWeights
from recipe.async_engine.trainer.beside import Beside
from recipe.async_engine.weights.publisher import ATTEMPTS, PublishFailed, WeightPublisher

Metrics = dict[str, Any]
Timing = dict[str, float]

PAUSED = "fully_async/weight_sync/trainer_paused_seconds"


class PublishStage:
    """Publishes versions. The trainer's thread calls the methods, and passes the metrics and timing of its step.

    Args:
        published: the trainer's copy of the weights that were published last.
        unchanged: detects a version with the same weights as the version before, which is reported to ``alarms``.
        timeline: receives the phases of a publication.
        fail: a function that is called, on another thread, with the error of a failed publication.
    """

    def __init__(
        self,
        plan: RunPlan,
        scheduler: RolloutScheduler,
        publisher: WeightPublisher,
        published: PublishedWeights,
        unchanged: UnchangedWeights,
        alarms: Alarms,
        timeline: Timeline,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._plan, self._scheduler, self._publisher = plan, scheduler, publisher
        self._published, self._unchanged, self._alarms = published, unchanged, alarms
        self._timeline = timeline
        self._drains = plan.settings.weights.at_swap == "drain"
        training = plan.settings.async_training
        # A trajectory may fail at its deadline while the engines drain, and is then tried again, so allow for all
        # tries.
        self._drain_s = (1 + training.max_group_retries) * training.timeouts.trajectory
        self._places_each, self._live_at_first = plan.engine_places // plan.rollout_replicas, plan.rollout_replicas
        self._live = plan.rollout_replicas
        self._way = self._new_way(fail)

    def _new_way(self, fail: Callable[[BaseException], None]) -> Beside[dict[str, float]]:
        # A publication has 4 + `ATTEMPTS` steps, each with the deadline ``weight_sync``: a check of which replicas are
        # alive, at most `ATTEMPTS` transfers, the pause, the swap and the resumption.
        timeouts, parts = self._plan.settings.async_training.timeouts, 4 + ATTEMPTS
        setting = f"{parts} times async_training.timeouts.weight_sync={timeouts.weight_sync:g}"
        seconds = parts * timeouts.weight_sync
        if self._drains:
            setting += f" and {self._drain_s:g} s by timeouts.trajectory and max_group_retries"
            seconds += self._drain_s

        def late(version: int) -> PublishFailed:
            return PublishFailed(f"version {version} was not announced within {seconds:g} s ({setting})")

        return Beside("publication", seconds, late, fail)

    @property
    def is_over(self) -> bool:
        """Whether a publication was begun and has ended or exceeded its deadline. `finish` then does not block."""
        return self._way.is_over

    def seal(self, metrics: Metrics, timing: Timing) -> None:
        """Copy the trainer's weights as the next version, so that training can continue from them."""
        with self._paused(metrics, timing):
            self.finish(metrics)
            version = self._scheduler.ledger.version + 1
            self._publisher.snapshot(version)
            self._unchanged.seal(version)
            self._published.keep()
            self._scheduler.version_sealed()

    def send(self, metrics: Metrics, timing: Timing) -> None:
        """Begin to send the sealed version to the replicas, and wait for the end if weights are published inline."""
        version = self._scheduler.ledger.version
        with self._paused(metrics, timing):
            self._way.begin(version, lambda: self._bring(version))
            if self._publisher.weights.publish == "inline":
                self.finish(metrics)

    def finish(self, metrics: Metrics) -> None:
        """Wait until the replicas generate with the last sealed version; raise PublishFailed on failure or lateness."""
        with self._timeline.phase("sync"):
            arrived = self._way.wait()
        if arrived and self._publisher.known.records:
            self.arrived(metrics, arrived, self._publisher.checksum)

    def arrived(self, metrics: Metrics, of_sync: Metrics, checksum: str | None) -> None:
        """Record that replicas hold the announced version, whose weights have this ``checksum``.

        ``of_sync`` has the metrics of the weight sync, which are added to ``metrics``. If the weights should have
        changed since the last version but did not, this is reported to the alarms.
        """
        unchanged = self._unchanged.published(self._scheduler.ledger.announced, checksum)
        if unchanged is not None:
            self._alarms.note("unchanged_weights", unchanged)
        metrics |= {**of_sync, "fully_async/weight_sync/unchanged": int(bool(unchanged))}

    def again(self, is_within_version: bool) -> None:
        """Publish the ledger's version when the run begins: the initial weights, or the weights of a checkpoint.

        ``is_within_version`` says that batches were trained between the last publication and the checkpoint. In this
        case the checkpoint's copy of the published weights is sent.
        """
        version = self._scheduler.ledger.version
        with self._published.in_use() if is_within_version else nullcontext():
            self._publisher.publish(version)
        self._unchanged.published(version, self._publisher.checksum)
        if not is_within_version:
            self._published.keep()

    @contextmanager
    def _paused(self, metrics: Metrics, timing: Timing) -> Iterator[None]:
        """Add the duration of the ``with`` block to the time for which publications pause training."""
        with self._timeline.phase("sync"), marked_timer("update_weights", timing, color="red"):
            began = time.monotonic()
            yield
            metrics[PAUSED] = metrics.get(PAUSED, 0.0) + time.monotonic() - began

    def _bring(self, version: int) -> dict[str, float]:
        """Send a sealed version to the replicas, announce it, and return the metrics of the weight sync."""
        self._timeline.note("a version is sealed")
        with self._timeline.during("stage", version):
            staged = self._publisher.stage(version)
        if self._drains:
            fill = self._plan.settings.async_training.whole_batches
            with self._timeline.during("drain", version):
                self._scheduler.pause_until_drained(self._drain_s, fill)
        with self._timeline.during("swap", version):
            self._publisher.swap(staged)
        # No replica generates at this point, so every group that starts from now on starts with the new version.
        self._scheduler.version_announced()
        with self._timeline.during("resume", version):
            metrics = self._publisher.resume(staged)
        self._use_live_places()
        if self._drains:
            self._scheduler.end_drain()
        self._timeline.note("a version is announced")
        return metrics

    def _use_live_places(self) -> None:
        """Have the scheduler use the sequence slots of the replicas that are alive, if their number has changed."""
        live = self._publisher.live_replicas
        if live != self._live and self._publisher.known.records:
            self._live = live
            timeout_s = self._plan.settings.async_training.timeouts.trajectory
            self._scheduler.use_places(self._places_each * live, live / self._live_at_first, timeout_s)

# SPDX-License-Identifier: Apache-2.0
"""Publishes the trainer's weights as the next version.

Contract: first a version is *sealed*: the trainer's weights become this version, and are copied. Then the replicas
stage the copy and swap it in, the ledger announces the version (so that new groups start with it), and the replicas
resume generation. Meanwhile training continues or waits (``async_training.weights.publish``). Only one version is
transferred at a time, and a version is announced while no replica generates. Shown by tests/e2e/test_fully_async.py,
test_swaps.py and test_faults.py.
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
        unchanged: detects that a version has the same weights as the version before; ``alarms`` is then told.
        timeline: records the phases of a publication.
        fail: called, on another thread, with the error if a publication fails.
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
        # While the engines drain, a trajectory may fail at its deadline and be tried again, so allow time for all
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
        """Whether there is a publication that has ended or exceeded its deadline, so that `finish` does not block."""
        return self._way.is_over

    def seal(self, metrics: Metrics, timing: Timing) -> None:
        """Make the trainer's present weights the next version, and copy them, so that training may change them."""
        with self._paused(metrics, timing):
            self.finish(metrics)
            version = self._scheduler.ledger.version + 1
            self._publisher.snapshot(version)
            self._unchanged.seal(version)
            self._published.keep()
            self._scheduler.version_sealed()

    def send(self, metrics: Metrics, timing: Timing) -> None:
        """Begin to send the version that `seal` made last; with ``publish=inline``, wait until the replicas have it."""
        version = self._scheduler.ledger.version
        with self._paused(metrics, timing):
            self._way.begin(version, lambda: self._bring(version))
            if self._publisher.weights.publish == "inline":
                self.finish(metrics)

    def finish(self, metrics: Metrics) -> None:
        """Wait until the replicas generate with the version that is being sent; raise PublishFailed if that fails."""
        with self._timeline.phase("sync"):
            arrived = self._way.wait()
        if arrived and self._publisher.known.records:
            self.arrived(metrics, arrived, self._publisher.checksum)

    def arrived(self, metrics: Metrics, of_sync: Metrics, checksum: str | None) -> None:
        """Record that the replicas have the announced version. ``checksum`` is that of its weights.

        ``of_sync`` are the metrics of the weight sync, which are added to ``metrics``. If the weights should have
        changed since the version before but did not, the alarms are told.
        """
        unchanged = self._unchanged.published(self._scheduler.ledger.announced, checksum)
        if unchanged is not None:
            self._alarms.note("unchanged_weights", unchanged)
        metrics |= {**of_sync, "fully_async/weight_sync/unchanged": int(bool(unchanged))}

    def again(self, is_within_version: bool) -> None:
        """When the run begins, send the ledger's version to the replicas: initial weights, or those of a checkpoint.

        ``is_within_version`` says whether batches were trained between the last publication and the checkpoint. If so,
        the copy of the published weights that the checkpoint contains is sent, not the trained weights.
        """
        version = self._scheduler.ledger.version
        with self._published.in_use() if is_within_version else nullcontext():
            self._publisher.publish(version)
        self._unchanged.published(version, self._publisher.checksum)
        if not is_within_version:
            self._published.keep()

    @contextmanager
    def _paused(self, metrics: Metrics, timing: Timing) -> Iterator[None]:
        """Add the duration of the ``with`` block to the step's metric `PAUSED` (training waits for a publication)."""
        with self._timeline.phase("sync"), marked_timer("update_weights", timing, color="red"):
            began = time.monotonic()
            yield
            metrics[PAUSED] = metrics.get(PAUSED, 0.0) + time.monotonic() - began

    def _bring(self, version: int) -> dict[str, float]:
        """Send the copy of ``version`` to the replicas, announce the version, and return metrics of the weight sync."""
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

# SPDX-License-Identifier: Apache-2.0
"""Lends the trainer's accelerators to hybrid replicas while the trainer waits for a batch (``placement=elastic``).

Contract: hybrid replicas are on the trainer's accelerators and sleep while it trains, saves or publishes. While the
trainer waits, the lending policy (`recipe.async_engine.core.lending`) decides when they wake and when they go back to
sleep. They wake with the announced version, which each trainer rank passes to the engine beside it, and only after a
publication under way is complete. Then the load balancer routes to them, and more trajectories may run. Before they
sleep, they leave routing; their unfinished answers are interrupted, keep their tokens, and continue on the standalone
replicas. If a hybrid replica dies, its answers continue elsewhere, and the next wake-up first starts it again. If that
is not possible, nothing is lent any more.

Shown by tests/e2e/test_elastic.py and tests/integration/test_hybrid_publisher.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext

from recipe.async_engine.config.plan import RunPlan
from recipe.async_engine.core.lending import Demand, Places
from recipe.async_engine.record.events import SWITCH
from recipe.async_engine.record.timeline import Timeline
from recipe.async_engine.rollout.scheduler import RolloutScheduler
from recipe.async_engine.trainer.actor_worker import PublishedWeights
from recipe.async_engine.weights.hybrid_publisher import CannotRestart, HybridPublisher
from recipe.async_engine.weights.publisher import NoReplicaLeft, WeightPublisher

logger = logging.getLogger(__name__)

TAKE, LEND = "take", "lend"


class LendingStage:
    """Decides with the lending policy whether to wait for a batch with or without hybrid replicas.

    Args:
        scheduler: tells what the trainer needs and how many trajectories wait, and has the policy's measurements.
        hybrid: wakes the hybrid replicas and puts them to sleep.
        standalone: sends weights to the standalone replicas.
        published: the trainer's copy of the published weights, for lending within a version.
        timeline: receives the phase `SWITCH`.
    """

    def __init__(
        self,
        plan: RunPlan,
        scheduler: RolloutScheduler,
        hybrid: HybridPublisher,
        standalone: WeightPublisher,
        published: PublishedWeights,
        timeline: Timeline,
    ) -> None:
        self._scheduler, self._hybrid, self._standalone = scheduler, hybrid, standalone
        self._published, self._timeline = published, timeline
        self._policy = scheduler.lending
        self._at_each = plan.engine_places // plan.rollout_replicas
        self._at_first = plan.rollout_replicas
        self._is_awake = self._is_over = False
        self._taken_at: float | None = None
        self._switches, self._lent_s = 0, 0.0

    def wait(self, timeout_s: float, is_within_version: bool, finish: Callable[[], None]) -> None:
        """Wait until a batch may be taken or no further batch can form, and lend accelerators meanwhile if that helps.

        Args:
            timeout_s: deadline of each wait, in seconds.
            is_within_version: whether the trainer's weights are newer than the announced ones.
            finish: a function that waits for the end of a publication.
        """
        asked = time.monotonic()
        if self._taken_at is not None:
            self._policy.train_s.add(asked - self._taken_at)
        while self._scheduler.wait_for(self._decide, timeout_s) == LEND:
            finish()
            if self._lend(is_within_version):
                self._scheduler.wait_for(lambda: TAKE if self._policy.calls_back(*self._view()) else None, timeout_s)
                self._call_back()
        self._taken_at = time.monotonic()

    def again(self) -> None:
        """Do not count the time since the last batch as training, because answers of that batch were lost."""
        self._taken_at = None

    def metrics(self) -> dict[str, float]:
        """Return the number of switches and the seconds lent since the run began, and the mean seconds of a switch."""
        return {
            "fully_async/lending/switches": self._switches,
            "fully_async/lending/lent_seconds": self._lent_s,
            "fully_async/lending/wake_seconds": self._policy.wake_s.value or 0.0,
            "fully_async/lending/sleep_seconds": self._policy.sleep_s.value or 0.0,
        }

    def _decide(self) -> str | None:
        places, demand = self._view()
        if demand.may_take:
            return TAKE
        ledger = self._scheduler.ledger
        if self._is_over or ledger.version > ledger.announced:
            # A version is being published. Its announcement calls this function again.
            return None
        return LEND if self._policy.lends(places, demand) else None

    def _view(self) -> tuple[Places, Demand]:
        demand, running, waiting = self._scheduler.demand()
        free = self._scheduler.manager.slots - running
        alone, more = self._places_of(self._standalone), self._places_of(self._hybrid)
        taken = min(running, alone + more) * more // (alone + more) if self._is_awake and more else 0
        if not self._is_awake:
            more = self._at_each * len(self._hybrid.replicas)
        return Places(alone, more, max(0, waiting - free), taken), demand

    def _places_of(self, publisher: WeightPublisher) -> int:
        return self._at_each * publisher.live_replicas

    def _lend(self, is_within_version: bool) -> bool:
        """Wake the hybrid replicas, and return whether any of them generates."""
        began, restarts = time.monotonic(), self._hybrid.restarts
        with self._timeline.phase(SWITCH):
            try:
                with self._published.in_use() if is_within_version else nullcontext():
                    self._hybrid.wake(self._scheduler.ledger.announced)
            except (NoReplicaLeft, CannotRestart) as error:
                logger.error("the trainer's accelerators are not lent any more: %s", error)
                self._is_over = True
                if self._hybrid.is_awake:
                    self._hybrid.sleep()
                return False
            self._is_awake = True
            self._use_places()
            self._hybrid.spread(self._standalone.serving)
        self._woken_at = time.monotonic()
        self._switches += 1
        if self._hybrid.restarts == restarts:
            self._policy.woke(self._woken_at - began)
        return True

    def _call_back(self) -> None:
        began = time.monotonic()
        self._lent_s += began - self._woken_at
        with self._timeline.phase(SWITCH):
            self._is_awake = False
            self._use_places()
            self._hybrid.sleep()
        self._policy.sleep_s.add(time.monotonic() - began)

    def _use_places(self) -> None:
        live = self._standalone.live_replicas + (self._hybrid.live_replicas if self._is_awake else 0)
        self._scheduler.use_places(self._at_each * live, live / self._at_first)

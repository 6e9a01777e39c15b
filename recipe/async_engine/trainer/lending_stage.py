# SPDX-License-Identifier: Apache-2.0
"""Lends the trainer's accelerators to hybrid replicas while the trainer waits for a batch.

Contract: hybrid replicas are on the trainer's accelerators and sleep while it trains, saves or publishes. While the
trainer waits, the lending policy (`recipe.async_engine.core.lending`) decides when they wake and when they go back to
sleep. They wake with the announced version (the newest one that replicas may generate with), which each trainer rank
passes to the engine on its accelerators. If a publication is under way, they wake only after it is complete. Then they
get requests, and more trajectories may run. Before they sleep, they get no more requests; their unfinished answers are
interrupted, keep their tokens, and continue on the standalone replicas. If a hybrid replica dies, its answers continue
elsewhere, and the replica is started again before the next loan. If it cannot be started, nothing is lent for the rest
of the run.

Without standalone replicas (``placement=shared``), the accelerators are lent whenever there is something to generate,
until a batch may be taken. Such a loan is called a generation turn. Its end interrupts answers, which keep their tokens
and wait for the next turn. If no replica can wake, the run ends. Validation wakes the replicas between two turns.

Shown by tests/e2e/test_elastic.py and test_partial_rollout.py, tests/integration/test_hybrid_publisher.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from typing import Any

from recipe.async_engine.config.plan import RunPlan
from recipe.async_engine.config.sections import SHARED
from recipe.async_engine.core.lending import Demand, Places
from recipe.async_engine.record.events import SWITCH
from recipe.async_engine.record.timeline import Timeline
from recipe.async_engine.rollout.kept_answers import TokenAccount
from recipe.async_engine.rollout.scheduler import RolloutScheduler
from recipe.async_engine.trainer.actor_worker import PublishedWeights
from recipe.async_engine.trainer.publish_stage import PublishStage
from recipe.async_engine.weights.hybrid_publisher import CannotRestart, HybridPublisher
from recipe.async_engine.weights.publisher import NoReplicaLeft, WeightPublisher

logger = logging.getLogger(__name__)

TAKE, LEND = "take", "lend"

INTERRUPT_S = "partial_rollout/interrupt_seconds"
OF_TURNS = (INTERRUPT_S, *(f"partial_rollout/{name}" for name in ("cut_tokens", "lost_tokens", "interrupted_in_tools")))
"""Names of the metrics of a generation turn, a loan with ``placement=shared`` (docs/partial-rollout.md)."""


class LendingStage:
    """Decides with the lending policy whether hybrid replicas generate while the trainer waits for a batch.

    Args:
        scheduler: says what the trainer needs and how many trajectories wait. Its attribute ``lending`` is the policy.
        hybrid: wakes the hybrid replicas and puts them to sleep.
        standalone: sends weights to the standalone replicas, if there are any.
        publishing: publishes versions. At the start of a generation turn, it checks by the checksum of the replicas'
            weights whether the weights have changed.
        published: the trainer's copy of the published weights. A loan begins with this copy if batches have been
            trained since the publication.
        timeline: receives the phase `SWITCH`.
    """

    def __init__(
        self,
        plan: RunPlan,
        scheduler: RolloutScheduler,
        hybrid: HybridPublisher,
        standalone: WeightPublisher,
        publishing: PublishStage,
        published: PublishedWeights,
        timeline: Timeline,
    ) -> None:
        self._scheduler, self._hybrid, self._standalone = scheduler, hybrid, standalone
        self._publishing, self._published, self._timeline = publishing, published, timeline
        self._in_turns = plan.settings.async_training.placement == SHARED
        self._limits = plan.settings.async_training.timeouts
        self._policy = scheduler.lending
        self._at_each = plan.engine_places // plan.rollout_replicas
        self._at_first = plan.rollout_replicas
        self._is_awake = self._is_over = False
        self._taken_at: float | None = None
        self._switches, self._lent_s = 0, 0.0
        self._of_turns = dict.fromkeys(OF_TURNS, 0.0) if self._in_turns else {}

    def begin(self) -> None:
        """Tell the scheduler how many sequence slots the engines have at the beginning, when hybrid replicas sleep."""
        self._use_places()

    def wait(self, metrics: dict[str, Any], is_within_version: bool) -> None:
        """Wait until a batch may be taken or no further batch can form.

        During the wait, hybrid replicas generate whenever the lending policy decides so.

        Args:
            metrics: the metrics of the step, to which those of lending are added.
            is_within_version: whether batches have been trained since the last version was published.
        """
        asked, timeout_s = time.monotonic(), self._limits.batch_wait
        self._of_turns |= {INTERRUPT_S: 0.0} if self._in_turns else {}
        if self._taken_at is not None:
            self._policy.train_s.add(asked - self._taken_at)
        while self._scheduler.wait_for(self._decide, timeout_s) == LEND:
            self._publishing.finish(metrics)
            if self._lend(metrics, is_within_version):
                self._scheduler.wait_for(self._decide_on_return, timeout_s)
                self._call_back()
        self._taken_at = time.monotonic()
        metrics.update(self.metrics())

    def again(self) -> None:
        """Do not count the time since the last batch as training, because answers of that batch were lost."""
        self._taken_at = None

    def metrics(self) -> dict[str, float]:
        """Return metrics of all loans since the launch of the run and, if there are turns, of the last generation turn.

        ``switches`` is the number of loans. ``wake_seconds`` and ``sleep_seconds`` are moving averages of the time that
        the hybrid replicas take to wake and to go to sleep.
        """
        return {
            "fully_async/lending/switches": self._switches,
            "fully_async/lending/lent_seconds": self._lent_s,
            "fully_async/lending/wake_seconds": self._policy.wake_s.value or 0.0,
            "fully_async/lending/sleep_seconds": self._policy.sleep_s.value or 0.0,
            **self._of_turns,
        }

    def _decide(self) -> str | None:
        places, demand = self._view()
        if demand.may_take:
            return TAKE
        ledger = self._scheduler.ledger
        if self._is_over or ledger.version > ledger.announced:
            # Either nothing is lent for the rest of the run, or a version is being published. In the latter case, this
            # function is called again when the version is announced.
            return None
        return LEND if self._policy.lends(places, demand) else None

    def _decide_on_return(self) -> str | None:
        places, demand = self._view()
        is_over = demand.may_take if self._in_turns else self._policy.calls_back(places, demand)
        return TAKE if is_over else None

    @contextmanager
    def validating(self) -> Iterator[None]:
        """Make sure that replicas are awake inside the ``with`` block, to generate for a validation.

        Without standalone replicas, the hybrid replicas wake with the trainer's weights, and sleep again after the
        block. Training answers that the last generation turn left unfinished continue in the next turn, not here.
        """
        if not self._in_turns:
            yield
            return
        self._hybrid.wake(self._scheduler.ledger.announced)
        try:
            yield
        finally:
            self._hybrid.sleep()

    def _view(self) -> tuple[Places, Demand]:
        more = self._hybrid.live_replicas if self._is_awake else len(self._hybrid.replicas)
        alone = self._standalone.live_replicas
        return self._scheduler.look(self._at_each * alone, self._at_each * more, self._is_awake)

    def _lend(self, metrics: dict[str, Any], is_within_version: bool) -> bool:
        """Wake the hybrid replicas, and return whether this succeeded for any of them."""
        began, restarts = time.monotonic(), self._hybrid.restarts.begun
        with self._timeline.phase(SWITCH):
            try:
                with self._published.in_use() if is_within_version else nullcontext():
                    arrived = self._hybrid.wake(self._scheduler.ledger.announced)
            except (NoReplicaLeft, CannotRestart) as error:
                if self._in_turns:
                    raise
                logger.error("the trainer's accelerators are not lent any more: %s", error)
                self._is_over = True
                if isinstance(error, NoReplicaLeft):
                    # No replica can generate, but the weight sync has made the engines allocate their memory again.
                    # Put them to sleep, because the trainer needs this memory.
                    self._hybrid.sleep()
                return False
            self._is_awake = True
            self._use_places()
            if self._in_turns:
                self._publishing.arrived(metrics, arrived, self._hybrid.checksum)
            else:
                self._hybrid.spread(self._standalone.serving)
        self._woken_at = time.monotonic()
        self._switches += 1
        if self._hybrid.restarts.begun == restarts:
            self._policy.woke(self._woken_at - began)
        return True

    def _call_back(self) -> None:
        began = time.monotonic()
        self._lent_s += began - self._woken_at
        with self._timeline.phase(SWITCH):
            self._is_awake = False
            held = self._use_places()
            seconds = self._hybrid.sleep(others_serve=held is None)
        if held is not None:
            workers = held.result(self._limits.trajectory)
            account = self._scheduler.tokens + workers
            values = seconds, account.cut, account.lost, workers.in_tools
            self._of_turns = dict(zip(OF_TURNS, values, strict=True))
        self._policy.sleep_s.add(time.monotonic() - began)

    def _use_places(self) -> Future[TokenAccount] | None:
        live = self._standalone.live_replicas + (self._hybrid.live_replicas if self._is_awake else 0)
        return self._scheduler.use_places(self._at_each * live, live / self._at_first, self._limits.trajectory)

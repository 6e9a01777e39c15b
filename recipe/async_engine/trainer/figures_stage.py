# SPDX-License-Identifier: Apache-2.0
"""The figures of now that a run is watched by: for the main's terminal, the trackers, and Prometheus.

Contract: they may be asked for at any moment, on a thread of its own, and wait for no stage of the trainer. What Ray's
exporter has is what was told last, by whoever asked. Shown by tests/integration/test_exported.py and tests/e2e.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from recipe.async_engine.core.events import Class
from recipe.async_engine.core.figures import EXPORTED, ROLLOUT_DOES, SERVERS, SHARE, STEP, TRAINER_DOES
from recipe.async_engine.core.timeline import Timeline
from recipe.async_engine.rollout.scheduler import RolloutScheduler
from recipe.async_engine.trainer.exported import PrometheusExporter
from recipe.async_engine.trainer.staged import StagedTrainer

logger = logging.getLogger(__name__)


class FiguresStage(StagedTrainer):
    """See the module's contract."""

    timeline: Timeline
    scheduler: RolloutScheduler | None
    global_steps: int
    # Metrics of the last step.
    reported: Mapping[str, Any] = {}
    _exporter: PrometheusExporter | None = None
    _has_failed = False

    def live(self) -> dict[str, Any]:
        """What each side does now, and its figures; the main asks every second."""
        if self.scheduler is None or not self.is_up:
            return {TRAINER_DOES: Class.START_UP}
        reported = {
            name: value for name, value in self.reported.items() if name in EXPORTED or name.startswith(SERVERS)
        }
        figures = {**reported, **self.figures()}
        self.export(figures)
        return {**figures, TRAINER_DOES: self.timeline.doing, ROLLOUT_DOES: self.scheduler.lane.what}

    def export(self, figures: Mapping[str, Any]) -> None:
        """Have Ray's exporter tell these from now on, with ``async_training.prometheus``."""
        if not self.plan.settings.async_training.prometheus or self._has_failed:
            return
        self._exporter = self._exporter or PrometheusExporter(str(self.config.trainer.experiment_name))
        try:
            self._exporter.tell(figures)
        except Exception:  # a run does not end for what is told of it
            self._has_failed = True
            logger.exception("Prometheus is told nothing more")

    def figures(self) -> dict[str, float]:
        """In the keys of docs/run-record.md."""
        assert self.scheduler is not None
        shares = self.timeline.glance()
        counts = self.scheduler.counts()
        return {
            STEP: self.global_steps,
            "fully_async/count/current_param_version": self.ledger.version,
            "fully_async/count/announced_version": self.ledger.announced,
            "fully_async/count/live_replicas": self.publisher.live_replicas,
            "fully_async/trainer/idle_ratio": shares.get("wait", 0.0),
            **{f"{SHARE}{phase}": share for phase, share in shares.items()},
            **self.scheduler.metrics(),
            **{f"fully_async/ledger/{name}": getattr(counts, name) for name in LEDGER_COUNTS},
        }


LEDGER_COUNTS: Sequence[str] = ("issued", "trained", "filtered", "failed", "live")

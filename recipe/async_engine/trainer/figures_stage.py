# SPDX-License-Identifier: Apache-2.0
"""Collects the current metrics (figures) of a run for the main process's terminal, the trackers and Prometheus.

Contract: any thread may read the figures at any time, even while a step is being trained. `live` and `report` also
export the figures to Prometheus, through Ray. Shown by tests/integration/test_exported.py and tests/e2e.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from ray.util.metrics import Gauge

from recipe.async_engine.core.alarms import Alarms
from recipe.async_engine.core.ledger import SampleLedger
from recipe.async_engine.record.figures import (
    EXPORTED,
    ROLLOUT_DOES,
    SERVERS,
    SHARE,
    STEP,
    TRAINER_DOES,
    TRAINER_SHARE,
    Exported,
)
from recipe.async_engine.record.timeline import Timeline
from recipe.async_engine.rollout.scheduler import RolloutScheduler

logger = logging.getLogger(__name__)

RUN, PHASE = "run", "phase"
LEDGER_COUNTS: Sequence[str] = ("issued", "trained", "filtered", "failed", "live")


class PrometheusExporter:
    """Exports the figures of one run to Prometheus through Ray, with the label `run`.

    It only works in a process that is connected to Ray. After its first failure it does nothing.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._gauges: dict[str, Gauge] = {}
        self._has_failed = False

    def tell(self, figures: Mapping[str, Any]) -> None:
        """Export those values of ``figures`` that are numbers and have a name in Prometheus (`EXPORTED` or `SHARE`)."""
        if self._has_failed:
            return
        try:
            self._tell({key: float(value) for key, value in figures.items() if isinstance(value, Real)})
        except Exception:  # an error of the exporter must not end the run
            self._has_failed = True
            logger.exception("the run's figures cannot be exported to Prometheus, and are no longer exported")

    def _tell(self, figures: Mapping[str, float]) -> None:
        for key, value in figures.items():
            if key.startswith(SHARE):
                phase = {PHASE: key.removeprefix(SHARE)}
                self._gauge(TRAINER_SHARE, RUN, PHASE).set(value, tags={RUN: self._run, **phase})
            elif key in EXPORTED:
                self._gauge(EXPORTED[key], RUN).set(value, tags={RUN: self._run})

    def _gauge(self, exported: Exported, *labels: str) -> Gauge:
        if exported.name not in self._gauges:
            self._gauges[exported.name] = Gauge(exported.name, description=exported.meaning, tag_keys=labels)
        return self._gauges[exported.name]


class FiguresStage:
    """Collects the current figures of a run, and exports them if ``exporter`` is given."""

    def __init__(
        self,
        ledger: SampleLedger,
        scheduler: RolloutScheduler,
        timeline: Timeline,
        alarms: Alarms,
        live_replicas: Callable[[], int],
        exporter: PrometheusExporter | None,
    ) -> None:
        self._ledger, self._scheduler, self._timeline, self._alarms = ledger, scheduler, timeline, alarms
        self._live_replicas, self._exporter = live_replicas, exporter
        self._reported: Mapping[str, Any] = {}

    def live(self, step: int) -> dict[str, Any]:
        """Return the run's current metrics, and what trainer and rollout are doing, and export the metrics.

        The main process calls this every second.
        """
        reported = {
            name: value for name, value in self._reported.items() if name in EXPORTED or name.startswith(SERVERS)
        }
        figures = {**reported, **self.now(step)}
        self._export(figures)
        return {**figures, TRAINER_DOES: self._timeline.doing, ROLLOUT_DOES: self._timeline.rollout.lane.what}

    def report(self, metrics: Mapping[str, Any]) -> None:
        self._reported = metrics
        self._export(metrics)

    def now(self, step: int) -> dict[str, float]:
        """Return the current figures under the keys of docs/metrics.md."""
        shares = self._timeline.shares()
        counts = self._scheduler.counts()
        return {
            STEP: step,
            "fully_async/count/current_param_version": self._ledger.version,
            "fully_async/count/announced_version": self._ledger.announced,
            "fully_async/count/live_replicas": self._live_replicas(),
            **{f"{SHARE}{phase}": share for phase, share in shares.items()},
            **self._scheduler.metrics(),
            **self._alarms.metrics(),
            **{f"fully_async/ledger/{name}": getattr(counts, name) for name in LEDGER_COUNTS},
        }

    def _export(self, figures: Mapping[str, Any]) -> None:
        if self._exporter is not None:
            self._exporter.tell(figures)

# SPDX-License-Identifier: Apache-2.0
"""A run's figures as Prometheus metrics, through the exporter that each of Ray's nodes has.

Each has the label `run`, the name of the experiment. Shown by tests/integration/test_exported.py.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from numbers import Real
from typing import Any

from ray.util.metrics import Gauge

from recipe.async_engine.record.figures import EXPORTED, SHARE, TRAINER_SHARE, Exported

logger = logging.getLogger(__name__)

RUN, PHASE = "run", "phase"


class PrometheusExporter:
    """Tells Ray the figures of one run, until that fails once; it must live in a process of Ray's."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._gauges: dict[str, Gauge] = {}
        self._has_failed = False

    def tell(self, figures: Mapping[str, Any]) -> None:
        """From now on these are the figures; what is no number is left out."""
        if self._has_failed:
            return
        try:
            self._tell({key: float(value) for key, value in figures.items() if isinstance(value, Real)})
        except Exception:  # a run does not end for what is told of it
            self._has_failed = True
            logger.exception("Prometheus is told nothing more")

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

# SPDX-License-Identifier: Apache-2.0
"""A run's figures as Prometheus metrics, through the exporter that each of Ray's nodes has.

Each has the label `run`, the name of the experiment. Shown by tests/integration/test_exported.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from ray.util.metrics import Gauge

from recipe.async_engine.core.figures import EXPORTED, SHARE, TRAINER_SHARE, Exported

RUN, PHASE = "run", "phase"


class PrometheusExporter:
    """Tells Ray the figures of one run; it must live in a process of Ray's."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._gauges: dict[str, Gauge] = {}

    def tell(self, figures: Mapping[str, Any]) -> None:
        """From now on these are the figures; what is no number is left out."""
        for key, value in figures.items():
            if not isinstance(value, Real):
                continue
            if key.startswith(SHARE):
                phase = {PHASE: key.removeprefix(SHARE)}
                self._gauge(TRAINER_SHARE, RUN, PHASE).set(float(value), tags={RUN: self._run, **phase})
            elif key in EXPORTED:
                self._gauge(EXPORTED[key], RUN).set(float(value), tags={RUN: self._run})

    def _gauge(self, exported: Exported, *labels: str) -> Gauge:
        if exported.name not in self._gauges:
            self._gauges[exported.name] = Gauge(exported.name, description=exported.meaning, tag_keys=labels)
        return self._gauges[exported.name]

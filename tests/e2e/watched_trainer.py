# SPDX-License-Identifier: Apache-2.0
"""A trainer that reads Ray's exporter, after its last step, as a Prometheus server would."""

from __future__ import annotations

import time
import urllib.request
from pathlib import Path
from typing import Any

import ray

from recipe.async_engine.trainer.base import AsyncPPOTrainer

SCRAPED = "scraped.txt"
SCRAPE_S = 60.0


class WatchedTrainer(AsyncPPOTrainer):
    def _step(self) -> dict[str, Any] | None:
        metrics = super()._step()
        if self.is_last_step and metrics is not None:
            # The exporter is updated at the step's end; earlier values are of the step before.
            seconds, deadline = metrics["timing_s/step"], time.monotonic() + SCRAPE_S
            while not _has(content := _scraped(), "ray_recipe_step_seconds{", seconds) and time.monotonic() < deadline:
                time.sleep(0.2)
            Path(self.config.trainer.default_local_dir, SCRAPED).write_text(content)
        return metrics


def _has(content: str, name: str, value: float) -> bool:
    lines = [line for line in content.splitlines() if line.startswith(name)]
    return any(abs(float(line.rpartition(" ")[2]) - value) < 1e-6 for line in lines)


def _scraped() -> str:
    """Return the output of all nodes' exporters."""
    content = ""
    for node in ray.nodes():
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urllib.request.urlopen(url, timeout=SCRAPE_S) as answer:
            content += answer.read().decode()
    return content

# SPDX-License-Identifier: Apache-2.0
"""The step that finds no further batch: what the last validation measured reaches the trackers."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from verl import DataProto

from recipe.async_engine.core.timeline import Timeline
from recipe.async_engine.trainer.base import AsyncPPOTrainer


class Ending(AsyncPPOTrainer):
    """A trainer whose data have run out after step 5."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, Any], int]] = []
        self.logger = SimpleNamespace(log=lambda data, step: self.logged.append((dict(data), step)))
        self.saving = SimpleNamespace(is_over=False)
        self.profiled: list[tuple[int, bool]] = []
        end = lambda step, is_last: self.profiled.append((step, is_last))  # noqa: E731
        self.profiling: Any = SimpleNamespace(begin=lambda step: None, end=end)
        self.timeline, self.stopped_by, self.global_steps = Timeline(time.monotonic, 1), None, 5

    def _next_groups(self) -> DataProto | None:
        return None

    def _save_and_validate(self) -> None:
        self.metrics["val-core/task/reward/mean@1"] = 0.75


def test_last_validation_is_logged_when_the_data_run_out() -> None:
    trainer = Ending()
    assert trainer._step() is None
    assert trainer.logged == [({"val-core/task/reward/mean@1": 0.75}, 5)]
    assert trainer.profiled == [(6, True)], "the step whose batch was waited for"

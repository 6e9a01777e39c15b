# SPDX-License-Identifier: Apache-2.0
"""The step that finds no further batch: what the last validation measured reaches the trackers, and how it ended."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from verl import DataProto

from recipe.async_engine.core.alarms import AlarmLimit, Alarms
from recipe.async_engine.record.timeline import Timeline
from recipe.async_engine.trainer.base import AsyncPPOTrainer
from recipe.async_engine.trainer.stages import TrainingFailed


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


class Ended(Ending):
    """One whose loop ends at once, at this step, of whose groups so many failed."""

    def __init__(self, step: int, failed: int = 0, kept: int = 0, stopped_by: str | None = None) -> None:
        super().__init__()
        self.global_steps, self.stopped_by = step, stopped_by
        self.plan = SimpleNamespace(batch_groups=8, total_steps=4)
        counts = SimpleNamespace(issued=failed + kept, failed=failed, filtered=0)
        self.scheduler = SimpleNamespace(counts=lambda: counts)
        self.alarms = Alarms({"failed_groups": 0.5})
        for group in range(failed + kept):
            self.alarms.group_ended(ValueError("no answer") if group < failed else None)


def test_run_that_trained_nothing_has_failed_and_says_what_became_of_its_prompts() -> None:
    with pytest.raises(TrainingFailed, match=r"no batch of 8 .* of 7 groups that were issued 5 failed and 0 were filt"):
        Ended(step=0, failed=5, kept=2).judge_the_end()
    Ended(step=0, stopped_by="SIGTERM").judge_the_end()
    Ended(step=4, failed=0, kept=7).judge_the_end()


def test_run_of_few_groups_more_than_half_of_which_failed_has_failed() -> None:
    with pytest.raises(AlarmLimit, match=r"5 of the last 9 prompt groups .* more than async_training.alarms.failed_gr"):
        Ended(step=1, failed=5, kept=4).judge_the_end()
    trainer = Ended(step=1, failed=4, kept=4)
    trainer.judge_the_end()
    assert trainer.alarms.counts == {"failed_groups": 4}


def test_last_validation_is_logged_when_the_data_run_out() -> None:
    trainer = Ending()
    assert trainer._step() is None
    assert trainer.logged == [({"val-core/task/reward/mean@1": 0.75}, 5)]
    assert trainer.profiled == [(6, True)], "the step whose batch was waited for"

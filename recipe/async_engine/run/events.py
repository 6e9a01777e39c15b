# SPDX-License-Identifier: Apache-2.0
"""What a run yields, taken into its record and onto the screen."""

from __future__ import annotations

import sys
from typing import Any

from recipe.async_engine.run.display import Display
from recipe.async_engine.run.record import RunRecord
from recipe.async_engine.run.runner import Began, Ended


def take_in(event: Any, record: RunRecord, display: Display) -> None:
    """One event of the run."""
    if isinstance(event, Began):
        record.begin_at(event.step)
        record.update(event.state)
        display.resume(event.step)
    elif isinstance(event, Ended):
        record.update(event.state)
        if event.error is not None:
            sys.stderr.write(f"\n{event.error['traceback']}")
            record.fail(event.error)
    else:
        state, metrics = event
        record.update(state)
        record.step(metrics)
        display.step(metrics)

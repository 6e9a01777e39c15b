# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
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

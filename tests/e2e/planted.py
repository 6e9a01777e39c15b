# SPDX-License-Identifier: Apache-2.0
"""Records when a planted cause was active in a run, in the file ``PLANTED``; also has the slow reward.

Times are of the machine's monotonic clock, which all processes of a run share. ``PLANTED_S`` is the duration of the
cause in seconds. The module imports nothing of the stack, because scoring processes import it.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def note(what: str, start: float, end: float) -> None:
    line = json.dumps({"what": what, "start": start, "end": end}) + "\n"
    with Path(os.environ["PLANTED"]).open("a") as file:
        file.write(line)


@contextmanager
def noted(what: str) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    finally:
        note(what, began, time.monotonic())


def planted_s() -> float:
    return float(os.environ["PLANTED_S"])


async def slow_reward(data_source: str, solution_str: str, ground_truth: str, extra_info: Any, **kwargs: Any) -> float:
    """Sleep for the planted time, with any number of calls at once."""
    with noted("reward"):
        await asyncio.sleep(planted_s())
    return float(len(solution_str) % 2)


def quick_reward(data_source: str, solution_str: str, ground_truth: str, extra_info: Any, **kwargs: Any) -> float:
    return float(len(solution_str) % 2)

# SPDX-License-Identifier: Apache-2.0
"""Reports where the threads and coroutines of this process wait, and collects such reports from other processes."""

import asyncio
import sys
import traceback
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import CoroutineType, FrameType
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from recipe.async_engine.core.deadlines import REPORT_ANSWER_S

MOST = 12


def answers(asked: Mapping[str, ray.ObjectRef]) -> dict[str, Any]:
    """Return the answer of each component to its open call in ``asked``.

    If a component fails or does not answer in time, the result has a text that says so instead of its answer.
    """
    said: dict[str, Any] = {}
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=REPORT_ANSWER_S) if asked else None
    for name, reference in asked.items():
        try:
            said[name] = ray.get(reference, timeout=0)
        except GetTimeoutError:
            said[name] = f"DOES NOT ANSWER within {REPORT_ANSWER_S:g} s"
        except RayError as error:
            said[name] = f"IS DEAD or failed: {type(error).__name__}"
    return said


def thread_stack(ident: int) -> list[str]:
    """Return the frames of a thread, one line each, the outermost first."""
    frame = sys._current_frames().get(ident)
    if frame is None:
        return ["it has ended"]
    return [_place(entry.filename, entry.lineno, entry.name) for entry in traceback.extract_stack(frame)]


def waits(loop: asyncio.AbstractEventLoop | None = None) -> list[str]:
    """Return the places in the code where the tasks of an event loop wait, and the number of tasks at each place.

    The place with the most tasks comes first. Without ``loop`` the running event loop is used.
    """
    tasks = [task for task in asyncio.all_tasks(loop) if not task.done()]
    counted = Counter(_innermost(task.get_coro()) for task in tasks)
    lines = [f"{count} in {place}" for place, count in counted.most_common(MOST)]
    return [*lines, "..."] if len(counted) > MOST else lines


def _innermost(coroutine: Any) -> str:
    """Return the innermost frame of a waiting coroutine and the two frames around it, as one line."""
    frames: list[FrameType] = []
    while isinstance(coroutine, CoroutineType) and coroutine.cr_frame is not None:
        frames.append(coroutine.cr_frame)
        coroutine = coroutine.cr_await
    if not frames:
        return type(coroutine).__name__
    return " < ".join(
        _place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) for frame in reversed(frames[-3:])
    )


def _place(file: str, line: int | None, name: str) -> str:
    return f"{'/'.join(Path(file).parts[-2:])}:{line} {name}"

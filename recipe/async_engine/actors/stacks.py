# SPDX-License-Identifier: Apache-2.0
"""Where threads and coroutines of this process wait."""

import asyncio
import sys
import traceback
from collections import Counter
from pathlib import Path
from types import CoroutineType, FrameType
from typing import Any

MOST = 12


def thread_stack(ident: int) -> list[str]:
    """Of a thread, outermost first, one line a frame."""
    frame = sys._current_frames().get(ident)
    if frame is None:
        return ["it has ended"]
    return [_place(entry.filename, entry.lineno, entry.name) for entry in traceback.extract_stack(frame)]


def waits(loop: asyncio.AbstractEventLoop | None = None) -> list[str]:
    """Where the tasks of an event loop, by default the running one, wait: innermost frames, the most common first."""
    tasks = [task for task in asyncio.all_tasks(loop) if not task.done()]
    counted = Counter(_innermost(task.get_coro()) for task in tasks)
    lines = [f"{count} in {place}" for place, count in counted.most_common(MOST)]
    return [*lines, "..."] if len(counted) > MOST else lines


def _innermost(coroutine: Any) -> str:
    """The frame that awaits something that is no coroutine, and the two around it."""
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

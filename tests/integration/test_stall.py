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
"""The watch over a run that stands still, and what is said of its threads and coroutines."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipe.async_engine.core.timeline import Timeline
from recipe.async_engine.run import stall
from recipe.async_engine.run.stacks import thread_stack, waits
from recipe.async_engine.run.stall import STALL_FILE, STATUS, Stalled, StallWatch

LIMIT_S, SOON_S = 0.1, 5.0


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(stall, "GRACE_S", 0.1)

    class Watched:
        def __init__(self) -> None:
            self.timeline = Timeline(time.monotonic)
            self.failed: list[BaseException] = []
            self.left: list[int] = []

        def watch(self, describe: Callable[[float], str] = lambda silent_s: "who waits for whom") -> StallWatch:
            watch = StallWatch(self.timeline, LIMIT_S, describe, self.failed.append, tmp_path, self.left.append)
            watch.start()
            return watch

    return Watched()


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_run_that_stands_still_ends_with_a_report(watched: Any, tmp_path: Path) -> None:
    watch = watched.watch()
    wait_for(lambda: watched.failed)
    watch.stop()
    assert isinstance(watched.failed[0], Stalled)
    assert str(watched.failed[0]) == "who waits for whom"
    assert (tmp_path / STALL_FILE).read_text() == "who waits for whom\n"
    time.sleep(0.2)
    assert watched.left == [], "it had ended by itself"


def test_process_is_ended_if_its_trainer_waits_for_something_else(watched: Any) -> None:
    watched.watch()
    wait_for(lambda: watched.left)
    assert watched.left == [STATUS]


def test_nothing_happens_while_something_happens(watched: Any) -> None:
    watch = watched.watch()
    for _ in range(10):
        time.sleep(LIMIT_S / 4)
        watched.timeline.note("something")
    with watched.timeline.phase("trainer", "train"):
        time.sleep(LIMIT_S / 2)
    watch.stop()
    assert not watched.failed


def test_report_that_fails_does_not_keep_the_run_going(watched: Any) -> None:
    def describe(silent_s: float) -> str:
        raise ValueError("no such part")

    watched.watch(describe)
    wait_for(lambda: watched.failed)
    assert "the report failed with ValueError: no such part" in str(watched.failed[0])


def test_stack_of_a_waiting_thread_names_its_frames() -> None:
    waiting, go_on = threading.Event(), threading.Event()

    def innermost() -> None:
        waiting.set()
        go_on.wait(SOON_S)

    thread = threading.Thread(target=innermost)
    thread.start()
    waiting.wait(SOON_S)
    lines = thread_stack(thread.ident or 0)
    go_on.set()
    thread.join()
    assert any("test_stall.py" in line and line.endswith(" innermost") for line in lines)
    assert thread_stack(thread.ident or 0) == ["it has ended"]


async def test_coroutines_that_wait_at_the_same_place_are_one_line() -> None:
    never = asyncio.get_running_loop().create_future()

    async def inner() -> None:
        await never

    async def outer() -> None:
        await inner()

    tasks = [asyncio.create_task(outer()) for _ in range(3)]
    await asyncio.sleep(0)
    (line,) = [line for line in waits() if "inner" in line]
    assert line.startswith("3 in integration/test_stall.py:")
    assert " < " in line and line.endswith(" outer")
    never.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

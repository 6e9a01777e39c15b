# SPDX-License-Identifier: Apache-2.0
"""The watch over a run that cannot go on, and what is said of its threads and coroutines."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import ActorID
from ray.exceptions import ActorUnavailableError

from recipe.async_engine.actors import watch as watch_module
from recipe.async_engine.actors.stacks import thread_stack, waits
from recipe.async_engine.actors.watch import STALL_FILE, STATUS, RunWatch
from recipe.async_engine.core.errors import CannotGoOn
from recipe.async_engine.record.timeline import Timeline

LIMIT_S, SOON_S = 0.1, 10.0


class Watched:
    """A run under a watch; what the watch does to it."""

    def __init__(self, folder: Path, limit_s: float = LIMIT_S) -> None:
        self.timeline = Timeline(time.monotonic)
        self.failed: list[BaseException] = []
        self.left: list[int] = []
        self.leaving: Any = []
        self.watch = RunWatch(limit_s, folder, self.left.append)

    def follow(self, describe: Callable[[], str] = lambda: "who waits for whom") -> RunWatch:
        self.watch.follow(
            lambda: self.timeline.silent_s, describe, self.failed.append, lambda words: self.leaving.append(words)
        )
        self.watch.start()
        return self.watch


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "GRACE_S", 0.1)


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_run_that_stands_still_ends_with_a_report(watched: Watched, tmp_path: Path) -> None:
    watch = watched.follow()
    wait_for(lambda: watched.failed)
    watch.stop()
    assert isinstance(watched.failed[0], CannotGoOn)
    assert "who waits for whom" in str(watched.failed[0])
    assert watch.last_words() == {"name": "CannotGoOn", "message": str(watched.failed[0])}
    wait_for(lambda: (tmp_path / STALL_FILE).exists() and (tmp_path / STALL_FILE).read_text())
    assert (tmp_path / STALL_FILE).read_text() == f"{watched.failed[0]}\n"
    time.sleep(0.3)
    assert watched.left == [], "it had ended by itself"


def test_process_is_ended_if_its_trainer_waits_for_something_else(watched: Watched) -> None:
    watched.follow()
    wait_for(lambda: watched.left)
    assert watched.left == [STATUS]
    assert [words["name"] for words in watched.leaving] == ["CannotGoOn"], "before it, once"


def test_what_is_to_be_done_before_a_process_is_ended_keeps_it_no_longer_than_it_may(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "LEAVING_S", 0.1)
    watched.leaving = SimpleNamespace(append=lambda words: threading.Event().wait())
    watched.follow()
    wait_for(lambda: watched.left)


def test_run_is_ended_where_its_report_cannot_be_written(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "gone")  # no such folder: as on a full or read-only disk, writing raises OSError
    watched.follow()
    wait_for(lambda: watched.left)
    assert isinstance(watched.failed[0], CannotGoOn)
    assert "who waits for whom" in watched.watch.last_words()["message"]


def test_run_is_ended_where_neither_writing_nor_the_trainers_lock_returns(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    monkeypatch.setattr(watch_module.durable, "write", lambda *_: never.wait(SOON_S))
    watched.watch.follow(lambda: watched.timeline.silent_s, str, lambda error: never.wait(SOON_S))
    watched.watch.start()
    wait_for(lambda: watched.left)
    never.set()


def test_run_is_ended_where_the_report_does_not_return(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "REPORT_S", 0.1)
    never = threading.Event()
    watched.follow(lambda: str(never.wait(SOON_S)))
    wait_for(lambda: watched.left)
    assert "the report was not done" in str(watched.failed[0])
    never.set()


def test_watch_begins_before_there_is_a_trainer(watched: Watched) -> None:
    watched.watch.start()
    wait_for(lambda: watched.left)
    assert "the run is starting" in watched.watch.last_words()["message"]


def test_stage_without_a_wait_of_its_own_has_a_deadline(tmp_path: Path) -> None:
    watched = Watched(tmp_path, limit_s=SOON_S)
    watch = watched.follow()
    with watch.within("checkpoint", 0.01, "reading the checkpoint"):
        wait_for(lambda: watched.failed)
    assert isinstance(watched.failed[0], CannotGoOn)
    assert "reading the checkpoint takes longer than 0.01 s (async_training.timeouts.checkpoint)" in str(
        watched.failed[0]
    )


def test_stage_with_a_deadline_may_stand_still_for_longer_than_other_parts(watched: Watched) -> None:
    with watched.watch.within("startup", 60.0, "starting the workers"):
        watched.follow()
        time.sleep(5 * LIMIT_S)
        assert not watched.failed
    wait_for(lambda: watched.failed)
    assert isinstance(watched.failed[0], CannotGoOn)


def test_stage_that_is_over_has_no_deadline_any_more(tmp_path: Path) -> None:
    watched = Watched(tmp_path, limit_s=SOON_S)
    watch = watched.follow()
    with watch.within("checkpoint", 0.5, "reading the checkpoint"):
        pass
    time.sleep(2.0)
    watch.stop()
    assert not watched.failed


def test_nothing_happens_while_something_happens(watched: Watched) -> None:
    watch = watched.follow()
    for _ in range(10):
        time.sleep(LIMIT_S / 4)
        watched.timeline.note("something")
    with watched.timeline.phase("train"):
        time.sleep(LIMIT_S / 2)
    watch.stop()
    assert not watched.failed


def test_report_that_fails_does_not_keep_the_run_going(watched: Watched) -> None:
    def describe() -> str:
        raise ValueError("no such part")

    watched.follow(describe)
    wait_for(lambda: watched.failed)
    assert "the report failed with ValueError: no such part" in str(watched.failed[0])


def test_trainers_error_of_a_broken_connection_names_the_actor_behind_it(watched: Watched) -> None:
    held, other = (ActorID(bytes([number] * 16)) for number in (1, 2))
    watched.watch.hold({"training worker 1 (actor)": SimpleNamespace(_actor_id=held)})
    error = ActorUnavailableError("connection reset by peer", held.binary())
    lost = watched.watch.cause_of(error)
    assert isinstance(lost, CannotGoOn) and lost.__cause__ is error
    assert str(lost).startswith("training worker 1 (actor) is out of reach")
    assert "connection reset by peer" in str(lost)
    wrapped = RuntimeError("the rollout ended")
    wrapped.__cause__ = error
    assert str(watched.watch.cause_of(wrapped)) == str(lost)
    # Nor can this actor be asked, which costs no error its place.
    for another in (ActorUnavailableError("connection reset by peer", other.binary()), ValueError()):
        assert watched.watch.cause_of(another) is another


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
    assert any("test_watch.py" in line and line.endswith(" innermost") for line in lines)
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
    assert line.startswith("3 in integration/test_watch.py:")
    assert " < " in line and line.endswith(" outer")
    never.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

# SPDX-License-Identifier: Apache-2.0
"""The progress bar and the summary at a run's end."""

from __future__ import annotations

import fcntl
import io
import os
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest

from recipe.async_engine.core.alarms import Alarms
from recipe.async_engine.record.figures import ROLLOUT_DOES, SHARE, TRAINER_DOES
from recipe.async_engine.record.run_record import STEP, RunRecord
from recipe.async_engine.run import display as display_module
from recipe.async_engine.run.display import Bar, Display

METRICS = {
    STEP: 3,
    "timing_s/step": 2.0,
    "fully_async/trained_samples": 32,
    "critic/score/mean": 0.625,
    "training/off_policy/trajectory_staleness_worst/mean": 1.25,
}


FIGURES = {
    TRAINER_DOES: "update",
    ROLLOUT_DOES: "generating",
    f"{SHARE}update": 0.75,
    f"{SHARE}wait": 0.25,
    "fully_async/rollouter/generating_trajectories": 14,
    "fully_async/rollouter/slots": 16,
}


@contextmanager
def terminal(columns: int, lines: int) -> Iterator[tuple[TextIO, int]]:
    """A terminal of this size: what to write to, and the descriptor where it comes out."""
    outside, inside = os.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    os.set_blocking(outside, False)
    with os.fdopen(inside, "w") as stream:
        yield stream, outside
    os.close(outside)


def written(outside: int) -> str:
    content = b""
    while True:
        try:
            content += os.read(outside, 1 << 16)
        except BlockingIOError:
            return content.decode()


def new_display(stream: io.StringIO) -> Display:
    display = Display("fully_async", 10, stream)
    # Unthrottled, so that every update is written.
    display._shown._bar.mininterval = 0
    display._shown._bar.ncols = 200
    display._shown._bar.dynamic_ncols = False
    return display


def test_bar_shows_step_reward_staleness_and_samples_per_second() -> None:
    stream = io.StringIO()
    display = new_display(stream)
    display.step(METRICS)
    display._shown._bar.refresh()
    shown = stream.getvalue().rsplit("\r", 1)[-1]
    for part in ("fully_async", "3/10", "reward=0.625", "staleness=1.25", "samples/s=16"):
        assert part in shown
    assert "val=" not in shown


def test_bar_shows_a_validation_score_where_there_is_one_and_leaves_out_what_is_missing() -> None:
    stream = io.StringIO()
    display = new_display(stream)
    display.step({STEP: 1, "val-core/digits/reward/mean@1": 0.75})
    display._shown._bar.refresh()
    shown = stream.getvalue().rsplit("\r", 1)[-1]
    assert "val=0.75" in shown
    assert "reward=" not in shown
    assert "samples/s" not in shown


def test_resumed_run_starts_its_bar_at_its_step() -> None:
    display = new_display(io.StringIO())
    display.resume(4)
    assert (display._shown._bar.n, display._shown._bar.total) == (4, 10)
    display.step({**METRICS, STEP: 5})
    assert display._shown._bar.n == 5


def test_end_shows_how_it_ended_scores_staleness_shares_and_the_ledger(tmp_path: Path) -> None:
    alarms = Alarms({})
    for _ in range(3):
        alarms.note("uniform_rewards", True)
    stream = io.StringIO()
    record = RunRecord(tmp_path, "fully_async")
    record.update(
        {
            "steps": 10,
            "versions": 5,
            "validation": {"first": 0.25, "last": 0.9375},
            "staleness": {"bound": 2, "max": 2, "mean": 0.5},
            "interrupted": 7,
            "trainer_wait_share": 0.25,
            "rollout_idle_share": 0.1,
            "weight_sync_seconds": 1.5,
            "alarms": alarms.summary(),
            "ledger": {"issued": 44, "trained": 40, "filtered": 1, "failed": 2, "live": 1},
        }
    )
    new_display(stream).end(record.close(3.5))
    text = stream.getvalue()
    for part in (
        "steps 10, versions 5",
        "peak memory 3.500 GiB",
        "validation score 0.250 -> 0.938",
        "staleness max 2, mean 0.50, bound 2; 7 trajectories interrupted",
        "trainer waited 25% of its time, rollout idle 10% of its time, weight sync 1.5 s\n",
        "the run ended with alarms",
        "alarm uniform_rewards, 3 steps: the answers to each prompt",
        "groups issued 44, trained 40, filtered 1, failed 2, live 1",
    ):
        assert part in text


def test_end_of_a_run_that_measured_nothing_says_so(tmp_path: Path) -> None:
    stream = io.StringIO()
    new_display(stream).end(RunRecord(tmp_path, "fully_async").close(None))
    assert "the run ended well" in stream.getvalue()
    assert "validation score not measured -> not measured" in stream.getvalue()
    assert "trainer waited not measured" in stream.getvalue()


def test_terminal_with_room_has_a_panel_with_the_bar_and_a_line_for_each_side(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    with terminal(120, 40) as (stream, outside):
        display = Display("fully_async", 10, stream)
        display.resume(2)
        display.step(METRICS)
        display.live(FIGURES)
        display.end(RunRecord(tmp_path, "fully_async").close(None))
        shown = written(outside)
    for part in ("fully_async", "3/10", "reward 0.625", "update; update 75%, wait 25%", "generating; 14 of 16 slots"):
        assert part in shown
    assert "validation score not measured" in shown
    # Hidden, it would stay hidden after a kill -9.
    assert "\x1b[?25l" not in shown


@pytest.mark.parametrize(("columns", "lines", "kind"), [(60, 40, "xterm"), (120, 8, "xterm"), (120, 40, "dumb")])
def test_without_room_the_sides_are_plain_lines_now_and_then(
    columns: int, lines: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", kind)
    with terminal(columns, lines) as (stream, outside):
        display = Display("fully_async", 10, stream)
        display.live(FIGURES)
        assert "14 of 16" not in written(outside), "a line a second would fill a log"
        monkeypatch.setattr(display_module, "PLAIN_S", 0.0)
        display = Display("fully_async", 10, stream)
        display.live(FIGURES)
        shown = written(outside)
    assert "trainer: update; update 75%, wait 25%" in shown
    assert "rollout: generating; 14 of 16 slots" in shown


def test_plain_lines_come_at_their_interval() -> None:
    stream, now = io.StringIO(), [0.0]
    bar = Bar("fully_async", 10, stream, clock=lambda: now[0])
    for second in range(100):
        now[0] = float(second)
        bar.live([("trainer", "update")])
    assert stream.getvalue().count("trainer: update") == 3


@pytest.mark.parametrize("size", [(60, 40), (120, 40)])
def test_terminal_that_is_closed_ends_no_run(
    size: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(display_module, "PLAIN_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    with terminal(*size) as (stream, outside):
        display = Display("fully_async", 10, stream)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, outside)
        display.resume(2)
        display.live(FIGURES)
        display.step(METRICS)
        record = RunRecord(str(tmp_path), "fully_async", 0.0)
        record.close(None)
        display.end(record.summary)
        # What the stream still has is not for this test.
        os.dup2(null, stream.fileno())
        os.close(null)

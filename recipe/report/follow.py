# SPDX-License-Identifier: Apache-2.0
"""The option ``--follow``: prints the progress of a run that another process executes (docs/report.md).

Contract: following a run only reads the run's folder. `follow` waits for a limited time until a run begins, and returns
when the run has written its summary, or when no process owns the folder any more. If a new run is launched in the same
folder, `follow` continues with the new run. Shown by tests/integration/test_follow.py.
"""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipe.async_engine.record.event_file import Tail, files
from recipe.async_engine.record.events import SCHEDULER, TRAINER, Class
from recipe.async_engine.record.figures import ROLLOUT_DOES, SHARE, STEP, TRAINER_DOES, sides
from recipe.async_engine.record.owner import is_owned, owner_of
from recipe.async_engine.record.schema import Summary, steps_of, summary_in
from recipe.report.run import FRESH_S

POLL_S = 1.0
LINES_S = 5.0
"""Least number of seconds between two reports on current activity. Finished steps are printed at once."""
ENDED, FAILED, NONE_BEGAN, WITH_ALARMS = 0, 1, 2, 3

Say = Callable[[str], None]


class Follower:
    """Reads the events and metrics that a run appends to its folder.

    Attributes:
        figures: current metrics of the run, with the keys of docs/metrics.md.
        steps: metrics of the steps that have not been printed yet.
        notes: notes on damaged files that have not been printed yet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: Path | None = None
        self._tail: Tail | None = None
        self._metrics_at = 0
        self._phases: defaultdict[str, float] = defaultdict(float)
        self.figures: dict[str, Any] = {}
        self.steps: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self._noted: set[str] = set()

    def look(self) -> bool:
        """Read new events and metrics; return whether there were any."""
        return any([self._look_at_events(), self._look_at_metrics()])

    @property
    def has_begun(self) -> bool:
        return bool(self._file or self.steps or self.figures) or is_owned(self._folder)

    @property
    def summary(self) -> Summary | None:
        """The summary that the run writes at its end, or None if there is none yet."""
        summary, notes = summary_in(self._folder)
        self._note(notes)
        return summary

    def _note(self, notes: list[str]) -> None:
        self.notes += [note for note in notes if note not in self._noted]
        self._noted.update(notes)

    @property
    def is_over(self) -> bool:
        """Whether the run is over, because it has ended or was killed, so that no process executes it any more."""
        if is_owned(self._folder):
            return False
        if owner_of(self._folder) == socket.gethostname():
            return True
        # The run's process is on another machine, and its lock on the folder may not be visible here. So judge by the
        # age of the run's files.
        return time.time() - self._written_at() > FRESH_S

    def _written_at(self) -> float:
        found = [*files(self._folder)[-1:], self._folder / "metrics.jsonl", self._folder / "run.lock"]
        return max((path.stat().st_mtime for path in found if path.is_file()), default=0.0)

    def _look_at_events(self) -> bool:
        if (newest := files(self._folder)[-1:]) and newest[0] != self._file:
            self._file, self._tail = newest[0], Tail(newest[0])
            self._phases.clear()
        if self._tail is None:
            return False
        events = self._tail.new()
        self._note([self._tail.damage] if self._tail.damage else [])
        for event in events:
            if event.lane == TRAINER:
                self.figures[TRAINER_DOES] = event.what
                if event.what != Class.START_UP:
                    self._phases[event.what] += event.end - event.start
            elif event.lane == SCHEDULER:
                self.figures[ROLLOUT_DOES] = event.what
        total = sum(self._phases.values())
        self.figures |= {f"{SHARE}{phase}": seconds / total for phase, seconds in self._phases.items() if total}
        return bool(events)

    def _look_at_metrics(self) -> bool:
        path = self._folder / "metrics.jsonl"
        if not path.is_file():
            return False
        if path.stat().st_size < self._metrics_at:
            # The file has become shorter, because a run that resumes deletes the metrics after its checkpoint. Read it
            # from the start.
            self._metrics_at = 0
        with open(path, "rb") as file:
            file.seek(self._metrics_at)
            lines = [line for line in file if line.endswith(b"\n")]
            self._metrics_at += sum(map(len, lines))
        if lines and not lines[0].startswith(b"{"):
            # A resumed run has rewritten the file, so this read began in the middle of a line. Leave this line out.
            del lines[0]
        steps, notes = steps_of(lines, str(path))
        self._note(notes)
        for step in steps:
            for key, value in step.items():
                # Do not overwrite values that come from events, because they are newer than those in the metrics.
                is_share = key.startswith(SHARE)
                if key not in (TRAINER_DOES, ROLLOUT_DOES) and not (is_share and (self._phases or value is None)):
                    self.figures[key] = value
            self.steps.append(step)
        return bool(lines)


def follow(folder: Path, wait_s: float, say: Say) -> int:
    """Print a run's progress until it ends, and return the exit status.

    If no run has begun yet, wait up to ``wait_s`` seconds for one.
    """
    follower, deadline, waits = Follower(folder), time.monotonic() + wait_s, False
    while not (follower.look() or follower.has_begun or follower.summary):
        if time.monotonic() >= deadline:
            say(f"no run has begun in {folder} within {wait_s:g} s (--wait): name a run's trainer.default_local_dir")
            return NONE_BEGAN
        if not waits:
            say(f"no run has begun in {folder}; waiting for one up to {wait_s:g} s (--wait)")
            waits = True
        time.sleep(POLL_S)
    # Of the steps that ended before this call, print only the newest.
    follower.steps = follower.steps[-1:]
    said_at = -LINES_S
    say(f"following the run in {folder}")
    while True:
        # A run writes its last metrics, then its summary, and then releases its folder. Look at these in reverse order,
        # so that nothing written in between is missed.
        over = follower.is_over
        summary = follower.summary
        follower.look()
        said_at = _tell(follower, said_at, last=summary is not None or over, say=say)
        if summary is not None:
            return _ended(summary, say)
        if over:
            say("the run was killed: no process owns its folder, and it wrote no summary")
            return FAILED
        time.sleep(POLL_S)


def _tell(follower: Follower, said_at: float, last: bool, say: Say) -> float:
    """Print new notes and steps and, if due, the current activity.

    ``said_at`` is the time at which the activity was last printed; return the new value.
    """
    now = time.strftime("%H:%M:%S")
    for note in follower.notes:
        say(note)
    follower.notes = []
    for step in follower.steps:
        parts = [f"step {step.get(STEP) or 0:.0f}"]
        parts += [f"{name} {step[key]:.3g}" for name, key in SHOWN.items() if step.get(key) is not None]
        say(f"{now} {', '.join(parts)}")
    follower.steps = []
    if not last and time.monotonic() - said_at < LINES_S:
        return said_at
    for name, text in sides(follower.figures):
        say(f"{now}   {name}: {text}")
    return time.monotonic()


SHOWN = {"reward": "critic/score/mean", "seconds": "timing_s/step"}


def _ended(summary: Summary, say: Say) -> int:
    error, alarms = summary.get("error"), summary.get("alarms") or {}
    has_failed = error is not None or "error" not in summary
    say(
        f"the run {'failed' if has_failed else 'ended'}{' with alarms' if alarms else ''}: "
        f"steps {summary.get('steps')}, versions {summary.get('versions')}, "
        f"{summary.get('wall_seconds') or 0:.0f} s"
    )
    if error is not None:
        say(f"{error.get('name')}: {error.get('message')}")
    for name, alarm in alarms.items():
        say(f"alarm {name}, {alarm['count']} {alarm['unit']}: {alarm['said']}")
    return FAILED if has_failed else WITH_ALARMS if alarms else ENDED

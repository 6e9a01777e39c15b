# SPDX-License-Identifier: Apache-2.0
"""Loads a run's folder for the report.

Contract: if the run still goes on, or was killed, the time account (accelerator-seconds by class) covers the events
written so far. If a folder has several launches, the newest is used. Damaged data is left out with a note; an event
record without a valid header is refused. Shown by tests/integration/test_report.py and test_damaged_files.py.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from recipe.async_engine.core.alarms import METRIC, WATCHED
from recipe.async_engine.record.event_file import events_of, files, read
from recipe.async_engine.record.events import GROUPS, ROLLOUT, RUN, SAMPLED, TOKENS, TRAJECTORIES, Class, Devices, Event
from recipe.async_engine.record.schema import BadFile, Header, Settings, Summary, header_of, metrics_in, summary_in
from recipe.report.account import Account, Piece, close, meanwhile, pieces
from recipe.report.advice import Advice, Facts, advise

FRESH_S = 60.0
"""Seconds without a new event after which a run that has no summary counts as killed."""


@dataclass(frozen=True)
class Run:
    """The contents of a run's folder.

    Attributes:
        state: "ended", "failed", "goes on", "was killed", or `UNSAID`.
        until: end of the time account, in seconds of the run's clock; more than 0.
        events: all events but those of trajectories, groups and tokens.
        trajectories, groups, tokens: events of these lanes, as tables.
        later_error: error of a later launch that ended before it wrote any events.
        notes: descriptions of damaged data that was left out.
    """

    folder: Path
    state: str
    until: float
    header: Header
    devices: Devices
    events: list[Event]
    pieces: list[Piece]
    account: Account
    trajectories: pa.Table
    groups: pa.Table
    tokens: pa.Table
    summary: Summary
    metrics: list[dict[str, Any]]
    later_error: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def settings(self) -> Settings:
        return self.header.settings

    @property
    def alarms(self) -> dict[str, tuple[int, str]]:
        """The alarms raised, with counts and descriptions; of an unfinished run, those up to its last step."""
        if ended := self.summary.get("alarms"):
            return {name: (alarm["count"], alarm["said"]) for name, alarm in ended.items()}
        counts = {name: (self.metrics or [{}])[-1].get(f"{METRIC}{name}", 0) for name in WATCHED}
        return {name: (int(count), WATCHED[name].what) for name, count in counts.items() if count}

    @cached_property
    def advice(self) -> list[Advice]:
        return advise(Facts(self.account, self.settings, meanwhile(self.pieces, self.devices), speeds(self)))


def about(table: pa.Table, what: str) -> pa.Table:
    """Return the rows of an event table whose field `what` has the value ``what``."""
    return table.filter(pc.equal(table["what"], what))


def answer_counts(run: Run) -> Counter[int]:
    """Return the number of answers of each prompt group, by the group's id."""
    rows = run.trajectories.group_by("group").aggregate([("trajectory", "max")])
    groups, last = rows["group"].to_pylist(), rows["trajectory_max"].to_pylist()
    return Counter({group: n + 1 for group, n in zip(groups, last, strict=True)})


HARDLY = 0.02
"""An engine's speed is computed only if decoding takes more than this share of the engine's total time."""


def speeds(run: Run) -> dict[str, float]:
    """Return the speed of each rollout engine: tokens sampled per second of decoding.

    If only a share of an engine's sequence slots decodes, a second counts only in proportion to that share.
    """
    counts: dict[str, list[int]] = {}
    for event in run.events:
        if event.lane == RUN and event.what == SAMPLED:
            counts.setdefault(str(event.text), []).append(event.tokens or 0)
    found = {}
    for name, device in run.account.devices.items():
        seconds, of_device = device.seconds.get(Class.DECODING, 0.0), [0, *counts.get(name, [])]
        # When an engine's process is replaced, its token count restarts at 0. So if a count is lower than the one
        # before, all of its tokens are new.
        tokens = sum(now - before if now >= before else now for before, now in pairwise(of_device))
        if name.startswith(ROLLOUT) and tokens and seconds > HARDLY * device.life:
            found[name] = tokens / seconds
    return found


def load(folder: Path) -> Run:
    """Load the newest launch of the run in ``folder``.

    Raises:
        BadFile: there is no event record, or it is unreadable, empty or of another format version.
    """
    found = files(folder)
    if not found:
        raise BadFile(
            f"{folder} has no record of events: name a run's folder (trainer.default_local_dir) that was written with "
            "async_training.events=true"
        )
    written, table, notes = read(found[-1])
    until = pc.max(table["end"]).as_py() if table.num_rows else 0.0
    if until <= 0:
        also = "".join(f"; {note}" for note in notes)
        raise BadFile(
            f"{found[-1]} has no events yet: the run has just begun, or it ended before its first event{also}"
        )
    header, of_header = header_of(written, str(found[-1]))
    summary, of_summary = summary_in(folder)
    metrics, of_metrics = metrics_in(folder)
    summary, later_error = summary or {}, None
    if summary and not summary.get("account") and summary.get("began", 0.0) > header.began:
        # This summary belongs to a later launch, which ended before it wrote any events. So ignore it.
        summary, later_error = {}, (summary.get("error") or {}).get("message")
    until = (summary.get("account") or {}).get("duration") or until
    lanes = table["lane"]
    many = pc.is_in(lanes, pa.array([TRAJECTORIES, GROUPS, TOKENS]))
    events = events_of(table.filter(pc.invert(many)))
    devices = Devices(header.accelerators, header.shared, header.hybrid)
    found_pieces = list(pieces(events, devices, until))
    return Run(
        folder=folder,
        state=_state(summary, time.time() - header.began - until),
        until=until,
        header=header,
        devices=devices,
        events=events,
        pieces=found_pieces,
        account=close(events, devices, until, found=found_pieces),
        trajectories=table.filter(pc.equal(lanes, TRAJECTORIES)),
        groups=table.filter(pc.equal(lanes, GROUPS)),
        tokens=table.filter(pc.equal(lanes, TOKENS)),
        summary=summary,
        metrics=metrics,
        later_error=later_error,
        notes=[*notes, *of_header, *of_summary, *of_metrics],
    )


UNSAID = "ended, and its summary does not say how,"


def _state(summary: Summary, silent_s: float) -> str:
    if not summary:
        return "goes on" if silent_s < FRESH_S else "was killed"
    if "error" not in summary:
        return UNSAID
    return "ended" if summary["error"] is None else "failed"


def lacking(command: str, extra: str, modules: Iterable[str]) -> str | None:
    """Return a sentence on what to install for ``command``, which needs ``modules``; None if all are installed."""
    missing = [module for module in modules if find_spec(module) is None]
    if not missing:
        return None
    names = " and ".join(missing)
    return (
        f"{command} needs {names}: pip install 'verl-recipe-async[{extra}]' (in a checkout pip install -e '.[{extra}]')"
    )

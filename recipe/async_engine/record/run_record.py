# SPDX-License-Identifier: Apache-2.0
"""Writes the files that a run leaves behind: ``metrics.jsonl``, with one line per step, and ``summary.json``.

Contract: both files exist however the run ended, and the summary of a failed run names the error. ``summary.json`` is
written completely or not at all. After a resume, ``metrics.jsonl`` continues after the last step of the checkpoint, and
``steps``, ``ledger`` and ``staleness`` count from the beginning of training. Lines that cannot be written, for example
on a full disk, are counted and do not end the run. While a `RunRecord` is open, its process owns the folder.
docs/run-record.md describes the keys. Shown by tests/core/test_record.py and every end-to-end test.
"""

import errno
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from recipe.async_engine.core.alarms import Ended, how_it_ended
from recipe.async_engine.record import durable
from recipe.async_engine.record.events import RECORDED, Recorded
from recipe.async_engine.record.figures import STEP
from recipe.async_engine.record.owner import RUN, Owner
from recipe.async_engine.record.schema import FORMAT, steps_of

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
NON_FINITE = "fully_async/non_finite/metrics"
WITH_ALARMS = 3
"""Exit status of the main process after a run that ended with alarms."""


def exit_status(summary: Mapping[str, Any], says_alarms: bool) -> int:
    """Return the exit status of the main process after a run that ended by itself and without an error.

    ``says_alarms`` is the setting `async_training.alarms.exit_status`.
    """
    return WITH_ALARMS if says_alarms and summary.get("ended") == Ended.WITH_ALARMS else 0


class RunRecord:
    """Writes the metrics and the summary of one run into ``folder``.

    ``began`` is the start of the run in seconds since 1970; if None, the present time.

    Raises:
        FolderTaken: another run owns the folder. Nothing in the folder was changed.
    """

    def __init__(self, folder: str | os.PathLike[str], mode: str, began: float | None = None) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._owner = Owner(self._folder, RUN)
        # Only a finished run has a summary, so the summary of an earlier launch is removed.
        (self._folder / SUMMARY_FILE).unlink(missing_ok=True)
        self._began = time.time() if began is None else began
        self._recorded: Recorded | None = None
        self.summary: dict[str, Any] = {
            "format": FORMAT,
            "mode": mode,
            "ended": None,
            "began": self._began,
            "steps": 0,
            "versions": 0,
            "stopped_by": None,
            "resumed": {"step": 0, "groups_kept": 0, "changed": []},
            "validation": {"first": None, "last": None},
            "ledger": {"issued": 0, "trained": 0, "filtered": 0, "failed": 0, "live": 0},
            "staleness": {"bound": None, "max": 0, "mean": 0.0},
            "alarms": {},
            "skipped_updates": 0,
            "unchanged_versions": 0,
            "interrupted": 0,
            "trainer_wait_share": None,
            "rollout_idle_share": None,
            "weight_sync_seconds": 0.0,
            "first_step_seconds": None,
            "metrics_lost": 0,
            "rehearsal": None,
            "account": None,
            "error": None,
        }

    def begin_at(self, step: int) -> None:
        """Keep earlier launches' metrics up to ``step``, from which the run resumes; remove those of later steps."""
        path = self._folder / METRICS_FILE
        kept = []
        try:
            if step > 0 and path.is_file():
                kept = [line for line in path.read_text(errors="replace").splitlines() if _step_of(line) <= step]
            durable.write(path, "".join(line + "\n" for line in kept))
        except OSError as error:
            self._lost(error)

    def step(self, metrics: Mapping[str, Any]) -> None:
        if self.summary["first_step_seconds"] is None:
            self.summary["first_step_seconds"] = time.time() - self._began
        numbers = {key: value if math.isfinite(value) else None for key, value in _scalars(metrics)}
        missing = sum(value is None for value in numbers.values())
        record = {"wall_seconds": time.time() - self._began, NON_FINITE: missing, **numbers}
        line = json.dumps(record).encode() + b"\n"
        try:
            with open(self._folder / METRICS_FILE, "ab", buffering=0) as file:
                before = os.fstat(file.fileno()).st_size
                if file.write(line) < len(line):
                    # Remove the incomplete line; otherwise the next line would be appended to it.
                    file.truncate(before)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._lost(error)

    def _lost(self, error: OSError) -> None:
        if self.summary["metrics_lost"] == 0:
            logger.error("%s cannot be written, the run goes on: %s", METRICS_FILE, error)
        self.summary["metrics_lost"] += 1

    def update(self, state: Mapping[str, Any]) -> None:
        """Update the summary with ``state``, the trainer's report on the run so far."""
        self._recorded = state.get(RECORDED, self._recorded)
        self.summary.update({name: value for name, value in state.items() if name != RECORDED})

    def settle(self, account: Callable[[Recorded], dict[str, Any]]) -> None:
        """Add the time account to the summary; ``account`` computes it from the event record.

        If that fails, log the error and leave the account out.
        """
        if self._recorded is None:
            return
        try:
            self.summary["account"] = account(self._recorded)
        except Exception:
            logger.exception("the time account of the run could not be computed")

    def fail(self, error: BaseException | Mapping[str, str]) -> None:
        if isinstance(error, BaseException):
            error = {"name": type(error).__name__, "message": str(error)}
        self.summary["error"] = {"name": error["name"], "message": error["message"]}

    def close(self, peak_memory_gib: float | None) -> dict[str, Any]:
        """Write the summary and return it, or raise OSError; in either case another launch may then use the folder."""
        self.summary["ended"] = how_it_ended(self.summary["error"], self.summary["alarms"])
        self.summary["wall_seconds"] = time.time() - self._began
        self.summary["peak_memory_gib"] = peak_memory_gib
        try:
            (self._folder / METRICS_FILE).touch()
            durable.write(self._folder / SUMMARY_FILE, json.dumps(self.summary, indent=2) + "\n")
        finally:
            self._owner.release()
        return self.summary


def _step_of(line: str) -> float:
    """Return the step number in a line of metrics; infinity if the line is invalid, such as one cut off by a kill."""
    found, _ = steps_of([line.encode()], METRICS_FILE)
    return float(found[0].get(STEP) or 0) if found else math.inf


def _scalars(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (name, number) for each metric that is a single number; True becomes 1."""
    for key, value in metrics.items():
        if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
            value = value.item()
        if isinstance(value, bool | int | float):
            yield key, +value

# SPDX-License-Identifier: Apache-2.0
"""Runs verl's trackers (``trainer.logger``), each on its own thread, from the first row of metrics to the run's end.

Contract: if a tracker cannot be set up, the launch fails. Afterwards a failing tracker does not affect the run or other
trackers: a row for which it raises an error is lost, a tracker that hangs is abandoned, and only the first error of a
tracker is logged. `Trackers.finish` gives each tracker the last rows and tells it how the run ended, within one
deadline for all trackers. A resumed run continues the files of the trackers ``file`` and ``tensorboard``, without the
rows after its checkpoint. In other trackers each launch is a new run, whose rows have the step numbers of the training.

All calls of a tracker are made on one thread, because MLflow and Trackio identify their run by the thread. Shown by
tests/integration/test_trackers.py, tests/e2e/test_signals.py, test_crash.py and test_disks.py.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import OmegaConf
from verl.utils.tracking import Tracking, ValidationGenerationsLogger

from recipe.async_engine.config.secrets import without_secrets
from recipe.async_engine.core.alarms import how_it_ended
from recipe.async_engine.core.deadlines import REFUSED_S
from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.record import durable

logger = logging.getLogger(__name__)

Call = Callable[[Tracking], Any]

BACKLOG = 4096
"""Largest number of rows that may wait for a tracker. Further rows are dropped."""
LONGEST = 1000
"""Longest text of an error that trackers get, in characters. MLflow refuses tags of a few thousand characters."""
ENDED = "run/ended"
MLFLOW_FILE = "mlflow_run.json"


class TrackerFailed(RecipeError):
    """A tracker could not be set up."""


class _Tracker:
    """One tracker, which ``make`` sets up. A thread of its own makes all calls of the tracker, in order."""

    def __init__(self, name: str, make: Callable[[], Tracking]) -> None:
        self.name = name
        self.ready: Future[None] = Future()
        self.over = threading.Event()
        self._asked: queue.Queue[tuple[str, Call] | None] = queue.Queue(BACKLOG)
        self._has_failed = False
        threading.Thread(target=self._run, args=(make,), name=f"tracker-{name}", daemon=True).start()

    def _run(self, make: Callable[[], Tracking]) -> None:
        try:
            tracking = make()
        except BaseException as error:
            failed = TrackerFailed(f"trainer.logger: {self.name} cannot be set up: {type(error).__name__}: {error}")
            failed.__cause__ = error
            self.over.set()
            self.ready.set_exception(failed)
            return
        self.ready.set_result(None)
        while (asked := self._asked.get()) is not None:
            what, call = asked
            try:
                call(tracking)
            except BaseException as error:  # a disk, a network or a service may raise anything
                self._say(f"does not take {what}", error)
        self.over.set()

    def _say(self, what: str, error: BaseException) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.error("tracker %s %s, the run goes on: %r", self.name, what, error)

    def ask(self, what: str, call: Call | None) -> None:
        """Queue ``call`` for the tracker's thread; None ends the thread. ``what`` says in messages what is sent."""
        try:
            self._asked.put_nowait(None if call is None else (what, call))
        except queue.Full as error:
            self._say(f"is {BACKLOG} rows behind and does not get {what}", error)


class Trackers:
    """The trackers of a run.

    Args:
        names: the trackers' names (``trainer.logger``).
        config: the run's settings, without secrets.
        step: the step of the checkpoint that the run resumes from, or 0.
        startup_s: seconds in which all trackers have to be set up.

    Raises:
        TrackerFailed: a tracker could not be set up.
    """

    def __init__(
        self,
        names: str | Sequence[str] | None,
        project: str,
        experiment: str,
        config: Mapping[str, Any] | None,
        folder: str | Path,
        step: int,
        startup_s: float,
    ) -> None:
        self._project, self._experiment, self._config = project, experiment, config
        self._folder, self._resumed_step, self._last_step = Path(folder), step, step
        self._samples = {name: ValidationGenerationsLogger(project, experiment) for name in _listed(names)}
        self._trackers = [_Tracker(name, partial(self._set_up, name)) for name in self._samples]
        self._ending = threading.Lock()
        self.generations = SimpleNamespace(log=self._log_generations)
        """Stands in for verl's `ValidationGenerationsLogger`, with which verl sends answers of a validation to
        trackers.
        """
        try:
            self._wait(startup_s)
        except TrackerFailed as error:
            self.finish({}, {"name": type(error).__name__, "message": str(error)}, REFUSED_S)
            raise

    def _wait(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        for tracker in self._trackers:
            try:
                tracker.ready.result(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise TrackerFailed(
                    f"trainer.logger: {tracker.name} was not set up within {limit_s:g} s "
                    "(async_training.timeouts.startup)"
                ) from None

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self._last_step, row = step, dict(data)
        for tracker in self._trackers:
            tracker.ask(f"step {step}", partial(self._write, row, step))

    def _log_generations(self, names: str | Sequence[str], samples: Sequence[Any], step: int) -> None:
        """Send answers of a validation, each with input, output and score, to the named trackers, as verl does."""
        for tracker in self._trackers:
            if tracker.name in names:
                tracker.ask(f"the answers of step {step}", partial(self._write_samples, tracker.name, samples, step))

    def finish(self, account: Mapping[str, Any], error: Mapping[str, str] | None, limit_s: float) -> None:
        """Tell the trackers that the run has ended. A second call does nothing.

        Args:
            account: a summary of the run, with the keys of ``summary.json``.
            error: name and message of the error that ended the run, if any.
            limit_s: seconds for all trackers together.
        """
        if not self._ending.acquire(blocking=False):
            return
        said, has_failed = _said(account, error), error is not None
        for tracker in self._trackers:
            end = partial(self._end, tracker.name, said, has_failed)
            tracker.ask("the end of the run", end)
            tracker.ask("anything more", None)
        deadline = time.monotonic() + limit_s
        for tracker in self._trackers:
            if not tracker.over.wait(max(0.0, deadline - time.monotonic())):
                logger.error(
                    "tracker %s has not finished within %g s (of async_training.timeouts.stop); the run does not wait "
                    "longer, and the tracker may lack rows",
                    tracker.name,
                    limit_s,
                )

    # The tracker's thread runs the following methods.

    def _set_up(self, name: str) -> Tracking:
        kept = _rows_kept(_file_of(self._project, self._experiment), self._resumed_step) if name == "file" else b""
        if name == "wandb":
            # By default W&B writes its file only every 15 s. Rows that are not written are lost if the process dies.
            os.environ.setdefault("WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL", "1")
        tracking = Tracking(self._project, self._experiment, [name], self._config)
        if name == "file":
            tracking.logger[name].fp.write(kept)
        elif name == "tensorboard":
            writer = tracking.logger[name].writer
            # If the run resumes, drop the rows after its checkpoint. Otherwise drop all earlier rows, but only if the
            # tracker's folder is inside the run's own folder; elsewhere the rows may be those of other runs.
            if self._resumed_step > 0 or self._folder.resolve() in Path(writer.log_dir).resolve().parents:
                _leave_out(writer, self._resumed_step + 1 if self._resumed_step > 0 else 0)
        elif name == "mlflow" and name in tracking.logger:
            _end_killed_run(import_module(name), self._folder / MLFLOW_FILE)
        return tracking

    def _write(self, row: dict[str, Any], step: int, tracking: Tracking) -> None:
        tracking.log(row, step)
        if (tensorboard := tracking.logger.get("tensorboard")) is not None:
            # TensorBoard would buffer rows for two minutes. Rows that are not written are lost if the process dies.
            tensorboard.writer.flush()

    def _write_samples(self, name: str, samples: Sequence[Any], step: int, tracking: Tracking) -> None:
        self._samples[name].log([name], samples, step)

    def _end(self, name: str, said: dict[str, Any], has_failed: bool, tracking: Tracking) -> None:
        backend = tracking.logger.get(name)
        try:
            if name == "wandb" and backend.run is not None:
                backend.run.summary.update(said)
            elif name == "tensorboard":
                backend.writer.add_text("run", "\n".join(f"- {key}: {value}" for key, value in said.items()))
                if (samples := getattr(self._samples[name], "writer", None)) is not None:
                    samples.close()
            elif name == "file":
                backend.log(said, self._last_step)
            elif name == "mlflow" and backend is not None:
                _end_mlflow_run(import_module(name), said, has_failed, self._folder / MLFLOW_FILE)
        finally:
            tracking.finish(exit_code=int(has_failed))
            if name == "wandb":
                # Wait until W&B's own process has written the last rows, because it would be killed with this process.
                backend.teardown()


def begin_tracking(config: Any, step: int, startup_s: float) -> Trackers:
    """Set up and return the trackers that the configuration names. `Trackers` explains ``step`` and ``startup_s``."""
    trainer = config.trainer
    settings = without_secrets(OmegaConf.to_container(config, resolve=True))
    names = str(trainer.project_name), str(trainer.experiment_name)
    return Trackers(trainer.logger, *names, settings, trainer.default_local_dir, step, startup_s)


def _listed(names: str | Sequence[str] | None) -> list[str]:
    found = [names] if isinstance(names, str) else names or ()
    # "tracking" is verl's old name of "wandb".
    return list(dict.fromkeys("wandb" if name == "tracking" else name for name in found))


def _said(account: Mapping[str, Any], error: Mapping[str, str] | None) -> dict[str, Any]:
    alarms = account.get("alarms") or {}
    validation = account.get("validation") or {}
    said = {
        ENDED: str(how_it_ended(error, alarms)),
        "run/error": None if error is None else f"{error['name']}: {error['message']}"[:LONGEST],
        "run/stopped_by": account.get("stopped_by"),
        "run/alarms": ", ".join(f"{name} {alarm['count']}" for name, alarm in alarms.items()) or None,
        "run/steps": account.get("steps"),
        "run/versions": account.get("versions"),
        "run/validation_first": validation.get("first"),
        "run/validation_last": validation.get("last"),
    }
    return {name: value for name, value in said.items() if value is not None}


def _file_of(project: str, experiment: str) -> Path:
    """Return the file that verl's ``FileLogger`` writes."""
    root = os.path.expanduser(os.getenv("VERL_FILE_LOGGER_ROOT", "."))
    return Path(os.getenv("VERL_FILE_LOGGER_PATH") or Path(root, project, f"{experiment}.jsonl"))


def _rows_kept(file: Path, step: int) -> bytes:
    """Return the rows up to ``step`` that earlier launches wrote to ``file``, which verl is about to overwrite."""
    if step == 0 or not file.is_file():
        return b""
    return b"".join(line + b"\n" for line in file.read_bytes().splitlines() if _is_row(line, step))


def _is_row(line: bytes, last: int) -> bool:
    try:
        row = json.loads(line)
        return row["step"] <= last and ENDED not in row["data"]
    except (ValueError, TypeError, KeyError):  # an incomplete line is not a row
        return False


def _leave_out(writer: Any, step: int) -> None:
    """Make TensorBoard drop the rows of earlier launches from ``step`` on, like its own argument ``purge_step``."""
    from torch.utils.tensorboard.writer import Event, SessionLog

    writer.file_writer.add_event(Event(file_version="brain.Event:2"), step)
    writer.file_writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)), step)


def _end_killed_run(mlflow: Any, file: Path) -> None:
    """Mark the MLflow run of an earlier, killed launch as killed, and store the id of the current run in ``file``."""
    active = mlflow.active_run()
    assert active is not None
    run = active.info.run_id
    try:
        if file.is_file() and (before := json.loads(file.read_text())["run_id"]) != run:
            mlflow.MlflowClient().set_terminated(before, "KILLED")
        durable.write(file, json.dumps({"run_id": run}) + "\n")
    except Exception as error:  # the file may be damaged, or name a run of another tracking server
        logger.warning("the status of an earlier launch's MLflow run is not changed to killed: %r", error)


def _end_mlflow_run(mlflow: Any, said: Mapping[str, Any], has_failed: bool, file: Path) -> None:
    try:
        mlflow.set_tags({name: str(value) for name, value in said.items()})
    finally:
        mlflow.end_run("FAILED" if has_failed else "FINISHED")
    file.unlink(missing_ok=True)

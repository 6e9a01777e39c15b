# SPDX-License-Identifier: Apache-2.0
"""Ends a run that can make no progress but whose trainer would keep waiting, and reports the cause.

Contract: a thread of the trainer's process watches the run from its beginning to its end, start-up and resume included.
It ends the run in one of these cases:

- for ``async_training.timeouts.stall`` seconds no phase of the trainer has begun or ended, no trajectory has ended, and
  no weights were published;
- a stage with a deadline of its own (`RunWatch.within`) is late;
- an actor that the run needs and cannot replace (`RunWatch.hold`) has died.

To end the run, the watch makes the trainer's wait for a batch fail with an error that names the cause. If the trainer
waits for something else, the watch ends the process. The report is written on a thread of its own, so a hanging disk
cannot keep the run alive. The main process gets the error in the answer to its next heartbeat (`RunWatch.last_words`).
`core/deadlines.py` lists all processes that are watched, and the limits. Shown by tests/integration/test_watch.py,
tests/e2e/test_stalls.py and test_ends.py.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from recipe.async_engine.core.deadlines import (
    BLAME_S,
    GRACE_S,
    HELD_AGAIN_S,
    LEAVING_S,
    REPORT_ANSWER_S,
    REPORT_S,
    Silence,
)
from recipe.async_engine.core.errors import CannotGoOn
from recipe.async_engine.record import durable

logger = logging.getLogger(__name__)

STALL_FILE = "stall_report.txt"
LOOK_S = 1.0
STATUS = 70


class Questions:
    """Repeats a remote call to each of several components, and collects the answers without waiting for them.

    Args:
        calls: functions that make the calls, by the name of the called component.
        every_s: seconds between a component's answer and the next call to the component.
    """

    def __init__(self, calls: Mapping[str, Callable[[], ray.ObjectRef]], every_s: float) -> None:
        self._calls = calls
        self._every_s = every_s
        self._ask_at = dict.fromkeys(calls, 0.0)
        self._asked: dict[ray.ObjectRef, str] = {}

    def answered(self) -> list[tuple[str, ray.ObjectRef]]:
        """Return (component, object reference) for each new answer, and make the calls that are due by now."""
        now = time.monotonic()
        done, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0) if self._asked else ([], [])
        answers = [(self._asked.pop(answer), answer) for answer in done]
        self._ask_at |= {name: now + self._every_s for name, _ in answers}
        for name in [name for name, at in self._ask_at.items() if now >= at]:
            del self._ask_at[name]
            self._asked[self._calls[name]()] = name
        return answers


class RunWatch:
    """Watches a run as the module's contract describes, and ends it after ``limit_s`` seconds without progress.

    The report is written into ``folder``, the run's folder, and ``leave`` ends this process.
    """

    def __init__(self, limit_s: float, folder: str | os.PathLike[str], leave: Callable[[int], Any] = os._exit) -> None:
        self._stall = Silence("nothing has begun or ended", limit_s)
        self._file = Path(folder) / STALL_FILE
        self._leave = leave
        self._file.unlink(missing_ok=True)
        began = time.monotonic()
        self.follow(lambda: time.monotonic() - began, lambda: "the run is starting", lambda error: None)
        self._error: CannotGoOn | None = None
        self._stage: Silence | None = None
        self._held: dict[str, Any] = {}
        self._questions = Questions({}, HELD_AGAIN_S)
        self._over, self._heard = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="run-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()

    def follow(
        self,
        silent_s: Callable[[], float],
        describe: Callable[[], str],
        fail: Callable[[BaseException], None],
        leaving: Callable[[dict[str, str]], Any] = lambda error: None,
    ) -> None:
        """Watch a trainer from now on.

        Args:
            silent_s: returns the seconds since the last progress. The module's contract defines progress.
            describe: returns a report on what each process does or waits for.
            fail: makes the trainer's wait for a batch fail with an error.
            leaving: called with the error's name and message before the trainer's process is ended. This call may
                take at most `LEAVING_S` seconds.
        """
        self._silent_s, self._describe, self._fail, self._leaving = silent_s, describe, fail, leaving

    @contextmanager
    def within(self, setting: str, limit_s: float, what: str) -> Iterator[None]:
        """End the run if the ``with`` block takes more than ``limit_s`` seconds; such blocks must not nest.

        The error says that ``what`` took too long, and names the limit's ``setting`` in ``async_training.timeouts``.
        """
        self._stage = Silence(f"{what} takes longer than {limit_s:g} s (async_training.timeouts.{setting})", limit_s)
        try:
            yield
        finally:
            self._stage = None

    def hold(self, actors: Mapping[str, Any]) -> None:
        """From now on, end the run if one of these actors, given by name, dies. Ray must not restart these actors."""
        self._held = dict(actors)
        self._questions = Questions({name: _ask(actor) for name, actor in actors.items()}, HELD_AGAIN_S)

    def cause_of(self, error: Exception) -> Exception:
        """Return what caused the trainer's ``error``: the death of an actor passed to `hold`, or else ``error`` itself.

        The actors are asked whether they are alive, because ``error`` need not mention a death: Ray's error names no
        actor if a connection broke before Ray noticed the loss of the node, and if one rank dies, a collective of
        another rank may fail first.
        """
        cause: BaseException | None = error
        while cause is not None:
            for name, actor in self._held.items():
                if isinstance(cause, RayActorError) and actor._actor_id.hex() == cause.actor_id:
                    return _lost_part(name, cause)
            cause = cause.__cause__
        try:
            lost = self._found_dead()
        except Exception:  # without an answer, the cause stays unknown: return the trainer's own error
            logger.exception("it could not be checked which of the run's actors has died")
            return error
        if lost is None:
            return error
        logger.error("this caused %s: %s", type(error).__name__, error)
        return lost

    def _found_dead(self) -> CannotGoOn | None:
        """Check whether the actors passed to `hold` are alive, and return an error that names a dead one, or None.

        Wait at most `BLAME_S` seconds for the actors' answers.
        """
        asked = {_ask(actor)(): name for name, actor in self._held.items()}
        until = time.monotonic() + BLAME_S
        waiting = list(asked)
        while waiting:
            done, waiting = ray.wait(waiting, timeout=max(0.0, until - time.monotonic()))
            if not done:
                return None
            try:
                ray.get(done[0], timeout=REPORT_ANSWER_S)
            except RayActorError as error:
                return _lost_part(asked[done[0]], error)
            except RayError:
                continue
        return None

    def last_words(self) -> dict[str, str] | None:
        """Return name and message of the error with which the watch ends the run, or None while the run continues."""
        if self._error is None:
            return None
        self._heard.set()
        return _words(self._error)

    def _watch(self) -> None:
        while not self._over.wait(min(LOOK_S, self._stall.limit_s / 10)):
            try:
                error = self._fault()
            except Exception:  # an error inside the watch must not end the watch
                logger.exception("the run's watch failed, and goes on")
                continue
            if error is not None:
                self._end(error)
                return

    def _fault(self) -> CannotGoOn | None:
        stage, silent_s = self._stage, self._silent_s()
        if stage is not None and stage.too_long():
            return CannotGoOn(f"{stage.part}: {self._report()}")
        if self._stall.too_long(silent_s if stage is None else 0.0):
            stalled = f"{self._stall.part} for {silent_s:.0f} s (async_training.timeouts.stall)"
            return CannotGoOn(f"{stalled}: {self._report()}")
        # A late answer does not end the run, because the actor may be busy. A death does, and Ray reports it at once.
        for name, answer in self._questions.answered():
            try:
                ray.get(answer, timeout=REPORT_ANSWER_S)
            except ActorUnavailableError:
                continue
            except RayActorError as error:
                return _lost_part(name, error)
            except RayError:
                continue
        return None

    def _report(self) -> str:
        """Return the report on what each process does, or the reason if there is none within `REPORT_S` seconds."""
        said = [f"the report was not done within {REPORT_S:g} s"]

        def describe() -> None:
            try:
                said.append(self._describe())
            except Exception as error:  # an error in the report must not keep the run from ending
                said.append(f"the report failed with {type(error).__name__}: {error}")

        thread = threading.Thread(target=describe, name="run-report", daemon=True)
        thread.start()
        thread.join(REPORT_S)
        return said[-1]

    def _end(self, error: CannotGoOn) -> None:
        self._error = error
        # Each call has its own thread: a lock that is not released or a disk that hangs must not keep the run alive.
        for step in (self._fail, self._write):
            threading.Thread(target=step, args=(error,), daemon=True).start()
        if not self._over.wait(GRACE_S):
            leaving = threading.Thread(target=self._leaving, args=(_words(error),), daemon=True)
            leaving.start()
            self._heard.wait(GRACE_S)
            leaving.join(LEAVING_S)
            self._leave(STATUS)

    def _write(self, error: BaseException) -> None:
        logger.error("%s: %s", type(error).__name__, error)
        try:
            durable.write(self._file, f"{error}\n")
        except OSError as failure:
            logger.error("the report could not be written: %s", failure)


def _ask(actor: Any) -> Callable[[], ray.ObjectRef]:
    """Return a function that calls ``actor``, whatever its class, to check whether it is alive."""
    return lambda: actor.__ray_call__.remote(lambda actor: None)


def _words(error: BaseException) -> dict[str, str]:
    return {"name": type(error).__name__, "message": str(error)}


def _lost_part(name: str, error: RayActorError) -> CannotGoOn:
    state = "is out of reach" if isinstance(error, ActorUnavailableError) else "died"
    lost = CannotGoOn(f"{name} {state}, and the run cannot go on without it: {error}")
    lost.__cause__ = error
    return lost

# SPDX-License-Identifier: Apache-2.0
"""Ends a run that cannot go on while its trainer waits for something else, and says why.

Contract: a thread of the trainer's process, from the first moment of a run to its end, start-up and resume included. It
ends the run when one of these happens:

- nothing has begun or ended for ``async_training.timeouts.stall`` seconds;
- a stage that has a deadline of its own instead (`RunWatch.within`) is late;
- an actor that the run cannot do without (`RunWatch.hold`) has died.

Ending comes first: the trainer's wait for a batch fails with the error, and where the trainer does not end by it, since
it waits for something else, its process is ended. Reporting comes beside that and cannot keep it from happening. The
main gets the error by the next heartbeat (`RunWatch.last_words`), so it needs no file.

Shown by tests/integration/test_watch.py, tests/e2e/test_stalls.py and test_ends.py.
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
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError

from recipe.async_engine.core.errors import CannotGoOn
from recipe.async_engine.record import durable

logger = logging.getLogger(__name__)

STALL_FILE = "stall_report.txt"
ANSWER_S = 3.0
REPORT_S = 15.0
GRACE_S = 5.0
LOOK_S = 1.0
ASK_AGAIN_S = 15.0
BLAME_S = 5.0
LEAVING_S = 5.0
STATUS = 70


MOST_S = 5.0
"""A longer gap between two looks is the listener's own; only this much of it counts."""


class Silence:
    """Time since the last sign of life, counted in time in which this process could have heard it.

    Seconds in which the listening process was itself stopped (SIGSTOP, a suspended machine) do not count, since nothing
    could be heard then.

    Args:
        limit_s: how long silence may last.
        now: of a clock that never runs backwards, in seconds; as in `look`.
    """

    def __init__(self, limit_s: float, now: float) -> None:
        self.limit_s = limit_s
        self.seconds = 0.0
        self._looked = now

    def heard(self) -> None:
        """A sign of life."""
        self.seconds = 0.0

    def look(self, now: float) -> bool:
        """Count the time since the last look; returns whether silence has lasted too long."""
        self.seconds += min(now - self._looked, MOST_S)
        self._looked = now
        return self.seconds > self.limit_s


class RunWatch:
    """See the module's contract.

    Args:
        limit_s: how long nothing may happen.
        folder: of the run; gets the report.
        leave: ends this process.
    """

    def __init__(self, limit_s: float, folder: str | os.PathLike[str], leave: Callable[[int], Any] = os._exit) -> None:
        self._limit_s = limit_s
        self._file = Path(folder) / STALL_FILE
        self._leave = leave
        self._file.unlink(missing_ok=True)
        began = time.monotonic()
        self.follow(lambda: time.monotonic() - began, lambda: "the run is starting", lambda error: None)
        self._error: CannotGoOn | None = None
        self._stage: tuple[str, Silence] | None = None
        self._staged_until = 0.0
        self._held: dict[str, Any] = {}
        self._asked: dict[Any, str] = {}
        self._ask_at: dict[str, float] = {}
        self._over, self._heard = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="run-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """The run has ended, however it did."""
        self._over.set()

    def follow(
        self,
        silent_s: Callable[[], float],
        describe: Callable[[], str],
        fail: Callable[[BaseException], None],
        leaving: Callable[[dict[str, str]], Any] = lambda error: None,
    ) -> None:
        """There is a trainer from now on: for how long nothing has begun or ended in it, who waits for whom, what makes
        its wait for a batch fail with an error, and what is to be done, in `LEAVING_S`, before its process is ended.
        """
        self._silent_s, self._describe, self._fail, self._leaving = silent_s, describe, fail, leaving

    @contextmanager
    def within(self, setting: str, limit_s: float, what: str) -> Iterator[None]:
        """A stage with a deadline, ``async_training.timeouts.<setting>``; stages are not nested."""
        said = f"{what} takes longer than {limit_s:g} s (async_training.timeouts.{setting})"
        self._stage = said, Silence(limit_s, time.monotonic())
        try:
            yield
        finally:
            self._staged_until, self._stage = time.monotonic(), None

    def hold(self, actors: Mapping[str, Any]) -> None:
        """From now on the run ends if one of these dies; none of them may be one that Ray starts again."""
        self._ask_at, self._held = dict.fromkeys(actors, 0.0), dict(actors)

    def blamed(self, error: Exception) -> Exception:
        """What a trainer's error comes from: the held actor whose call failed with it, or that has died; else itself.

        Ray does not say which actor it was where a connection broke and it does not know yet that the node is gone.
        And where one rank dies, it may be another one's collective that fails first.
        """
        cause: BaseException | None = error
        while cause is not None:
            for name, actor in self._held.items():
                if isinstance(cause, RayActorError) and actor._actor_id.hex() == cause.actor_id:
                    return _lost_part(name, cause)
            cause = cause.__cause__
        try:
            lost = self._found_dead()
        except Exception:  # without Ray nobody can be asked, and the run's own error is what is known
            logger.exception("whether a part of the run is gone cannot be asked")
            return error
        if lost is None:
            return error
        logger.error("%s came of it: %s", type(error).__name__, error)
        return lost

    def _found_dead(self) -> CannotGoOn | None:
        """The held actor that has died, if one has; one that is busy is waited for, as long as `BLAME_S`."""
        asked = {actor.__ray_call__.remote(_nothing): name for name, actor in self._held.items()}
        until = time.monotonic() + BLAME_S
        waiting = list(asked)
        while waiting:
            done, waiting = ray.wait(waiting, timeout=max(0.0, until - time.monotonic()))
            if not done:
                return None
            try:
                ray.get(done[0], timeout=ANSWER_S)
            except RayActorError as error:
                return _lost_part(asked[done[0]], error)
            except RayError:
                continue
        return None

    def last_words(self) -> dict[str, str] | None:
        """Why the watch ends the run: an error's name and message, None if it does not."""
        if self._error is None:
            return None
        self._heard.set()
        return {"name": type(self._error).__name__, "message": str(self._error)}

    def _watch(self) -> None:
        while not self._over.wait(min(LOOK_S, self._limit_s / 10)):
            try:
                error = self._fault()
            except Exception:  # a fault of the watch must not end it
                logger.exception("the run's watch failed, and goes on")
                continue
            if error is not None:
                self._end(error)
                return

    def _fault(self) -> CannotGoOn | None:
        stage, now = self._stage, time.monotonic()
        silent_s = min(self._silent_s(), now - self._staged_until)
        if stage is not None and stage[1].look(now):
            return CannotGoOn(f"{stage[0]}: {self._report()}")
        if stage is None and silent_s > self._limit_s:
            return CannotGoOn(
                f"nothing has begun or ended for {silent_s:.0f} s (async_training.timeouts.stall): {self._report()}"
            )
        return self._lost()

    def _lost(self) -> CannotGoOn | None:
        """Ask each held actor for a sign of life; it comes when the actor's present work is done, its death at once."""
        now = time.monotonic()
        for name in [name for name, at in self._ask_at.items() if now >= at]:
            del self._ask_at[name]
            self._asked[self._held[name].__ray_call__.remote(_nothing)] = name
        done, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0) if self._asked else ([], [])
        for answer in done:
            name = self._asked.pop(answer)
            self._ask_at[name] = now + ASK_AGAIN_S
            try:
                ray.get(answer, timeout=ANSWER_S)
            except RayError as error:
                if isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError):
                    return _lost_part(name, error)
        return None

    def _report(self) -> str:
        """Who waits for whom; bounded, since what it asks may be what is stuck."""
        said = [f"the report was not done within {REPORT_S:g} s"]

        def describe() -> None:
            try:
                said.append(self._describe())
            except Exception as error:  # the run ends without a report rather than not at all
                said.append(f"the report failed with {type(error).__name__}: {error}")

        thread = threading.Thread(target=describe, name="run-report", daemon=True)
        thread.start()
        thread.join(REPORT_S)
        return said[-1]

    def _end(self, error: CannotGoOn) -> None:
        self._error = error
        # Each on a thread of its own: a lock that is not released, or a disk that hangs, must not keep the run alive.
        for step in (self._fail, self._write):
            threading.Thread(target=step, args=(error,), daemon=True).start()
        if not self._over.wait(GRACE_S):
            words = {"name": type(error).__name__, "message": str(error)}
            leaving = threading.Thread(target=self._leaving, args=(words,), daemon=True)
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


def _lost_part(name: str, error: RayActorError) -> CannotGoOn:
    state = "is out of reach" if isinstance(error, ActorUnavailableError) else "died"
    lost = CannotGoOn(f"{name} {state}, and the run cannot go on without it: {error}")
    lost.__cause__ = error
    return lost


def _nothing(actor: Any) -> None:
    """What a held actor is asked to do."""


def answers(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What parts say, by name: object references of their answers; an exception's text, or that none came."""
    said: dict[str, Any] = {}
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S) if asked else None
    for name, reference in asked.items():
        try:
            said[name] = ray.get(reference, timeout=0)
        except GetTimeoutError:
            said[name] = f"DOES NOT ANSWER within {ANSWER_S:g} s"
        except RayError as error:
            said[name] = f"IS DEAD or failed: {type(error).__name__}"
    return said

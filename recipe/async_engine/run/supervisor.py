# SPDX-License-Identifier: Apache-2.0
"""Detects, in the main process, that the trainer's process, Ray's control process or the main thread itself hangs.

Contract: the main process never waits without a deadline. While it waits for the trainer's events, it calls two
processes every second. One is the trainer's process, which has a thread for answering these calls. The other is Ray's
control process, which is asked for the list of nodes. The run ends if the trainer's process has not answered for
``async_training.timeouts.heartbeat`` seconds (for its first answer: ``startup`` seconds). The run also ends if the
control process has not answered for `CONTROL_S` seconds, because after 60 s Ray would kill the main process. If the
main thread itself is stuck, `LastResort` ends the process. `core/deadlines.py` lists all limits. Shown by
tests/integration/test_supervisor.py, test_shutdown.py and tests/e2e/test_ends.py.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.exceptions import RayActorError

from recipe.async_engine.actors.watch import Questions
from recipe.async_engine.config.sections import Timeouts
from recipe.async_engine.core.deadlines import BEAT_S, CLOSE_S, CONTROL_S, FORCE_S, LEAVE_S, Silence
from recipe.async_engine.core.errors import CannotGoOn
from recipe.async_engine.run.runner import Ended

LOOK_S = 1.0
NOT_STARTED = "(async_training.timeouts.startup): it has not started; the cluster may have no free CPU for it"
SILENT = "(async_training.timeouts.heartbeat): it is stopped, or one call keeps Python's lock there"
CONTROL_LOST = "it died, was stopped, or its node is gone; its log is gcs_server.out in Ray's session folder"


@contextmanager
def control_probe(limit_s: float, ask: Callable[[], Any] = ray.nodes) -> Iterator[Silence]:
    """While the context lasts, ask Ray's control process for its nodes every second.

    A separate thread does this, because the call may never return. The context's value is a `Silence`, which measures
    for how long the control process has not answered.
    """
    silence = Silence("Ray's control process (GCS) has not answered", min(limit_s, CONTROL_S))
    over = threading.Event()

    def probe() -> None:
        while not over.wait(BEAT_S):
            # Without this check, `ray.nodes` would start another Ray after the main process has shut down its own.
            if ray.is_initialized():
                with suppress(Exception):  # a failed call does not count as an answer
                    ask()
                    silence.heard()

    thread = threading.Thread(target=probe, name="control-probe", daemon=True)
    thread.start()
    try:
        yield silence
    finally:
        over.set()
        thread.join(BEAT_S)


def listen(
    events: Any,
    beat: Callable[[], ray.ObjectRef],
    control: Silence,
    timeouts: Timeouts,
    alive: Callable[[], Any] = lambda: None,
) -> Iterator[Any]:
    """Yield the trainer's events until its run ends, and watch that the processes answer (see the module's docstring).

    Args:
        events: the generator of object references that `TaskRunner.run` returns.
        beat: calls `TaskRunner.beat`.
        control: measures how long Ray's control process has been silent (`control_probe`).
        alive: called every second, to show that the caller of this function is not stuck.

    Raises:
        CannotGoOn: the trainer's process, or Ray's control process, has not answered for too long.
        RayActorError: the trainer's process has died, and its `RunWatch` had reported no error.
    """
    trainer, missing = Silence("the trainer's process has given no sign of life", timeouts.startup), NOT_STARTED
    closing: Silence | None = None
    last_words: dict[str, str] | None = None
    questions = Questions({"trainer": beat}, BEAT_S / 2)
    while closing is None or not closing.too_long():
        alive()
        ready, _ = ray.wait([events], timeout=BEAT_S)
        with suppress(RayActorError):  # if the actor has died, the events end with the same error
            for _, answer in questions.answered():
                last_words = ray.get(answer, timeout=timeouts.heartbeat) or last_words
                trainer.heard()
                trainer.limit_s, missing = timeouts.heartbeat, SILENT
        if last_words is not None:
            trainer.limit_s = min(timeouts.heartbeat, LEAVE_S)
        if ready:
            try:
                event = ray.get(next(events), timeout=timeouts.heartbeat)
            except StopIteration:
                return
            except RayActorError:
                if last_words is None:
                    raise
                event = Ended({}, {**last_words, "traceback": ""})
            if isinstance(event, Ended):  # the trainer may still be writing its last files
                closing = Silence("the trainer is closing", CLOSE_S)
            yield event
        if control.too_long():
            raise CannotGoOn(f"{control.part} for {control.limit_s:g} s: {CONTROL_LOST}")
        if trainer.too_long():
            if last_words is not None and closing is None:
                yield Ended({}, {**last_words, "traceback": ""})
                return
            raise CannotGoOn(f"{trainer.part} for {trainer.limit_s:g} s {missing}")


class LastResort:
    """Ends this process, from another thread, if the main thread does not finish its present task in time.

    Args:
        end: called with the reason before the process ends; it may hang or fail.
    """

    def __init__(self, end: Callable[[str], Any]) -> None:
        self._end = end
        self._allowed: Silence | None = None
        threading.Thread(target=self._watch, name="last-resort", daemon=True).start()

    def allow(self, what: str, limit_s: float) -> None:
        """Record that the main thread begins the task ``what``, and must call this again within ``limit_s`` seconds."""
        self._allowed = Silence(what, limit_s)

    def stop(self) -> None:
        self._allowed = None

    def _watch(self) -> None:
        while (allowed := self._allowed) is None or not allowed.too_long():
            time.sleep(LOOK_S)
        why = f"{allowed.part} took longer than {allowed.limit_s:g} s; the run is ended by force"
        ending = threading.Thread(target=self._end, args=(why,), daemon=True)
        ending.start()
        ending.join(FORCE_S)
        os._exit(1)

# SPDX-License-Identifier: Apache-2.0
"""What the main hears of a run: the events that the trainer yields, and signs of life of what it cannot do without.

Contract: the main never waits unseen. While it waits for events it asks the trainer's process for a heartbeat every
second, on a thread there that nothing else uses, and Ray's control process for its nodes. The run ends when the trainer
has not answered for ``async_training.timeouts.heartbeat`` seconds (``startup`` before its first answer), or the control
process for `CONTROL_S`: Ray itself would end the main after 60 s, without a word.

Shown by tests/integration/test_heartbeat.py and tests/e2e/test_ends.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayActorError

from recipe.async_engine.core.config import Timeouts
from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.core.silence import Silence
from recipe.async_engine.run.runner import Ended

BEAT_S = 1.0
CONTROL_S = 40.0
CLOSE_S = 60.0


class TrainerSilent(RecipeError):
    """The trainer's process gives no sign of life."""


class ControlProcessLost(RecipeError):
    """Ray's control process gives no sign of life."""


class ControlProbe:
    """Asks Ray's control process for its nodes again and again, on a thread; a context manager.

    Attributes:
        answered: how often it has answered.
    """

    def __init__(self, ask: Callable[[], Any] = ray.nodes) -> None:
        self.answered = 0
        self._ask = ask
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control-probe", daemon=True)

    def __enter__(self) -> ControlProbe:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ask no more."""
        self._over.set()
        self._thread.join(BEAT_S)

    def _run(self) -> None:
        while not self._over.wait(BEAT_S):
            # Asked after Ray has been left, `ray.nodes` would start another one.
            if not ray.is_initialized():
                continue
            try:
                self._ask()
            except Exception:  # no answer, whatever the reason
                continue
            self.answered += 1


class Listener:
    """The trainer's events, to the end of its run; see the module's contract.

    Args:
        events: the object-reference generator of `TaskRunner.run`.
        beat: asks for `TaskRunner.beat`.
        control: of the Ray that the run is in.
        timeouts: deadlines.
        alive: called every second, so that whoever watches the caller knows.
    """

    def __init__(
        self,
        events: Any,
        beat: Callable[[], ray.ObjectRef],
        control: ControlProbe,
        timeouts: Timeouts,
        alive: Callable[[], Any] = lambda: None,
    ) -> None:
        self._events, self._beat, self._control, self._alive = events, beat, control, alive
        self._limit_s = timeouts.heartbeat
        now = time.monotonic()
        self._trainer = Silence(timeouts.startup, now)
        self._controller = Silence(min(timeouts.heartbeat, CONTROL_S), now)
        self._closing: Silence | None = None
        self._asked: ray.ObjectRef | None = None
        self._ask_at = now
        self._answered = 0
        self._has_started = False
        self._last_words: dict[str, str] | None = None

    def __iter__(self) -> Iterator[Any]:
        """Yield events.

        Raises:
            TrainerSilent: the trainer's process gives no sign of life.
            ControlProcessLost: Ray's control process gives none.
            RayActorError: the trainer's process has died, and its watch had not said why.
        """
        while True:
            self._alive()
            if self._asked is None and time.monotonic() >= self._ask_at:
                self._asked = self._beat()
            awaited = [self._events] if self._asked is None else [self._events, self._asked]
            ready, _ = ray.wait(awaited, num_returns=1, timeout=BEAT_S)
            if self._asked in ready:
                self._take_beat()
            if self._events in ready:
                try:
                    yield self._next_event()
                except StopIteration:
                    return
            if self._closing is not None and self._closing.look(time.monotonic()):
                return  # the run is over, whatever still writes its last files
            self._check()

    def _take_beat(self) -> None:
        try:
            self._last_words = ray.get(self._asked, timeout=self._limit_s) or self._last_words
        except RayActorError:
            pass  # the events end with it
        else:
            self._has_started = True
            self._trainer.limit_s = self._limit_s
            self._trainer.heard()
        self._asked, self._ask_at = None, time.monotonic() + BEAT_S

    def _next_event(self) -> Any:
        try:
            event = ray.get(next(self._events), timeout=self._limit_s)
        except RayActorError:
            if self._last_words is None:
                raise
            event = Ended({}, {**self._last_words, "traceback": ""})
        if isinstance(event, Ended):
            self._closing = Silence(CLOSE_S, time.monotonic())
        return event

    def _check(self) -> None:
        now = time.monotonic()
        if self._control.answered != self._answered:
            self._answered = self._control.answered
            self._controller.heard()
        if self._controller.look(now):
            raise ControlProcessLost(
                f"Ray's control process (GCS) has not answered for {self._controller.limit_s:g} s: it died, was "
                "stopped, or its node is gone; its log is gcs_server.out in Ray's session folder"
            )
        if self._trainer.look(now):
            raise TrainerSilent(self._why_silent())

    def _why_silent(self) -> str:
        said = f"the trainer's process has given no sign of life for {self._trainer.limit_s:g} s "
        if self._has_started:
            return f"{said}(async_training.timeouts.heartbeat): it is stopped, or one call keeps Python's lock there"
        return f"{said}(async_training.timeouts.startup): it has not started; the cluster may have no free CPU for it"

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
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.exceptions import RayActorError

from recipe.async_engine.actors.watch import Silence
from recipe.async_engine.config.sections import Timeouts
from recipe.async_engine.core.errors import CannotGoOn
from recipe.async_engine.run.runner import Ended

BEAT_S = 1.0
CONTROL_S = 40.0
CLOSE_S = 60.0
LEAVE_S = 20.0
"""The watch ends its process within 15 s of its last words; a stopped fork of it may keep its connections open."""


@contextmanager
def control_probe(limit_s: float, ask: Callable[[], Any] = ray.nodes) -> Iterator[Silence]:
    """Ask Ray's control process for its nodes every second, on a thread; yields how long it has been silent."""
    silence = Silence(min(limit_s, CONTROL_S), time.monotonic())
    over = threading.Event()

    def probe() -> None:
        while not over.wait(BEAT_S):
            # Asked after Ray has been left, `ray.nodes` would start another one.
            if ray.is_initialized():
                with suppress(Exception):  # no answer, whatever the reason
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
    """Yield the trainer's events, to the end of its run; see the module's contract.

    Args:
        events: the object-reference generator of `TaskRunner.run`; ``beat`` asks for `TaskRunner.beat`.
        control: of the Ray that the run is in (`control_probe`).
        alive: called every second, so that whoever watches the caller knows.

    Raises:
        CannotGoOn: the trainer's process, or Ray's control process, gives no sign of life.
        RayActorError: the trainer's process has died, and its watch had not said why.
    """
    trainer, has_started = Silence(timeouts.startup, time.monotonic()), False
    last_words: dict[str, str] | None = None
    asked, ask_at = None, 0.0
    closing: Silence | None = None
    while closing is None or not closing.look(time.monotonic()):
        alive()
        if asked is None and time.monotonic() >= ask_at:
            asked = beat()
        ready, _ = ray.wait([events] if asked is None else [events, asked], timeout=BEAT_S)
        if asked in ready:
            with suppress(RayActorError):  # the events end with it
                last_words = ray.get(asked, timeout=timeouts.heartbeat) or last_words
                limit_s = timeouts.heartbeat if last_words is None else min(timeouts.heartbeat, LEAVE_S)
                trainer, has_started = Silence(limit_s, time.monotonic()), True
            asked, ask_at = None, time.monotonic() + BEAT_S
        if events in ready:
            try:
                event = ray.get(next(events), timeout=timeouts.heartbeat)
            except StopIteration:
                return
            except RayActorError:
                if last_words is None:
                    raise
                event = Ended({}, {**last_words, "traceback": ""})
            if isinstance(event, Ended):  # what still writes its last files may take so long
                closing = Silence(CLOSE_S, time.monotonic())
            yield event
        if control.look(time.monotonic()):
            raise CannotGoOn(
                f"Ray's control process (GCS) has not answered for {control.limit_s:g} s: it died, was stopped, or its "
                "node is gone; its log is gcs_server.out in Ray's session folder"
            )
        if trainer.look(time.monotonic()):
            if last_words is not None and closing is None:
                yield Ended({}, {**last_words, "traceback": ""})
                return
            raise CannotGoOn(_why_silent(trainer.limit_s, has_started))


def _why_silent(limit_s: float, has_started: bool) -> str:
    said = f"the trainer's process has given no sign of life for {limit_s:g} s "
    if has_started:
        return f"{said}(async_training.timeouts.heartbeat): it is stopped, or one call keeps Python's lock there"
    return f"{said}(async_training.timeouts.startup): it has not started; the cluster may have no free CPU for it"

# SPDX-License-Identifier: Apache-2.0
"""Writes the event record of a run: what each process did, when, and for how long.

Contract: the modules of the trainer's process report events with :meth:`Recording.tell`, on any thread. Rollout
servers, log-prob servers and agent-loop workers store their activity. A thread of this module asks these processes for
their activity, every second at first and less often in a long run. The same calls measure the offset of their clocks
from this process's clock (`recipe.async_engine.record.events`). If a server dies, the time since its last answer is
recorded as `lost_with_replica`, and the time until it is replaced, or the run ends, as `down`. From the 10,000th group
on, events of trajectories and groups are kept for one group in two, later for one in four, and so on. An error of the
recording never ends a run. Events that could not be read or written are missing in the record and in the time report,
which says so. Shown by tests/integration/test_recording.py and tests/accounts.py.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from recipe.async_engine.core.deadlines import AGENTS_TOLD_S, RECORD_WRITE_S, TOLD_S
from recipe.async_engine.core.errors import EngineDied
from recipe.async_engine.record.event_file import EventFile
from recipe.async_engine.record.events import (
    AGENTS,
    BEGINS,
    ENDS,
    GROUPS,
    JOINED,
    LOST,
    RUN,
    SAMPLED,
    TRAJECTORIES,
    Activity,
    Class,
    Devices,
    Event,
    Exchange,
    Lane,
    OtherClock,
    Recorded,
    TokenBooks,
)

logger = logging.getLogger(__name__)

ASK_S, LONGEST_ASK_S = 1.0, 30.0
# The interval at which processes are asked for their activity is the run's duration so far divided by this number, but
# at least `ASK_S` and at most `LONGEST_ASK_S` seconds.
ASKED_IN_ALL = 2_000
MANY = 5_000
GROUPS_IN_FULL = 10_000


def is_kept(group: int) -> bool:
    """Return whether the record keeps the events of the group with this number.

    It keeps all of the first 10,000 groups, one in two of the next 10,000, one in four of the next 20,000, and so on.
    """
    return group % (1 << (group // GROUPS_IN_FULL).bit_length()) == 0


@dataclass
class _Device:
    """A server or agent-loop worker that is asked for its activity.

    known_until: the time up to which its activity is recorded, in seconds since the run began.
    """

    name: str
    handle: Any
    known_until: float
    clock: OtherClock | None = None
    life: str = ""
    asked: tuple[float, Any] | None = None
    down: bool = False
    tokens: dict[str, int] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return self.name.partition(" ")[0]

    @property
    def is_counted(self) -> bool:
        """Whether the process uses accelerators, whose time the record accounts for. Agent-loop workers use none."""
        return self.kind != AGENTS


class Recording:
    """Writes the event record of a run.

    Args:
        devices: the devices of the run's time account, with their numbers of accelerators.
        header: further facts about the run for the record's header.
        parts: a function that returns the actors whose activity is recorded, by the names that their events have in the
            record's column ``lane``.
        clock: the clock of this process, in seconds.

    Attributes:
        deaths: number of times that a rollout or log-prob server died.
        cpu_s: CPU seconds of the recording's own thread.
        recorded: a description of the closed record, or None before :meth:`close`.
    """

    def __init__(
        self,
        folder: str,
        devices: Devices,
        header: Mapping[str, Any],
        parts: Callable[[], Mapping[str, Any]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._devices, self._parts, self._clock = devices, parts, clock
        self._began = clock()
        about = {
            "accelerators": dict(devices.accelerators),
            "shared": devices.shared,
            "hybrid": devices.hybrid,
            "began": time.time(),
        }
        self._file = EventFile(folder, {**header, **about})
        self._lanes: dict[str, Lane] = {}
        self._told: deque[Event] = deque()
        self._lock = threading.Lock()
        self._known: dict[str, _Device] = {}
        self._gone: list[_Device] = []
        self._last_write = 0.0
        self.deaths = 0
        self.cpu_s = 0.0
        self.recorded: Recorded | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._record, name="record of events", daemon=True)
        self._thread.start()

    def tell(self, event: Event) -> None:
        """Record an event whose times were taken from this process's clock."""
        if event.lane in (TRAJECTORIES, GROUPS) and event.group is not None and not is_kept(event.group):
            return
        self._told.append(event._replace(start=event.start - self._began, end=event.end - self._began))

    def follow(self, name: str, lane: Lane) -> None:
        """From now on, copy what ``lane`` collects in this process to the event record, where it is called ``name``."""
        lane.take()
        self._lanes[name] = lane

    def ask(self) -> None:
        """Ask all actors for their activity now. What an actor did before it is first asked is not recorded."""
        try:
            with self._lock:
                self._ask_all()
        except Exception:  # an error of the record must not end the run
            logger.exception("the event record lacks some events")

    def close(self, until: float, tokens: TokenBooks | None) -> Recorded:
        """Ask all actors once more, write all events, close the file and return a description of the record.

        The record ends at ``until``, a time of this process's clock. If an earlier write is still going on after
        `RECORD_WRITE_S` seconds, nothing more is written.
        """
        self._over.set()
        self._thread.join(2 * TOLD_S)
        with self._locked_soon() as locked:
            if locked:
                self._ask_all()
                self._write()
                self._file.close()
        if self._file.lost:
            logger.error("%d events are not in the record: it could not be written", self._file.lost)
        self.recorded = Recorded(
            self._file.path, self._devices, until - self._began, tokens, self._file.lost, self.cpu_s
        )
        return self.recorded

    def engine_tokens(self) -> dict[str, int] | None:
        """Ask all servers for their token counts, and return the sums, or None if one has died or does not answer."""
        with self._locked_soon() as locked:
            if not locked:
                return None
            self._ask_all()
            devices = [device for device in self._known.values() if device.is_counted]
            if self.deaths or any(device.asked is not None for device in devices):
                return None
            sums: Counter[str] = Counter()
            for device in devices:
                sums.update(device.tokens)
        return dict(sums)

    @contextmanager
    def _locked_soon(self) -> Iterator[bool]:
        """Try to take the lock for `RECORD_WRITE_S` seconds, and yield whether it was taken."""
        locked = self._lock.acquire(timeout=RECORD_WRITE_S)
        if not locked:
            logger.error(
                "the event record is incomplete: a write to %s has not returned for %g s",
                self._file.path,
                RECORD_WRITE_S,
            )
        try:
            yield locked
        finally:
            if locked:
                self._lock.release()

    # The recording's thread runs the following methods.

    def _record(self) -> None:
        while not self._over.wait(min(LONGEST_ASK_S, max(ASK_S, self._now / ASKED_IN_ALL))):
            try:
                with self._lock:
                    self._ask_all()
                    if self._now - self._last_write > RECORD_WRITE_S or len(self._told) > MANY:
                        self._write()
            except Exception:  # an error of the record must not end the run
                logger.exception("the event record lacks some events")
            self.cpu_s = time.thread_time()

    @property
    def _now(self) -> float:
        return self._clock() - self._began

    def _write(self) -> None:
        self._last_write = self._now
        for device in (*self._known.values(), *self._gone):
            if device.down:
                self._fill(device, Class.DOWN, self._now)
            elif SAMPLED in device.tokens:
                self._note(SAMPLED, device.name, self._now, device.tokens[SAMPLED])
        self._file.write([self._told.popleft() for _ in range(len(self._told))])

    def _ask_all(self) -> None:
        for name, lane in self._lanes.items():
            for span in lane.take():
                self._told.append(Event(name, span.what, span.start - self._began, span.end - self._began))
        parts = dict(self._parts())
        for name, device in list(self._known.items()):
            if name not in parts:
                self._gone.append(self._known.pop(name))
                self._dies(device)
            elif parts[name] is not device.handle:
                device.handle, device.asked = parts[name], None
        for name, handle in parts.items():
            if name not in self._known:
                self._known[name] = self._again(name, handle) or _Device(name, handle, 0.0)
        asked = {}
        for device in self._known.values():
            if device.asked is None:
                device.asked = self._clock(), device.handle.activity.remote()
            asked[device.asked[1]] = device
        began, waiting = self._clock(), list(asked)
        while waiting:
            # An agent loop may keep its worker from answering, so wait less if only such workers have not answered.
            limit = TOLD_S if any(asked[reference].is_counted for reference in waiting) else AGENTS_TOLD_S
            if (left := began + limit - self._clock()) <= 0:
                break
            answered, waiting = ray.wait(waiting, timeout=left)
            for reference in answered:
                self._take(asked[reference], reference)

    def _again(self, name: str, handle: Any) -> _Device | None:
        """If a process of this name was lost, return its `_Device` with the new process's handle; else return None."""
        for device in self._gone:
            if device.name == name:
                self._gone.remove(device)
                device.handle, device.asked = handle, None
                return device
        return None

    def _take(self, device: _Device, reference: Any) -> None:
        came = self._clock()
        assert device.asked is not None
        asked, device.asked = device.asked[0], None
        try:
            answer: Activity = ray.get(reference, timeout=0)
        except RayActorError:
            self._dies(device)
            return
        except RayError as error:
            if isinstance(getattr(error, "cause", None), EngineDied):
                self._dies(device)
                return
            logger.warning("the activity of %s is not recorded at present: %s", device.name, error)
            return
        exchange = Exchange(asked, answer.now, came)
        if device.clock is None or answer.life != device.life:
            device.clock = OtherClock(exchange)
            self._begins(device, answer)
        else:
            device.clock.note(exchange)
        known = until = device.known_until
        for span in answer.spans:
            start, end = (device.clock.here(time) - self._began for time in (span.start, span.end))
            # Leave out the part of the span before `known`: the record has an activity for this time already, which is
            # `lost_with_replica` if the device was believed to be dead.
            if end > known:
                self._told.append(Event(device.name, span.what, max(start, known), end, span.share, tokens=span.tokens))
                until = max(until, end)
        device.known_until = until
        device.tokens = answer.tokens

    def _begins(self, device: _Device, answer: Activity) -> None:
        """Handle the first answer of a new process, which may have replaced a process that died."""
        assert device.clock is not None
        first = answer.spans[0].start if answer.spans else answer.now
        start = max(0.0, device.clock.here(first) - self._began)
        if not device.is_counted:
            device.known_until = max(device.known_until, start)
        elif device.life:
            # The server was restarted under the same name. Record the time until the restart as `down`.
            if not device.down:
                self._dies(device)
            self._fill(device, Class.DOWN, start)
            self._note(JOINED, device.name, start)
        elif (lost := next((other for other in self._gone if other.kind == device.kind), None)) is not None:
            self._gone.remove(lost)
            start = max(start, lost.known_until)
            self._fill(lost, Class.DOWN, start)
            self._note(ENDS, lost.name, start)
            self._note(BEGINS, device.name, start)
            self._note(JOINED, device.name, start)
        device.life, device.down = answer.life, False

    def _dies(self, device: _Device) -> None:
        if device.down or not device.is_counted:
            return
        device.down = True
        self.deaths += 1
        self._note(LOST, device.name, self._now)
        if device.life:
            self._fill(device, Class.LOST, self._now)

    def _fill(self, device: _Device, what: Class, until: float) -> None:
        if until > device.known_until:
            self._told.append(Event(device.name, what, device.known_until, until))
            device.known_until = until

    def _note(self, what: str, device: str, at: float, tokens: int | None = None) -> None:
        self._told.append(Event(RUN, what, at, at, tokens=tokens, text=device))

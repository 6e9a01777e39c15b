# SPDX-License-Identifier: Apache-2.0
"""The record of a run's events, as it is written.

Contract: whoever does something in the trainer's process tells :meth:`Recording.tell`, on any thread. Rollout and
log-prob servers keep what they did until a thread here asks for it, every second at first and less often in a long run;
their clocks are followed by these questions (`recipe.async_engine.record.events`). Of a device that died, what it did
after it was last asked is `lost_with_replica`, and the time from there to the end, or to the one in its place, `down`.
From the 10,000th group on, the rows of trajectories and groups are kept of one group in two, in four and so on. Nothing
here ends a run: what cannot be asked or written is not known to the account that is made of it, which says so.

Shown by tests/integration/test_recording.py and tests/accounts.py.
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
# One question for each 2,000th part of the run so far.
ASKED_IN_ALL = 2_000
MANY = 5_000
GROUPS_IN_FULL = 10_000


def is_kept(group: int) -> bool:
    """Whether the rows of this group are: each of the first 10,000, one in two of the next, and so on."""
    return group % (1 << (group // GROUPS_IN_FULL).bit_length()) == 0


@dataclass
class _Device:
    """A process that is asked; times are of the run's clock."""

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
        """Whether it is a device of the account; agents are asked only for what their trajectories are at."""
        return self.kind != AGENTS


class Recording:
    """See the module's contract.

    Args:
        folder: of the run.
        devices: what the account is of.
        header: what else the record says of the run.
        parts: whom to ask, actor handles by the names of their lanes; called again and again.

    Attributes:
        deaths: devices that died.
        cpu_s: CPU seconds of its own thread.
        recorded: what there is, once it is closed.
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
        about = {"accelerators": dict(devices.accelerators), "shared": devices.shared, "began": time.time()}
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
        """Something was done; times by the clock of this process."""
        if event.lane in (TRAJECTORIES, GROUPS) and event.group is not None and not is_kept(event.group):
            return
        self._told.append(event._replace(start=event.start - self._began, end=event.end - self._began))

    def follow(self, name: str, lane: Lane) -> None:
        """What this lane of this process does from now on is recorded under this name."""
        lane.take()
        self._lanes[name] = lane

    def ask(self) -> None:
        """Ask everyone now: what one does before it is asked for the first time is not recorded."""
        try:
            with self._lock:
                self._ask_all()
        except Exception:  # a run does not end for its record
            logger.exception("the record of events misses something")

    def close(self, until: float, tokens: TokenBooks | None) -> Recorded:
        """Ask once more and write what there is; the record covers the run up to ``until``, by this process's clock.

        Where a write has not returned for `RECORD_WRITE_S`, it is left to what the file has.
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
        """Sums over the counts of all engines, which are asked now; None if one has died or does not answer."""
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
        """Have the lock unless the thread keeps it for `RECORD_WRITE_S`; says whether it was had."""
        locked = self._lock.acquire(timeout=RECORD_WRITE_S)
        if not locked:
            logger.error(
                "the record lacks its end: a write to %s has not returned for %g s", self._file.path, RECORD_WRITE_S
            )
        try:
            yield locked
        finally:
            if locked:
                self._lock.release()

    # The thread's work.

    def _record(self) -> None:
        while not self._over.wait(min(LONGEST_ASK_S, max(ASK_S, self._now / ASKED_IN_ALL))):
            try:
                with self._lock:
                    self._ask_all()
                    if self._now - self._last_write > RECORD_WRITE_S or len(self._told) > MANY:
                        self._write()
            except Exception:  # a run does not end for its record
                logger.exception("the record of events misses something")
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
                self._known[name] = _Device(name, handle, 0.0)
        asked = {}
        for device in self._known.values():
            if device.asked is None:
                device.asked = self._clock(), device.handle.activity.remote()
            asked[device.asked[1]] = device
        began, waiting = self._clock(), list(asked)
        while waiting:
            # An agent loop may keep its worker from answering; nothing else waits for that.
            limit = TOLD_S if any(asked[reference].is_counted for reference in waiting) else AGENTS_TOLD_S
            if (left := began + limit - self._clock()) <= 0:
                break
            answered, waiting = ray.wait(waiting, timeout=left)
            for reference in answered:
                self._take(asked[reference], reference)

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
            logger.warning("%s does not say what it does: %s", device.name, error)
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
            # Nothing is told twice of a time; what a lost one left is told already.
            if end > known:
                self._told.append(Event(device.name, span.what, max(start, known), end, span.share, tokens=span.tokens))
                until = max(until, end)
        device.known_until = until
        device.tokens = answer.tokens

    def _begins(self, device: _Device, answer: Activity) -> None:
        """The first answer of a process."""
        assert device.clock is not None
        first = answer.spans[0].start if answer.spans else answer.now
        start = max(0.0, device.clock.here(first) - self._began)
        if not device.is_counted:
            device.known_until = max(device.known_until, start)
        elif device.life:
            # The same place: it is the lost one's account that goes on.
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
        """From where its events end up to then it was this."""
        if until > device.known_until:
            self._told.append(Event(device.name, what, device.known_until, until))
            device.known_until = until

    def _note(self, what: str, device: str, at: float, tokens: int | None = None) -> None:
        self._told.append(Event(RUN, what, at, at, tokens=tokens, text=device))

# SPDX-License-Identifier: Apache-2.0
"""A model of the order in which accelerators work: who waits for whom, and when work is done. For tests only.

Members are processes with one accelerator each, represented by threads of one process. Each request to a device is
queued with what it has to wait for; each rule below names its source. The documents are NVIDIA's CUDA Runtime API
reference ("CUDA RT"), the CUDA C++ Programming Guide ("CUDA PG") and the NCCL User Guide ("NCCL").

Work is done as late as the documents allow: only when a host waits for it. So if a program reads a result without
having waited for it, the work has not been done. With another ``pace`` some work is done at once.

Collectives are in nccl_order.py, and circle_watch.py finds circular waits.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

LOOK_S = 0.05
LATE, AT_ONCE, MIXED = "late", "at once", "mixed"
LEGACY, BLOCKING, NON_BLOCKING = "legacy default", "blocking", "non-blocking"

Effect = Callable[[], None]
Joint = Callable[[dict[int, Any]], None]
"""The effect of a collective on each rank's memory."""


class Gone(BaseException):
    """The process of this thread has died, or the world has ended; no effect of it is visible to others."""


class MisuseError(Exception):
    """A use that NCCL's documents leave undefined, such as collectives that do not match."""


@dataclass(eq=False)
class Call:
    """The activity of one process for one call; all threads that serve it count as one in what they wait for."""

    device: Device
    name: str
    waits: list[Wait] = field(default_factory=list)
    deeds: int = 0
    """Number of requests to the model so far."""
    last_deed: float = 0.0
    """Time of the last request, on the monotonic clock."""


@dataclass(eq=False)
class Wait:
    """A thread that is blocked until all of ``goals`` are done."""

    call: Call
    what: str
    goals: list[Op]


@dataclass(eq=False)
class Op:
    """An operation that a device performs after all those that it ``needs``."""

    stream: Stream
    name: str
    needs: list[Op]
    effect: Effect | None
    by: str
    """The call that requested it."""
    behind: frozenset[str] = frozenset()
    """The calls of this device whose work it had to wait for."""
    meeting: Meeting | None = None
    done: bool = False


@dataclass(eq=False)
class Meeting:
    """An operation of several members, which blocks their streams until all have launched and reached it.

    NCCL, "Collective Operations": these "have to be called for each rank (hence CUDA device) to form a complete
    collective operation. Failure to do so will result in other ranks waiting indefinitely."
    """

    name: str
    size: int
    kind: tuple[object, ...] = ()
    effect: Joint | None = None
    memory: dict[int, Any] = field(default_factory=dict)
    """The memory that each rank passed, for the effect."""
    ops: dict[int, Op] = field(default_factory=dict)
    """The parts that have been launched, by rank."""
    members: dict[int, Device] = field(default_factory=dict)
    broken: bool = False
    """Whether a member has left, so that it will never be complete."""


CALL: ContextVar[Call | None] = ContextVar("call", default=None)


class World:
    """All devices with their queued work and waiting hosts, under one lock.

    Args:
        seed: seed for the choice of work that is done at once if ``pace`` is MIXED.
        in_turn: devices have no room for two collectives of different communicators at a time, which then run one after
            the other (NCCL, "Using multiple NCCL communicators concurrently": safe only if they are launched "in the
            same order" everywhere, or if all have the resources to run at once).
    """

    def __init__(self, seed: int = 0, pace: str = LATE, in_turn: bool = False) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.devices: list[Device] = []
        self.calls: list[Call] = []
        self.failure: BaseException | None = None
        self.waits: Counter[tuple[str, str, str]] = Counter()
        """How often a host waited for its device, by (member, call, what was waited for)."""
        self.stood_behind: Counter[tuple[str, str, str]] = Counter()
        """How often work or a host of a call waited behind another call's work, by (member, call, other call)."""
        self.pace, self.in_turn = pace, in_turn
        self._random = random.Random(seed)

    @contextmanager
    def call(self, device: Device, name: str) -> Iterator[Call]:
        """Attribute what this context and threads that inherit it do to ``device``'s process, for this call."""
        call = Call(device, name)
        with self.changed:
            self.calls.append(call)
        token = CALL.set(call)
        try:
            yield call
        finally:
            CALL.reset(token)
            with self.changed:
                self.calls.remove(call)

    def fail(self, failure: BaseException) -> None:
        """Raise the failure in every thread that waits, or that requests anything from now on."""
        with self.changed:
            self.failure = self.failure or failure
            self.changed.notify_all()

    def enter(self, device: Device) -> Call:
        """Record a thread's request to the model; the caller holds the lock."""
        self._may_go_on(device)
        call = CALL.get() or Call(device, threading.current_thread().name)
        call.deeds, call.last_deed = call.deeds + 1, time.monotonic()
        return call

    def stand(self, device: Device) -> None:
        """Block while the process is frozen; raise if it has died."""
        while device.frozen and not device.gone and self.failure is None:
            self.changed.wait()
        if device.gone:
            raise Gone

    def _may_go_on(self, device: Device) -> None:
        self.stand(device)
        if self.failure is not None:
            raise self.failure

    def wait(self, device: Device, goals: Iterable[Op], what: str) -> None:
        """Block until ``goals`` are done."""
        with self.changed:
            call = self.enter(device)
            wait = Wait(call, what, [op for op in goals if not op.done])
            self.waits[device.name, call.name, what] += 1
            for other in {name for op in wait.goals for name in op.behind | {op.by}} - {call.name}:
                self.stood_behind[device.name, call.name, other] += 1
            call.waits.append(wait)
            try:
                while wait.goals:
                    self._may_go_on(device)
                    wait.goals = [op for op in wait.goals if not self.run(op)]
                    if wait.goals:
                        self.changed.wait()
                self._may_go_on(device)
            finally:
                call.waits.remove(wait)

    def launched(self, op: Op) -> None:
        """Handle ``op`` after it has been queued; the caller holds the lock."""
        if op.meeting is not None and len(op.meeting.ops) == op.meeting.size:
            self.changed.notify_all()
        if self.pace == AT_ONCE or (self.pace == MIXED and self._random.random() < 0.5):
            self.run(op)

    def run(self, goal: Op) -> bool:
        """Perform ``goal`` and what it needs, as far as possible now; return whether it is done."""
        path, seen = [goal], set[int]()
        while path:
            op = path[-1]
            together = op.meeting.ops.values() if op.meeting is not None else (op,)
            key = id(op.meeting or op)
            if op.done or (key not in seen and not _can_run(op)):
                path.pop()
                seen.add(key)
                continue
            needs = [need for each in together for need in each.needs if not need.done]
            if key in seen:
                path.pop()
                if not needs and _can_run(op):
                    _do(op.meeting, together)
                continue
            seen.add(key)
            path += [need for need in needs if id(need.meeting or need) not in seen]
        return goal.done

    @property
    def queued(self) -> int:
        return sum(len(device.undone()) for device in self.devices)


def _can_run(op: Op) -> bool:
    """Return whether it can run apart from its needs: a collective must be complete, and all its devices running."""
    if op.meeting is None:
        return op.stream.device.works
    ops, whole = op.meeting.ops.values(), len(op.meeting.ops) == op.meeting.size and not op.meeting.broken
    return whole and all(each.stream.device.works for each in ops)


def _do(meeting: Meeting | None, together: Iterable[Op]) -> None:
    effects: list[Effect | None] = [op.effect for op in together]
    if meeting is not None and meeting.effect is not None:
        effects = [partial(meeting.effect, meeting.memory)]
    for op in together:
        op.done, op.needs, op.effect = True, [], None
    for effect in effects:
        if effect is not None:
            effect()


class Device:
    """An accelerator, as one process has it (its context), together with that process."""

    def __init__(self, world: World, name: str, node: str = "") -> None:
        self.world, self.name, self.node = world, name, node
        self.frozen = False
        """The process is frozen; its device continues with queued work."""
        self.stopped = False
        """The device is stopped; its process continues."""
        self.gone = False
        """The process has died, and its queued work is lost."""
        self.streams: list[Stream] = []
        self.default = Stream(self, LEGACY)
        self.last_collective: Op | None = None
        """The last collective on any communicator."""
        with world.changed:
            world.devices.append(self)

    @property
    def works(self) -> bool:
        return not (self.stopped or self.gone)

    def undone(self) -> list[Op]:
        """Return the last unfinished operation of each stream."""
        return [stream.last for stream in self.streams if stream.last is not None and not stream.last.done]

    def set(self, **states: bool) -> None:
        """Freeze, stop or end it, or let it continue."""
        with self.world.changed:
            for name, value in states.items():
                setattr(self, name, value)
            self.world.changed.notify_all()

    def synchronize(self, what: str = "device") -> None:
        """CUDA RT, cudaDeviceSynchronize: "Blocks until the device has completed all preceding requested tasks"."""
        with self.world.changed:
            self.world.wait(self, self.undone(), what)

    def free(self) -> None:
        """Give memory back to the device, as `torch.cuda.empty_cache` does with what its allocator had kept.

        It waits for the device, which is why torch has that allocator: "fast memory deallocation without device
        synchronizations" (PyTorch, "CUDA semantics", Memory management).
        """
        self.synchronize("device, to free memory")


class Stream:
    """CUDA PG, "Streams": "a sequence of commands that execute in order"; different streams are not ordered.

    The legacy default stream is (CUDA RT, "Stream synchronization behavior"): "When an action is taken in the legacy
    stream such as a kernel launch or cudaStreamWaitEvent(), the legacy stream first waits on all blocking streams, the
    action is queued in the legacy stream, and then all blocking streams wait on the legacy stream." Non-blocking
    streams "do not synchronize with the legacy stream".
    """

    def __init__(self, device: Device, kind: str, on_host: bool = False) -> None:
        """``on_host``: the stream represents work of a process without its device."""
        self.device, self.kind = device, kind
        self.last: Op | None = None
        self._waits_for: list[Op] = []
        with device.world.changed:
            self.number = len(device.streams)
            if not on_host:
                device.streams.append(self)

    @property
    def name(self) -> str:
        return f"{self.kind} stream" if self.kind == LEGACY else f"{self.kind} stream {self.number}"

    def launch(self, name: str, effect: Effect | None = None, after: Iterable[Op] = ()) -> Op:
        """Queue work and return (CUDA PG, "Asynchronous Concurrent Execution": launches return to the host)."""
        world = self.device.world
        with world.changed:
            call = world.enter(self.device)
            needs = [op for op in dict.fromkeys([*self._before(), *after]) if not op.done]
            behind = frozenset(name for op in needs for name in op.behind | {op.by}) - {call.name}
            op = self.last = Op(self, name, needs, effect, call.name, behind)
            self._waits_for = []
            for other in behind:
                world.stood_behind[self.device.name, call.name, other] += 1
            return op

    def _before(self) -> list[Op]:
        before = [op for op in (self.last, *self._waits_for) if op is not None]
        if self.kind == NON_BLOCKING:
            return before
        others = [stream for stream in self.device.streams if stream is not self and stream.kind != NON_BLOCKING]
        if self.kind == BLOCKING:
            others = [stream for stream in others if stream.kind == LEGACY]
        return before + [stream.last for stream in others if stream.last is not None]

    def work(self, name: str, effect: Effect | None = None) -> Op:
        """Launch a kernel."""
        with self.device.world.changed:
            op = self.launch(name, effect)
            self.device.world.launched(op)
            return op

    def copy(self, name: str, effect: Effect | None, pageable: bool, non_blocking: bool) -> None:
        """Copy between host and device.

        CUDA RT, "API synchronization behavior", Memcpy, Asynchronous: between device memory and pageable host memory it
        "might be synchronous with respect to host", with pinned memory it is "fully asynchronous"; the synchronous
        forms return when the copy has been made. Torch's `non_blocking` chooses between the two.
        """
        op = self.work(name, effect)
        if pageable or not non_blocking:
            self.device.world.wait(self.device, [op], "pageable copy" if pageable else "copy")

    def wait_event(self, event: Event) -> None:
        """CUDA RT, cudaStreamWaitEvent: "all future work submitted to stream" waits for what the event captured.

        That is its most recent record at this time: "any subsequent calls ... will not be affected by later calls to
        cudaEventRecord()" (cudaEventRecord). If it was never recorded, nothing waits.
        """
        with self.device.world.changed:
            self.device.world.enter(self.device)
            if event.captured is None:
                return
            self._waits_for.append(event.captured)
            if self.kind == LEGACY:
                self.launch("wait for an event")

    def synchronize(self) -> None:
        """CUDA RT, cudaStreamSynchronize: "Blocks until stream has completed all operations"."""
        with self.device.world.changed:
            goals = [op for op in (self.last, *self._waits_for) if op is not None]
            self.device.world.wait(self.device, goals, "stream")

    def query(self) -> bool:
        """CUDA RT, cudaStreamQuery; repeated queries return True eventually."""
        return _asked(self.device, self.last)


class Event:
    """CUDA RT, "Event Management"."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.captured: Op | None = None

    def record(self, stream: Stream) -> None:
        """CUDA RT, cudaEventRecord: "Captures in event the contents of stream at the time of this call"."""
        self.captured = stream.work("record an event")

    def synchronize(self) -> None:
        """CUDA RT, cudaEventSynchronize: waits for what was captured; it "returns immediately" if nothing was."""
        self.device.world.wait(self.device, [self.captured] if self.captured is not None else [], "event")

    def query(self) -> bool:
        """CUDA RT, cudaEventQuery; also True if it was never recorded."""
        return _asked(self.device, self.captured)


def _asked(device: Device, op: Op | None) -> bool:
    with device.world.changed:
        device.world.enter(device)
        done = op is None or op.done
        if op is not None:
            device.world.run(op)
        return done

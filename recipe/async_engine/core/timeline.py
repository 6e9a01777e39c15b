# SPDX-License-Identifier: Apache-2.0
"""Where the time of a run went.

Contract. A track is in exactly one phase at any moment, `IDLE_PHASE` when none was entered, so the shares of a track
add up to 1. A phase entered inside another suspends it. The rollout side is accounted by the number of trajectories
that generate, against the number that could. Time is counted from construction or the last `restart`, to the clock's
now or to `stop`. The clock is passed in: seconds, never backwards (`time.monotonic`).

Test: tests/core/test_timeline.py.

Plain state without threads: the callers hold one lock, or each track and the rollout belong to one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from recipe.async_engine.core.errors import TimelineError

IDLE_PHASE = "other"


class _Track:
    """Seconds of one track by phase; the innermost entered phase is the one that counts."""

    def __init__(self, now: float) -> None:
        self.seconds: dict[str, float] = {}
        self.entered: list[str] = []
        self._since = now

    def advance(self, now: float) -> None:
        if now < self._since:
            raise TimelineError(f"the clock ran backwards, from {self._since} to {now}")
        phase = self.entered[-1] if self.entered else IDLE_PHASE
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now

    def reset(self, now: float) -> None:
        self.seconds = {}
        self._since = now


class RolloutOccupancy:
    """How much of the rollout side's capacity generated, over time.

    capacity: trajectories that can generate at once on all live replicas together. `idle_share` is the share of
    capacity-seconds during which nothing generated at all, `occupancy` the share of capacity-seconds that generated.
    """

    def __init__(self, clock: Callable[[], float], capacity: int) -> None:
        self._clock = clock
        self._since = clock()
        self._running = 0
        self._capacity = 0
        self._offered = self._used = self._idle = 0.0
        self.set_capacity(capacity)

    @property
    def running(self) -> int:
        """Trajectories that generate now."""
        return self._running

    def set_running(self, running: int) -> None:
        """From now on this many trajectories generate."""
        if running < 0:
            raise TimelineError(f"{running} running trajectories")
        self.advance(self._clock())
        self._running = running

    def set_capacity(self, capacity: int) -> None:
        """From now on this many trajectories can generate at once; 0 while no replica is live."""
        if capacity < 0:
            raise TimelineError(f"rollout capacity {capacity}")
        self.advance(self._clock())
        self._capacity = capacity

    def advance(self, now: float) -> None:
        """Account for the time up to now."""
        seconds = now - self._since
        if seconds < 0:
            raise TimelineError(f"the clock ran backwards, from {self._since} to {now}")
        self._since = now
        self._offered += seconds * self._capacity
        self._used += seconds * min(self._running, self._capacity)
        if self._running == 0:
            self._idle += seconds * self._capacity

    def reset(self, now: float) -> None:
        """Forget the time before now; what runs goes on running."""
        self._since = now
        self._offered = self._used = self._idle = 0.0

    @property
    def offered_seconds(self) -> float:
        """Capacity-seconds accounted so far."""
        return self._offered

    @property
    def used_seconds(self) -> float:
        """Capacity-seconds that generated so far."""
        return self._used

    @property
    def idle_share(self) -> float:
        """Share of the accounted capacity-seconds in which no trajectory generated, 0.0 if there were none."""
        return self._idle / self._offered if self._offered else 0.0

    @property
    def occupancy(self) -> float:
        """Share of the accounted capacity-seconds that were used; trajectories above the capacity do not count."""
        return self._used / self._offered if self._offered else 0.0


class Timeline:
    """Named tracks of exclusive phases, and the rollout's occupancy, on one clock."""

    def __init__(self, clock: Callable[[], float], rollout_capacity: int = 1) -> None:
        self._clock = clock
        self._began = clock()
        self._stopped: float | None = None
        self._tracks: dict[str, _Track] = {}
        self._noted: dict[str, float] = {}
        self.note("the run began")
        self.rollout = RolloutOccupancy(self._now, rollout_capacity)

    def note(self, what: str) -> None:
        """Something has begun or been finished: the run is not standing still. Callable from any thread."""
        self._noted[what] = self._clock()

    @property
    def silent_s(self) -> float:
        """Seconds since the newest note; every phase that begins or ends makes one."""
        return self._clock() - max(self._noted.values())

    def notes(self) -> list[tuple[str, float]]:
        """What was noted and how many seconds ago, newest first."""
        now = self._clock()
        return sorted(((what, now - at) for what, at in dict(self._noted).items()), key=lambda note: note[1])

    @contextmanager
    def phase(self, track: str, name: str) -> Iterator[None]:
        """Count the time inside the `with` block to this phase, except for phases entered within it."""
        record = self._track(track)
        record.advance(self._now())
        self.note(f"{track}: {name} begins")
        record.entered.append(name)
        depth = len(record.entered)
        try:
            yield
        finally:
            if len(record.entered) != depth:
                raise TimelineError(f"phase {name!r} of {track!r} ends while {record.entered} are entered")
            record.advance(self._now())
            self.note(f"{track}: {name} ends")
            record.entered.pop()

    def seconds(self, track: str) -> dict[str, float]:
        """Seconds of a track by phase, up to now."""
        record = self._track(track)
        record.advance(self._now())
        return {phase: seconds for phase, seconds in record.seconds.items() if seconds > 0}

    def shares(self, track: str) -> dict[str, float]:
        """Share of a track's time by phase, up to now; they add up to 1, or the dict is empty if no time passed."""
        seconds = self.seconds(track)
        total = sum(seconds.values())
        return {phase: part / total for phase, part in seconds.items()}

    def share(self, track: str, name: str) -> float:
        """Share of one phase, 0.0 if it was never entered."""
        return self.shares(track).get(name, 0.0)

    @property
    def trainer_wait_share(self) -> float:
        """Share of its time that the trainer waited for a batch: phase `wait` of track `trainer`."""
        return self.share("trainer", "wait")

    @property
    def rollout_idle_share(self) -> float:
        """Share of the rollout's capacity-seconds in which no trajectory generated."""
        self.rollout.advance(self._now())
        return self.rollout.idle_share

    @property
    def rollout_occupancy(self) -> float:
        """Share of the rollout's capacity-seconds in which its slots generated."""
        self.rollout.advance(self._now())
        return self.rollout.occupancy

    @property
    def elapsed(self) -> float:
        """Seconds accounted for."""
        return self._now() - self._began

    def restart(self) -> None:
        """Count from now on: what came before (starting up, loading) is not part of the run."""
        self._stopped = None
        self._began = self._now()
        for track in self._tracks.values():
            track.reset(self._began)
        self.rollout.reset(self._began)

    def stop(self) -> None:
        """Count no further: the last step is trained."""
        if self._stopped is None:
            self._stopped = self._clock()

    def _now(self) -> float:
        return self._clock() if self._stopped is None else self._stopped

    def _track(self, name: str) -> _Track:
        return self._tracks.setdefault(name, _Track(self._began))

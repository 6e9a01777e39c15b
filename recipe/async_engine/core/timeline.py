# SPDX-License-Identifier: Apache-2.0
"""Where the time of a run went.

Contract. A track is in exactly one phase at any moment, `IDLE_PHASE` when none was entered, so the shares of a track
add up to 1. A phase entered inside another suspends it. The rollout side is accounted by the number of trajectories
that generate, against the number that could. Reward seconds are counted once for each trajectory that is being scored.
They are exposed while nothing generates and the trainer waits for a batch: then only rewards keep the run from going
on. All others are hidden. Time is counted from construction or the last `restart`, to the clock's now or to `stop`. The
clock is passed in: seconds, never backwards (`time.monotonic`).

Test: tests/core/test_timeline.py.

Plain state without threads: the callers hold one lock, or each track and the rollout belong to one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from recipe.async_engine.core.errors import TimelineError

IDLE_PHASE = "other"


class _Laps:
    """Seconds between two looks at a clock."""

    def __init__(self, now: float) -> None:
        self._since = now

    def lap(self, now: float) -> float:
        if now < self._since:
            raise TimelineError(f"the clock ran backwards, from {self._since} to {now}")
        seconds, self._since = now - self._since, now
        return seconds


class _Track(_Laps):
    """Seconds of one track by phase; the innermost entered phase is the one that counts."""

    def __init__(self, now: float) -> None:
        super().__init__(now)
        self.seconds: dict[str, float] = {}
        self.entered: list[str] = []

    def advance(self, now: float) -> None:
        phase = self.entered[-1] if self.entered else IDLE_PHASE
        self.seconds[phase] = self.seconds.get(phase, 0.0) + self.lap(now)


class RolloutTime(_Laps):
    """What the rollout side did with its capacity, and what its rewards cost, over time.

    running: trajectories that generate. capacity: those that could at once, on all live replicas together; 0 while none
    is live. scoring: trajectories whose reward is being computed. waiting: whether the trainer waits for a batch.
    offered, used, idle: capacity-seconds, those of them that generated (what runs above the capacity does not count),
    and those during which nothing generated at all. scored, exposed: reward seconds, and the exposed ones among them.
    """

    def __init__(self, clock: Callable[[], float], capacity: int) -> None:
        super().__init__(clock())
        self._clock = clock
        self._levels = {"running": 0, "capacity": capacity, "scoring": 0, "waiting": 0}
        self.offered = self.used = self.idle = self.scored = self.exposed = 0.0

    def set(self, **levels: int) -> None:
        """From now on these are so many."""
        for name, level in levels.items():
            if level < 0:
                raise TimelineError(f"{level} is no number of what is {name}")
        self.advance()
        self._levels.update(levels)

    @property
    def scoring(self) -> int:
        """Trajectories that are being scored now."""
        return self._levels["scoring"]

    def advance(self) -> None:
        """Account for the time up to now."""
        running, capacity, scoring, waiting = self._levels.values()
        seconds = self.lap(self._clock())
        self.offered += seconds * capacity
        self.used += seconds * min(running, capacity)
        self.scored += seconds * scoring
        if running == 0:
            self.idle += seconds * capacity
            self.exposed += seconds * scoring * waiting

    def reset(self) -> None:
        """Forget the time before now; what runs goes on running."""
        self.advance()
        self.offered = self.used = self.idle = self.scored = self.exposed = 0.0

    @property
    def idle_share(self) -> float:
        """Share of the capacity-seconds in which no trajectory generated, 0.0 if there were none."""
        self.advance()
        return self.idle / self.offered if self.offered else 0.0

    @property
    def occupancy(self) -> float:
        """Share of the capacity-seconds that generated, 0.0 if there were none."""
        self.advance()
        return self.used / self.offered if self.offered else 0.0

    @property
    def hidden_share(self) -> float:
        """Share of the reward seconds that were hidden, 1.0 if there were none."""
        self.advance()
        return 1.0 - self.exposed / self.scored if self.scored else 1.0


class Timeline:
    """Named tracks of exclusive phases, and the rollout side's time, on one clock."""

    def __init__(self, clock: Callable[[], float], rollout_capacity: int = 1) -> None:
        self._clock = clock
        self._began = clock()
        self._stopped: float | None = None
        self._tracks: dict[str, _Track] = {}
        self._noted: dict[str, float] = {}
        self.note("the run began")
        self.rollout = RolloutTime(self._now, rollout_capacity)

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

    @property
    def trainer_wait_share(self) -> float:
        """Share of its time that the trainer waited for a batch: phase `wait` of track `trainer`."""
        return self.shares("trainer").get("wait", 0.0)

    def restart(self) -> None:
        """Count from now on: what came before (starting up, loading) is not part of the run."""
        self._stopped = None
        self._began = self._now()
        for track in self._tracks.values():
            track.advance(self._began)
            track.seconds.clear()
        self.rollout.reset()

    def stop(self) -> None:
        """Count no further: the last step is trained."""
        if self._stopped is None:
            self._stopped = self._clock()

    def _now(self) -> float:
        return self._clock() if self._stopped is None else self._stopped

    def _track(self, name: str) -> _Track:
        return self._tracks.setdefault(name, _Track(self._began))

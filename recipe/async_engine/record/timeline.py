# SPDX-License-Identifier: Apache-2.0
"""Where the time of a run went.

Contract. The trainer is in exactly one phase at any moment, `IDLE_PHASE` when none was entered, so the shares of its
time add up to 1. A phase entered inside another suspends it. The rollout side is accounted by the number of
trajectories that generate, against the number that could. Reward seconds are counted once for each trajectory that is
being scored. They are exposed while nothing generates and the trainer waits for a batch: then only rewards keep the run
from going on. All others are hidden. Time is counted from construction or the last `restart`, to the clock's now or to
`stop`. The clock is passed in: seconds, never backwards (`time.monotonic`).

Test: tests/core/test_timeline.py.

Plain state without threads: the callers hold one lock, or the trainer's time and the rollout's belong to one thread
each.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from recipe.async_engine.record.events import Class, Lane

IDLE_PHASE = "other"


class RolloutTime:
    """What the rollout side did with its capacity, and what its rewards cost, over time.

    running: trajectories that generate. capacity: those that could at once, on all live replicas together; 0 while none
    is live. scoring: trajectories whose reward is being computed. waiting: whether the trainer waits for a batch.
    seconds: accounted for.
    offered, used, idle: capacity-seconds, those of them that generated (what runs above the capacity does not count),
    and those during which nothing generated at all. scored, exposed: reward seconds, and the exposed ones among them.
    """

    def __init__(self, clock: Callable[[], float], capacity: int) -> None:
        self._clock = clock
        self._levels = {"running": 0, "capacity": capacity, "scoring": 0, "waiting": 0}
        self._since = clock()
        self.seconds = self.offered = self.used = self.idle = self.scored = self.exposed = 0.0

    def set(self, **levels: int) -> None:
        """From now on these are so many."""
        self.advance()
        self._levels.update(levels)

    @property
    def waits_for_rewards(self) -> bool:
        """Whether only rewards keep the run from going on."""
        running, _, scoring, waiting = self._levels.values()
        return bool(running == 0 and scoring and waiting)

    @property
    def scoring(self) -> int:
        """Trajectories that are being scored now."""
        return self._levels["scoring"]

    def advance(self) -> None:
        """Account for the time up to now."""
        running, capacity, scoring, waiting = self._levels.values()
        now = self._clock()
        seconds, self._since = now - self._since, now
        self.seconds += seconds
        self.offered += seconds * capacity
        self.used += seconds * min(running, capacity)
        self.scored += seconds * scoring
        if running == 0:
            self.idle += seconds * capacity
            self.exposed += seconds * scoring * waiting

    def reset(self) -> None:
        """Forget the time before now; what runs goes on running."""
        self.advance()
        self.seconds = self.offered = self.used = self.idle = self.scored = self.exposed = 0.0

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
    """The trainer's time by phase, and the rollout side's, on one clock.

    Attributes:
        lane: the trainer's, from one phase to the next; starting up until the first `restart`.
    """

    def __init__(self, clock: Callable[[], float], rollout_capacity: int = 1) -> None:
        self._clock = clock
        self._since = clock()
        self._stopped: float | None = None
        self._entered = [IDLE_PHASE]
        self.lane = Lane(clock, Class.START_UP)
        self._started = False
        self._seconds: defaultdict[str, float] = defaultdict(float)
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
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the `with` block to this phase, except for phases entered within it."""
        self._advance()
        self.note(f"trainer: {name} begins")
        self._entered.append(name)
        self._show()
        try:
            yield
        finally:
            self._advance()
            self.note(f"trainer: {name} ends")
            self._entered.pop()
            self._show()

    def shares(self) -> dict[str, float]:
        """Share of the trainer's time by phase, up to now; they add up to 1, or there are none if no time passed."""
        self._advance()
        total = sum(self._seconds.values())
        return {phase: seconds / total for phase, seconds in self._seconds.items() if seconds > 0}

    @property
    def doing(self) -> str:
        """The phase of now. Callable from any thread."""
        return self._entered[-1] if self._started else Class.START_UP

    def glance(self) -> dict[str, float]:
        """As :meth:`shares`, and changes nothing: callable from any thread, where a phase that ends may count twice."""
        seconds = dict(self._seconds)
        seconds[self.doing] = seconds.get(self.doing, 0.0) + max(0.0, self._now() - self._since)
        total = sum(seconds.values())
        return {phase: spent / total for phase, spent in seconds.items() if spent > 0}

    @property
    def trainer_wait_share(self) -> float:
        """Share of its time that the trainer waited for a batch: phase `wait`."""
        return self.shares().get("wait", 0.0)

    def restart(self) -> None:
        """Count from now on: what came before (starting up, loading) is not part of the run."""
        self._advance()
        self._seconds.clear()
        self.rollout.reset()
        self._started = True
        self._show()

    def stop(self) -> None:
        """Count no further: the last step is trained."""
        if self._stopped is None:
            self._stopped = self._clock()

    @property
    def end(self) -> float:
        """When it was stopped, or now."""
        return self._now()

    def _show(self) -> None:
        if self._started:
            self.lane.turn_to(self._entered[-1])

    def _now(self) -> float:
        return self._clock() if self._stopped is None else self._stopped

    def _advance(self) -> None:
        now = self._now()
        self._seconds[self._entered[-1]] += now - self._since
        self._since = now

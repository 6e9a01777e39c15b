# SPDX-License-Identifier: Apache-2.0
"""The single stream of events in the trainer's process, and where the trainer's time went.

Contract. Each part of the trainer's process reports to the timeline, on any thread, and reads nothing back. Reports go
into the books of the rollout side and on to `listener`, which writes them down. The trainer is in exactly one phase at
any moment (`IDLE_PHASE` if it entered none), so the shares of its time add up to 1. A phase that is entered inside
another one suspends it. Time is counted from construction or the last `restart`, up to now or to `stop`. The clock is
passed in; it gives seconds and never goes backwards (`time.monotonic`).

Test: tests/core/test_timeline.py. There is no lock: the trainer's thread enters the phases, and the scheduler reports
on the rollout side under its own lock.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from recipe.async_engine.record.events import GROUPS, WEIGHTS, Class, Clock, Event, Lane, Tell, ignore
from recipe.async_engine.record.rollout_books import RolloutBooks

IDLE_PHASE = "other"
ENDS_OF_A_GROUP = ("trained", "filtered", "failed")


class Timeline:
    """The timeline of the module's contract.

    Attributes:
        lane: the trainer's phases, which begin with the first `restart`. Before that the trainer is starting up.
        rollout: the time, answers and tokens of the rollout side.
        listener: is given every event, with times of this process's clock.
    """

    def __init__(self, clock: Clock, rollout_capacity: int = 1) -> None:
        self._clock = clock
        self._since = clock()
        self._stopped: float | None = None
        self._entered = [IDLE_PHASE]
        self.lane = Lane(clock, Class.START_UP)
        self._started = False
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._noted: dict[str, float] = {}
        self.listener: Tell = ignore
        self.note("the run began")
        self.rollout = RolloutBooks(self._now, rollout_capacity, clock)

    # What is told.

    def tell(self, event: Event) -> None:
        """Report an event. Any thread may call this."""
        if event.lane == GROUPS and event.what in ENDS_OF_A_GROUP:
            self.rollout.tokens[event.what] += event.tokens or 0
        self.listener(event)

    def note(self, what: str) -> None:
        """Note that something began or was finished, so the run is not standing still. Any thread may call this."""
        self._noted[what] = self._clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the ``with`` block to this phase, except for phases entered within it."""
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

    @contextmanager
    def during(self, what: str, version: int) -> Iterator[None]:
        """Report the time inside the ``with`` block as a part of bringing a version to the replicas. Any thread may
        call this.
        """
        began = self._clock()
        try:
            yield
        finally:
            self.tell(Event(WEIGHTS, what, began, self._clock(), version=version))

    def restart(self) -> None:
        """Count from now on, because the time before (starting up, loading) is not part of the run."""
        self._advance()
        self._seconds.clear()
        self.rollout.reset()
        self._started = True
        self._show()

    def stop(self) -> None:
        """Count no further, because the last step is trained."""
        if self._stopped is None:
            self._stopped = self._clock()

    # What follows from it.

    @property
    def silent_s(self) -> float:
        """Seconds since the newest note. Every phase makes a note when it begins and when it ends."""
        return self._clock() - max(self._noted.values())

    def notes(self) -> list[tuple[str, float]]:
        """Return the notes and how many seconds ago each was made, newest first."""
        now = self._clock()
        return sorted(((what, now - at) for what, at in dict(self._noted).items()), key=lambda note: note[1])

    @property
    def doing(self) -> str:
        """The present phase. Any thread may read it."""
        return self._entered[-1] if self._started else Class.START_UP

    def shares(self) -> dict[str, float]:
        """Return the share of the trainer's time by phase, up to now. The shares add up to 1 unless no time has passed.

        Any thread may call this. A phase that ends at the same moment may count twice.
        """
        seconds = dict(self._seconds)
        entered = self._entered[-1]
        seconds[entered] = seconds.get(entered, 0.0) + max(0.0, self._now() - self._since)
        total = sum(seconds.values())
        return {phase: spent / total for phase, spent in seconds.items() if spent > 0}

    @property
    def trainer_wait_share(self) -> float:
        """The share of its time in which the trainer waited for a batch: the phase `wait`."""
        return self.shares().get("wait", 0.0)

    @property
    def end(self) -> float:
        """The time when it was stopped, or now."""
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

# SPDX-License-Identifier: Apache-2.0
"""The one stream of what happens in a run, as the trainer's process is told of it, and where its time went.

Contract. Whoever does something in the trainer's process tells the timeline, on any thread, and reads nothing back.
What is told goes into the books of the rollout side and on to `listener`, which writes it down. The trainer is in
exactly one phase at any moment, `IDLE_PHASE` when none was entered, so the shares of its time add up to 1; a phase
entered inside another suspends it. Time is counted from construction or the last `restart`, to the clock's now or to
`stop`. The clock is passed in: seconds, never backwards (`time.monotonic`).

Test: tests/core/test_timeline.py. It has no lock of its own: the trainer's thread enters the phases, and the scheduler
tells of the rollout side under its lock.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from recipe.async_engine.record.events import GROUPS, WEIGHTS, Class, Clock, Event, Lane, Tell, ignore
from recipe.async_engine.record.rollout_books import RolloutBooks

IDLE_PHASE = "other"
ENDS_OF_A_GROUP = ("trained", "filtered", "failed")


class Timeline:
    """See the module's contract.

    Attributes:
        lane: the trainer's, from one phase to the next; starting up until the first `restart`.
        rollout: the other side's time, answers and tokens.
        listener: is told every event, by the clock of this process.
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
        """This has happened. Callable from any thread."""
        if event.lane == GROUPS and event.what in ENDS_OF_A_GROUP:
            self.rollout.tokens[event.what] += event.tokens or 0
        self.listener(event)

    def note(self, what: str) -> None:
        """Something has begun or been finished: the run is not standing still. Callable from any thread."""
        self._noted[what] = self._clock()

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

    @contextmanager
    def during(self, what: str, version: int) -> Iterator[None]:
        """Tell of a part of bringing a version to the replicas. Callable from any thread."""
        began = self._clock()
        try:
            yield
        finally:
            self.tell(Event(WEIGHTS, what, began, self._clock(), version=version))

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

    # What follows from it.

    @property
    def silent_s(self) -> float:
        """Seconds since the newest note; every phase that begins or ends makes one."""
        return self._clock() - max(self._noted.values())

    def notes(self) -> list[tuple[str, float]]:
        """What was noted and how many seconds ago, newest first."""
        now = self._clock()
        return sorted(((what, now - at) for what, at in dict(self._noted).items()), key=lambda note: note[1])

    @property
    def doing(self) -> str:
        """The phase of now. Callable from any thread."""
        return self._entered[-1] if self._started else Class.START_UP

    def shares(self) -> dict[str, float]:
        """Share of the trainer's time by phase, up to now; they add up to 1, or there are none if no time passed.

        Callable from any thread, where a phase that ends meanwhile may count twice.
        """
        seconds = dict(self._seconds)
        entered = self._entered[-1]
        seconds[entered] = seconds.get(entered, 0.0) + max(0.0, self._now() - self._since)
        total = sum(seconds.values())
        return {phase: spent / total for phase, spent in seconds.items() if spent > 0}

    @property
    def trainer_wait_share(self) -> float:
        """Share of its time that the trainer waited for a batch: phase `wait`."""
        return self.shares().get("wait", 0.0)

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

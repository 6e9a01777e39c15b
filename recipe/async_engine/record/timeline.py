# SPDX-License-Identifier: Apache-2.0
"""Collects the events of the trainer's process, and measures how the trainer spends its time.

Contract. The components of the trainer's process report events on any thread. The timeline updates the counts of the
rollout (`RolloutBooks`) and passes every event to `listener`, which writes it to the event record. The trainer is in
exactly one phase at any time (`IDLE_PHASE` if it has entered none), so the shares of its time add up to 1. While an
inner phase runs, no time is counted for the outer phase. Time is counted from construction or the last `restart` until
now or until `stop`. The clock is passed in; it returns seconds and never goes backwards (`time.monotonic`). The
timeline has no lock: only the trainer's thread enters phases, and the scheduler reports on the rollout under its own
lock. Shown by tests/core/test_timeline.py.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from recipe.async_engine.record.events import GROUPS, WEIGHTS, Class, Clock, Event, Lane, Tell, ignore
from recipe.async_engine.record.rollout_books import RolloutBooks

IDLE_PHASE = "other"
ENDS_OF_A_GROUP = ("trained", "filtered", "failed")


class Timeline:
    """Collects events and measures the trainer's phases.

    Attributes:
        lane: records the trainer's phase, which is start-up until the first `restart`.
        rollout: counts of the rollout's time, answers and tokens.
        listener: function that receives every event, with times of this process's clock.
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

    def tell(self, event: Event) -> None:
        if event.lane == GROUPS and event.what in ENDS_OF_A_GROUP:
            self.rollout.tokens[event.what] += event.tokens or 0
        self.listener(event)

    def note(self, what: str) -> None:
        """Record that ``what`` happened just now, so the run is making progress. Any thread may call this."""
        self._noted[what] = self._clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the ``with`` block as phase ``name``, except for phases that are entered inside it."""
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
        """Report the time inside the ``with`` block as phase ``what`` of the weight sync that transfers ``version``."""
        began = self._clock()
        try:
            yield
        finally:
            self.tell(Event(WEIGHTS, what, began, self._clock(), version=version))

    def restart(self) -> None:
        """Set all counted times to 0, because the time until now (start-up, loading) is not part of the run."""
        self._advance()
        self._seconds.clear()
        self.rollout.reset()
        self._started = True
        self._show()

    def stop(self) -> None:
        """Stop counting time, because the last step has been trained."""
        if self._stopped is None:
            self._stopped = self._clock()

    @property
    def silent_s(self) -> float:
        """The seconds since the last call of `note`, that is, since the last sign of progress."""
        return self._clock() - max(self._noted.values())

    def notes(self) -> list[tuple[str, float]]:
        """Return each text passed to `note`, and the seconds since it was last passed; the latest text is first."""
        now = self._clock()
        return sorted(((what, now - at) for what, at in dict(self._noted).items()), key=lambda note: note[1])

    @property
    def doing(self) -> str:
        """The trainer's current phase. Any thread may read it."""
        return self._entered[-1] if self._started else Class.START_UP

    def shares(self) -> dict[str, float]:
        """Return the share of each phase in the trainer's time up to now.

        The shares add up to 1; as long as no time has been counted, there are none.

        Any thread may call this. A phase that ends during the call may be counted twice.
        """
        seconds = dict(self._seconds)
        entered = self._entered[-1]
        seconds[entered] = seconds.get(entered, 0.0) + max(0.0, self._now() - self._since)
        total = sum(seconds.values())
        return {phase: spent / total for phase, spent in seconds.items() if spent > 0}

    @property
    def trainer_wait_share(self) -> float:
        """The share of time in which the trainer waited for a batch (the phase `wait`)."""
        return self.shares().get("wait", 0.0)

    @property
    def end(self) -> float:
        """The time at which counting stopped, or the current time if it has not stopped."""
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

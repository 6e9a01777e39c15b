# SPDX-License-Identifier: Apache-2.0
"""What a run's record says of itself, beside its events: its devices and its tokens.

Contract: the engine makes no account of a run. It leaves a `Recorded` at the run's end, and whoever composes the main
has the account made of that and of the file of events (`recipe.report.settled`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from recipe.async_engine.core.events import LOG_PROBS, ROLLOUT, TRAINER

RECORDED = "recorded"
"""Where the trainer's state has the `Recorded`, for whoever writes the summary."""
SCORES = "scores"
"""A phase of the trainer's timeline: it waits for log-prob servers."""
BEGINS, ENDS = "begins", "ends"
"""On the run's lane: a device's life begins later than the run, or ends before it."""


@dataclass(frozen=True)
class Devices:
    """What a run's account is of.

    accelerators: of one device, by its lane's first word. shared: whether both sides have the same.
    """

    accelerators: Mapping[str, int]
    shared: bool = False

    def counts(self, lane: str) -> bool:
        """Whether this lane is a device of the account."""
        kind = lane.partition(" ")[0]
        return kind in (ROLLOUT, LOG_PROBS) or (lane == TRAINER and not self.shared)

    def size(self, lane: str) -> int:
        """Accelerators of a device, which do the same at any moment."""
        return int(self.accelerators.get(lane.partition(" ")[0], 1))


@dataclass(frozen=True)
class TokenBooks:
    """Every token that an engine sampled for training in this start, and what became of it.

    sampled: by the engines' own counts. restored: of a checkpoint. trained, filtered, failed: in answers of groups that
    ended so. cut: thrown away, by retries, ended requests, agent loops that left them out. in_flight: in groups that
    had not ended.
    """

    sampled: int = 0
    restored: int = 0
    trained: int = 0
    filtered: int = 0
    failed: int = 0
    cut: int = 0
    in_flight: int = 0

    @property
    def not_known(self) -> int:
        """What no class has; negative where more came out than went in."""
        ended = self.trained + self.filtered + self.failed + self.cut + self.in_flight
        return self.sampled + self.restored - ended


NO_TOKENS = TokenBooks()


@dataclass(frozen=True)
class Recorded:
    """The record of a run that has ended.

    file: its events. until: seconds of the run's clock that it covers. tokens: None if nobody could say. events_lost:
    events that could not be written. cpu_seconds: of the thread that wrote it.
    """

    file: Path
    devices: Devices
    until: float
    tokens: TokenBooks | None
    events_lost: int
    cpu_seconds: float

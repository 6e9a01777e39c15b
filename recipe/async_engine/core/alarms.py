# SPDX-License-Identifier: Apache-2.0
"""Alarms for runs that continue without an error although something is wrong, such as gradients that are all 0.

Contract: each alarm in `WATCHED` tests one condition at every update, step, version or validation. The alarm *rings*,
which means that it is logged and counted, when the condition has held at `Watched.rings_at` tests in a row (or at all
tests, in a run that has fewer). The run ends with `AlarmLimit` when this number of tests in a row reaches the user's
limit for the alarm, if there is one. The alarm `FAILED_GROUPS` tests a share instead: it rings when at least the share
`RINGS_AT` of the most recently ended prompt groups have failed, and ends the run when this share exceeds the limit. In
a run with too few groups for that, the share of all groups is tested at the run's end. A run in which an alarm rang
ends as `Ended.WITH_ALARMS`. Shown by tests/core/test_alarms.py, test_unchanged.py, tests/e2e/test_alarms.py and
test_lora.py.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from recipe.async_engine.core.errors import RecipeError

SETTING = "async_training.alarms"
METRIC = "fully_async/alarms/"
ALL = "all"
FAILED_GROUPS = "failed_groups"
RINGS_AT = 0.1
"""Share of failed prompt groups at which the alarm `FAILED_GROUPS` rings."""
LONGEST = 500
"""Largest number of characters of an error's text in an alarm's message; the rest is cut off."""
FEW = 32
"""During the run, the share of failed groups is computed only when at least this many prompt groups have ended."""


class Ended(StrEnum):
    """How a run ended, as written to ``summary.json``."""

    WELL = "well"
    WITH_ALARMS = "with_alarms"
    FAILED = "failed"


class AlarmLimit(RecipeError):
    """An alarm has reached its limit (``async_training.alarms``), so the run must end."""


class Watched(NamedTuple):
    """The condition that an alarm watches.

    setting: name of the alarm's limit, a setting below `SETTING`. units: what is tested, such as "steps". what: the
    condition in words. causes: what the user should check. rings_at: number of times in a row that the condition must
    hold before the alarm rings.
    """

    setting: str
    units: str
    what: str
    causes: str
    rings_at: int = 1


def _zero(model: str) -> Watched:
    return Watched(
        "zero_gradients",
        "steps",
        f"the gradient of the {model} was exactly 0",
        "rewards that are all alike, answers that are all masked, a temperature of 0, or nothing that is left to learn",
        rings_at=3,
    )


def _skipped(model: str) -> Watched:
    return Watched(
        "skipped_updates",
        "updates",
        f"the norm of the gradient of the {model} was not finite, so the update was skipped",
        "the learning rate, the loss and the precision; the weights are those of the last update that was made",
    )


WATCHED: Mapping[str, Watched] = {
    "zero_gradients": _zero("actor"),
    "critic_zero_gradients": _zero("critic"),
    "skipped_updates": _skipped("actor"),
    "critic_skipped_updates": _skipped("critic"),
    "unchanged_weights": Watched(
        "unchanged_weights",
        "versions",
        "a version was published with the weights of the version before, although its updates had gradients",
        "what is sent: the trained weights may not reach the rollout (LoRA adapters that are neither merged nor sent, "
        "a frozen module, a custom engine that sends something else), or the updates may be too small for the "
        "precision in which weights are sent (bfloat16 has three digits, so small changes are rounded away)",
    ),
    "uniform_rewards": Watched(
        "uniform_rewards",
        "steps",
        "the answers to each prompt of the batch all had the same reward",
        "the reward function, and how hard the prompts are; or nothing is left to learn",
        rings_at=3,
    ),
    "empty_answers": Watched(
        "empty_answers",
        "steps",
        "at least half of the answers of the batch were empty",
        "the chat template, the sampling parameters (stop, max_tokens), and whether the policy has collapsed",
    ),
    "failed_validation": Watched(
        "failed_validation",
        "validations",
        "prompts of a validation have no score, and are left out of its means",
        "the errors of the validation's trajectories or rewards, which are logged above",
    ),
    FAILED_GROUPS: Watched(
        FAILED_GROUPS,
        "groups",
        "prompt groups failed for good",
        "the errors of their trajectories or rewards, which are logged above",
    ),
}


class Alarms:
    """Counts how often the condition of each alarm held, and decides when an alarm rings or ends the run.

    Args:
        limits: limit of each alarm, by the name of its setting; if None or missing, the alarm never ends the run.
        window: number of most recently ended prompt groups over which the share of failed groups is computed.
        tell: called with a message when an alarm begins to ring.
        counts: the property `counts` as saved in the checkpoint from which the run resumes.
    """

    def __init__(
        self,
        limits: Mapping[str, float | None],
        window: int = FEW,
        tell: Callable[[str], Any] = lambda text: None,
        counts: Mapping[str, int] | None = None,
    ) -> None:
        self._limits, self._tell = limits, tell
        self._counts: Counter[str] = Counter({name: n for name, n in (counts or {}).items() if name in WATCHED})
        self._times: Counter[str] = Counter()
        self._row: Counter[str] = Counter()
        self._said: dict[str, str] = {}
        self._error: AlarmLimit | None = None
        self._window = max(FEW, window)
        self._last: deque[bool] = deque(maxlen=self._window)
        self._failed, self._last_error = 0, ""
        self._failed_before = self._counts[FAILED_GROUPS]
        self._share_rings = False

    def note(self, name: str, holds: bool) -> None:
        """Record the result of one test of the condition that alarm ``name`` watches."""
        watched = WATCHED[name]
        self._times[name] += 1
        if not holds:
            self._row[name] = 0
            return
        self._row[name] += 1
        row, limit = self._row[name], self._limits.get(watched.setting)
        rings_at = watched.rings_at if limit is None else min(watched.rings_at, limit)
        if row >= rings_at:
            self._ring(name, is_first=row == rings_at)
        if limit is not None and row >= limit and self._error is None:
            self._error = AlarmLimit(
                f"{row} {watched.units} in a row, as many as {SETTING}.{watched.setting}={limit:g} allows: "
                f"{watched.what}. Look at {watched.causes}"
            )

    def _ring(self, name: str, is_first: bool) -> None:
        watched, row = WATCHED[name], self._row[name]
        self._counts[name] += row if is_first else 1
        self._said[name] = f"{watched.what} ({row} {watched.units} in a row). Look at {watched.causes}"
        if is_first:
            self._tell(f"alarm {name}: {self._said[name]}")

    def group_ended(self, error: BaseException | None) -> AlarmLimit | None:
        """Record that a prompt group is complete or failed; return the error that must end the run now, if any."""
        self._last.append(error is not None)
        if error is not None:
            self._failed += 1
            self._last_error = f"{type(error).__name__}: {error}"[:LONGEST]
        if len(self._last) == self._window:
            self._judge()
        return self._error

    def _judge(self) -> None:
        failed, ended, limit = sum(self._last), len(self._last), self._limits.get(FAILED_GROUPS)
        share = failed / ended
        rang, self._share_rings = self._share_rings, share >= RINGS_AT
        watched = WATCHED[FAILED_GROUPS]
        said = f"{failed} of the last {ended} {watched.what}, the last of them with {self._last_error}"
        if self._share_rings:
            # The count covers every group that failed in the run, not only the most recent ones.
            self._counts[FAILED_GROUPS] = self._failed_before + self._failed
            self._said[FAILED_GROUPS] = f"{said}. Look at {watched.causes}"
            if not rang:
                self._tell(f"alarm {FAILED_GROUPS}: {self._said[FAILED_GROUPS]}")
        if limit is not None and share > limit and self._error is None:
            self._error = AlarmLimit(
                f"{said}, more than {SETTING}.{FAILED_GROUPS}={limit:g} allows. Look at {watched.causes}"
            )

    def check(self) -> None:
        """Raise `AlarmLimit` if the run must end."""
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Test at the run's end the alarms for which a short run made too few tests, and raise `AlarmLimit` if need be.

        Such an alarm rings if its condition held at every test. `FAILED_GROUPS` tests the share of all groups.
        """
        for name, row in self._row.items():
            if 0 < row == self._times[name] < WATCHED[name].rings_at and name not in self._said:
                self._ring(name, is_first=True)
        if 0 < len(self._last) < self._window:
            self._judge()
        self.check()

    @property
    def counts(self) -> dict[str, int]:
        """The count of each alarm that has rung since training began, earlier launches of the run included.

        This is the number of tests at which the alarm rang, and of those just before, at which its condition held too;
        for `FAILED_GROUPS`, it is the number of failed groups.
        """
        return {name: self._counts[name] for name in WATCHED if self._counts[name]}

    def metrics(self) -> dict[str, int]:
        """Return the counts of all alarms, and their sum, as metrics (docs/metrics.md)."""
        return {f"{METRIC}{name}": self._counts[name] for name in WATCHED} | {f"{METRIC}{ALL}": self._counts.total()}

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return count, unit and last message of each alarm that rang, by the alarm's name."""
        return {
            name: {
                "count": count,
                "unit": WATCHED[name].units,
                "said": self._said.get(name, f"{WATCHED[name].what}, before the checkpoint that was resumed from"),
            }
            for name, count in self.counts.items()
        }


class UnchangedWeights:
    """Detects weight syncs that sent the same weights as the previous sync although training had changed them.

    The rollout then keeps sampling from old weights, and nothing else shows it: losses, rewards and staleness look
    normal. This happens with verl 0.9.1 if LoRA adapters are trained but not merged, because only the frozen base
    weights are sent (verl #7495).

    Training has changed the weights if at least one update of the version had a finite gradient norm above 0 and a
    learning rate above 0. Call :meth:`updated` at each step, :meth:`seal` after the last step of a version, and
    :meth:`published` after its weight sync.
    """

    def __init__(self) -> None:
        self._learning_rate: float | None = None
        self._is_due = False
        self._due: set[int] = set()
        self._checksum: str | None = None

    def updated(self, gradient_norms: Iterable[float], next_learning_rate: float) -> None:
        """Record the policy updates of one step, given the gradient norm of each update.

        ``next_learning_rate`` is the learning rate after the step, because verl reports only that one. The first step
        never counts as a change of the weights, because the learning rate with which it was made is not known.
        """
        moves = self._learning_rate is not None and self._learning_rate > 0
        if moves and any(math.isfinite(norm) and norm > 0 for norm in gradient_norms):
            self._is_due = True
        self._learning_rate = next_learning_rate

    def seal(self, version: int) -> None:
        """Record that the updates since the previous call make up ``version``, and that it gets no further updates."""
        if self._is_due:
            self._due.add(version)
        self._is_due = False

    def published(self, version: int, checksum: str | None) -> bool | None:
        """Compare the ``checksum`` of the weights that were sent for ``version`` with that of the weights sent before.

        Return True if they are equal although training had changed the weights; None if they are equal and no update
        should have changed the weights (a learning rate of 0, advantages that are all 0, skipped updates); and False if
        they differ or ``checksum`` is None (unknown).
        """
        was_due = any(due <= version for due in self._due)
        self._due = {due for due in self._due if due > version}
        before, self._checksum = self._checksum, checksum
        if checksum is None or checksum != before:
            return False
        return True if was_due else None


def how_it_ended(error: object, alarms: Mapping[str, Any]) -> Ended:
    """Return how a run ended, given its error (or None) and the alarms that rang."""
    if error is not None:
        return Ended.FAILED
    return Ended.WITH_ALARMS if alarms else Ended.WELL

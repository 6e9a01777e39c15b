# SPDX-License-Identifier: Apache-2.0
"""What the scheduler is told, keeps of a live group and raises, and the slot a trajectory holds while it samples."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.core.groups import Group, OnNonFinite, OnOverdue
from recipe.async_engine.rollout.agent_worker import TrajectoryScored
from recipe.async_engine.rollout.kept_answers import TrajectoryRecord


class RolloutFailed(RecipeError):
    """Generation cannot go on; the cause is chained."""


class BatchTimeout(RecipeError):
    """No batch became ready within ``async_training.timeouts.batch_wait``."""


@dataclass(frozen=True)
class SchedulerSettings:
    """What the scheduler is told once.

    Attributes:
        group_size: trajectories a group (``rollout.n``).
        slots: trajectories that may be at the engines at once, over all replicas.
        max_retries: attempts of one trajectory beyond the first.
        max_consecutive_failures: groups that may fail in a row before the run ends.
        on_overdue: what to do about running groups that keep the next batch from being taken.
        places: of the slots, those that generate at once; None: all of them.
        filter_groups: leave out complete groups whose answers all have the same `filter_metric`: their advantages are
            zero. New prompts take their place.
        on_non_finite: what a group with a number that is none counts as.
        filter_limit: groups that may be left out for one batch; the run ends beyond it. 0: any number.
        prompt_timeout_s: deadline of the data loader for one prompt.
    """

    group_size: int
    slots: int
    max_retries: int
    max_consecutive_failures: int
    on_overdue: OnOverdue = OnOverdue.WAIT
    places: int | None = None
    filter_groups: bool = False
    filter_limit: int = 0
    on_non_finite: OnNonFinite = OnNonFinite.FAIL
    prompt_timeout_s: float = 600.0


@dataclass
class GroupRun:
    """A live group: its prompt and what its trajectories have brought so far.

    fetched: the payloads themselves, once the trainer has them. scores: where log-prob servers score what waits, object
    references of its scores by the newest version. records: what a checkpoint had of trajectories that have not ended
    since. calls: those under way, by trajectory. dropped: it was overdue. failed: one of its trajectories failed for
    good. No trajectory of a group that was dropped or failed is tried again.
    """

    group: Group
    row: dict[str, Any]
    scored: list[TrajectoryScored | None]
    payloads: list[Any]
    fetched: list[bytes] = field(default_factory=list)
    scores: list[Any] = field(default_factory=list)
    records: dict[int, TrajectoryRecord] = field(default_factory=dict)
    calls: dict[int, Any] = field(default_factory=dict)
    dropped: bool = False
    failed: bool = False

    @property
    def keys(self) -> set[str]:
        """Of the calls under way."""
        return {call.key for call in self.calls.values()}

    @property
    def unfinished(self) -> list[int]:
        """Its trajectories that have brought no payload yet."""
        return [n for n, payload in enumerate(self.payloads) if payload is None]

    @property
    def cut_tokens(self) -> int:
        """Tokens of cut answers in the trajectories that are complete."""
        there = zip(self.scored, self.payloads, strict=True)
        return sum(scored.cut_tokens for scored, payload in there if payload is not None and scored is not None)

    @property
    def is_uniform(self) -> bool:
        """Whether several answers are there and nothing tells them apart."""
        return len(self.scored) > 1 and len({scored.filter_metric for scored in self.scored}) == 1

    @property
    def oldest_version(self) -> int:
        return min(scored.oldest_version for scored in self.scored if scored is not None)


class Slot:
    """A generation slot, held from its making until :meth:`free`; both calls may be repeated."""

    def __init__(self, count: Callable[[int], None]) -> None:
        """``count`` is told +1 and -1; the first hold is the caller's, who reserved the group's slots at once."""
        self._count = count
        self.held = True

    def hold(self) -> None:
        if not self.held:
            self.held = True
            self._count(1)

    def free(self) -> None:
        if self.held:
            self.held = False
            self._count(-1)

# SPDX-License-Identifier: Apache-2.0
"""What the scheduler is told, keeps of a live group and raises."""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.core.groups import Group, OnNonFinite
from recipe.async_engine.core.prompt_manager import TrajectoryState
from recipe.async_engine.rollout.kept_answers import TrajectoryRecord
from recipe.async_engine.rollout.soundness import RewardError
from recipe.async_engine.rollout.trajectory_events import TrajectoryCancelled, TrajectoryDisturbed, TrajectoryScored


class RolloutFailed(RecipeError):
    """Generation cannot go on; the cause is chained."""


DEATHS_FOR_NOTHING = 2
"""How often a trajectory may lose its worker to what may be another one's doing; after that it is tried by itself."""
DEATHS_ALONE = 2
"""How often it may lose one that it has for itself: what was there before may have left the cause of the first time."""


def needs_to_be_alone(errors: Sequence[RecipeError]) -> bool:
    """Whether a trajectory that failed so is under suspicion: its next attempt has a worker for itself."""
    return sum(isinstance(error, TrajectoryDisturbed) for error in errors) >= DEATHS_FOR_NOTHING


def may_try_again(errors: Sequence[RecipeError], max_retries: int) -> bool:
    """Whether a trajectory that failed so has another attempt.

    Of its own failures it may have ``max_retries``. What another one of its worker may have done does not count, but
    where that goes on happening while it has a worker for itself, it is taken for its own.
    """
    if errors and isinstance(errors[-1], TrajectoryCancelled | RewardError):
        return False
    disturbed = sum(isinstance(error, TrajectoryDisturbed) for error in errors)
    return disturbed < DEATHS_FOR_NOTHING + DEATHS_ALONE and len(errors) - disturbed <= max_retries


class BatchTimeout(RecipeError):
    """No batch became ready within ``async_training.timeouts.batch_wait``."""


@dataclass(frozen=True)
class SchedulerSettings:
    """What the scheduler is told once.

    Attributes:
        group_size: trajectories a group (``rollout.n``).
        turns: generation happens in turns, each of which ends with its batch; otherwise it is a stream.
        slots: trajectories that may be at the engines at once, over all replicas.
        slots_with_tools: as many may be under way while some of them are at tools instead; None: no more.
        max_retries: attempts of one trajectory beyond the first.
        max_consecutive_failures: groups that may fail in a row before the run ends.
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
    slots_with_tools: int | None = None
    filter_groups: bool = False
    filter_limit: int = 0
    on_non_finite: OnNonFinite = OnNonFinite.FAIL
    prompt_timeout_s: float = 600.0
    turns: bool = False


@dataclass
class GroupRun:
    """A live group: its prompt and what its trajectories have brought so far.

    fetched: the payloads themselves, once the trainer has them. scores: where log-prob servers score what waits, object
    references of its scores by the newest version. records: what a checkpoint had of trajectories that have not ended
    since. issued_at, ready_at: when, by the monotonic clock. By trajectory: calls under way, what attempts failed with,
    and the worker to avoid, that of the last one. given_up: it failed or was left out, so that none of its trajectories
    is tried again.
    """

    group: Group
    row: dict[str, Any]
    scored: list[TrajectoryScored | None]
    payloads: list[Any]
    fetched: list[Any] = field(default_factory=list)
    scores: list[Any] = field(default_factory=list)
    records: dict[int, TrajectoryRecord] = field(default_factory=dict)
    calls: dict[int, Any] = field(default_factory=dict)
    errors: defaultdict[int, list[RecipeError]] = field(default_factory=lambda: defaultdict(list))
    avoid: dict[int, str] = field(default_factory=dict)
    given_up: bool = False
    issued_at: float = field(default_factory=time.monotonic)
    ready_at: float = 0.0

    @property
    def keys(self) -> set[str]:
        """Of the calls under way."""
        return {call.key for call in self.calls.values()}

    @property
    def unfinished(self) -> list[int]:
        """Its trajectories that have brought no payload yet."""
        return [n for n, payload in enumerate(self.payloads) if payload is None]

    @property
    def states(self) -> list[TrajectoryState]:
        """Of its trajectories while none is under way."""
        kept = [TrajectoryState.INTERRUPTED if n in self.records else TrajectoryState.PENDING for n in self.unfinished]
        return [kept.pop(0) if payload is None else TrajectoryState.SAMPLED for payload in self.payloads]

    def begin_anew(self) -> None:
        """All that it has brought is lost."""
        self.scored, self.payloads, self.scores = [None] * len(self.scored), [None] * len(self.payloads), []
        self.errors.clear()

    def kept(self, told: dict[str, TrajectoryRecord | None]) -> list[TrajectoryRecord | None]:
        """What is kept of each trajectory, None if it is complete or nothing is.

        One that no worker told of, by its call's key, keeps what it began with.
        """
        keys = {n: call.key for n, call in self.calls.items()}
        known = {n: told[keys[n]] if keys.get(n) in told else self.records.get(n) for n in self.unfinished}
        return [known.get(n) for n in range(len(self.payloads))]

    @property
    def cut_tokens(self) -> int:
        """Tokens of cut answers in the trajectories that are complete."""
        there = zip(self.scored, self.payloads, strict=True)
        return sum(scored.cut_tokens for scored, payload in there if payload is not None and scored is not None)

    @property
    def sampled_tokens(self) -> int:
        """Tokens that a policy sampled, in the trajectories that are complete."""
        there = zip(self.scored, self.payloads, strict=True)
        return sum(scored.sampled_tokens for scored, payload in there if payload is not None and scored is not None)

    @property
    def answers(self) -> list[TrajectoryScored]:
        """Those that are there, with their rewards."""
        return [scored for scored in self.scored if scored is not None]

    @property
    def is_uniform(self) -> bool:
        """Whether several answers are there and nothing tells them apart."""
        return len(self.answers) > 1 and len({scored.filter_metric for scored in self.answers}) == 1

    @property
    def oldest_version(self) -> int:
        return min(scored.oldest_version for scored in self.answers)

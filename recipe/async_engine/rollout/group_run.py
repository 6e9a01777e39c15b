# SPDX-License-Identifier: Apache-2.0
"""What the scheduler is told, keeps of a live group and of each of its trajectories, and raises.

A trajectory is one object on the scheduler's side, `TrajectoryRun`, from its group's issue to its end, over all of its
attempts: the scheduler says when an attempt is made, the pool of workers makes it and notes here what came of it, and a
validation's answers are the same objects.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.core.groups import Group, OnNonFinite
from recipe.async_engine.core.prompt_manager import TrajectoryState
from recipe.async_engine.rollout.kept_answers import TrajectoryRecord
from recipe.async_engine.rollout.loop_output import RewardError


class RolloutFailed(RecipeError):
    """Generation cannot go on, or gave no batch in time; the cause is chained."""


class AgentLoopError(RecipeError):
    """An agent loop raised; a note has its traceback, which Ray cuts short."""


class TrajectoryFailed(RecipeError):
    """One attempt failed; a note has the traceback."""


class TrajectoryDisturbed(TrajectoryFailed):
    """It ended by what another trajectory of its worker may have done: the worker died, or it was cancelled there."""


class TrajectoryCancelled(RecipeError):
    """The trajectory was ended on request."""


DEATHS_FOR_NOTHING = 2
"""How often a trajectory may lose its worker to what may be another one's doing; after that it is tried by itself."""
DEATHS_ALONE = 2
"""How often it may lose one that it has for itself: what was there before may have left the cause of the first time."""


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


@dataclass(frozen=True)
class TrajectoryScored:
    """What the scheduler needs to know of a finished trajectory.

    Attributes:
        score: the reward, None if the trainer computes it (reward model on the trainer's accelerators).
        oldest_version, newest_version: of the response's sampled tokens.
        exact_versions: False if the agent loop rewrote its answer, or left out parts of it so that two readings fit:
            what is not sure counts as sampled by the oldest version that it may be of.
        interruptions: weight syncs that cut this trajectory and were resumed.
        cut_tokens: tokens that were sampled before one of them, in the answer it cut.
        reprefilled_tokens: tokens sent to an engine again because of them.
        response_tokens: length of the response, tool tokens included.
        recovered_tokens: of answers whose server died, which went on elsewhere from them.
        restored_tokens: of answers that a checkpoint held.
        filter_metric: by which groups are filtered (``algorithm.filter_groups``), None if they are not.
        sampled_tokens: of the response, those that a policy sampled.
        received_tokens: of all answers of servers in this process, whatever the agent loop made of them.
        tool_s: seconds that it was in tools.
        asked_s: seconds that it waited for answers of servers.
    """

    score: float | None
    oldest_version: int
    newest_version: int
    exact_versions: bool
    interruptions: int
    reprefilled_tokens: int
    response_tokens: int
    cut_tokens: int = 0
    recovered_tokens: int = 0
    restored_tokens: int = 0
    filter_metric: float | None = None
    sampled_tokens: int = 0
    received_tokens: int = 0
    tool_s: float = 0.0
    asked_s: float = 0.0


@dataclass(eq=False)
class TrajectoryRun:
    """One trajectory, over all of its attempts.

    of: its group. n: its number in that. record: what a checkpoint had of it, until its first attempt ends. errors:
    what attempts failed with. scored, payload: of the one that succeeded, the payload as an object reference.

    Of the newest attempt: key, its name at the worker; worker_id, which one; under_way, whether it has not ended;
    submitted, whether the worker has it; cancelled, whether it is to end before that.
    """

    of: GroupRun
    n: int
    record: TrajectoryRecord | None = None
    errors: list[RecipeError] = field(default_factory=list)
    scored: TrajectoryScored | None = None
    payload: Any = None
    key: str = ""
    worker_id: str | None = None
    under_way: bool = False
    submitted: bool = False
    cancelled: bool = False

    @property
    def disturbances(self) -> int:
        return sum(isinstance(error, TrajectoryDisturbed) for error in self.errors)

    @property
    def is_suspect(self) -> bool:
        """Whether its next attempt has a worker for itself: others died under it."""
        return self.disturbances >= DEATHS_FOR_NOTHING

    def may_try_again(self, max_retries: int) -> bool:
        """Whether it has another attempt.

        Of its own failures it may have ``max_retries``. What another one of its worker may have done does not count,
        but where that goes on happening while it has a worker for itself, it is taken for its own.
        """
        if self.errors and isinstance(self.errors[-1], TrajectoryCancelled | RewardError):
            return False
        own = len(self.errors) - self.disturbances
        return self.disturbances < DEATHS_FOR_NOTHING + DEATHS_ALONE and own <= max_retries

    def kept(self, told: dict[str, TrajectoryRecord | None]) -> TrajectoryRecord | None:
        """What is kept of it, by what workers told of their attempts; of one that none told of, what it began with."""
        if self.payload is not None:
            return None
        return told[self.key] if self.under_way and self.key in told else self.record

    def begin_anew(self) -> None:
        """What it has brought is lost."""
        self.scored = self.payload = None
        self.errors.clear()


class GroupRun:
    """A live group: its prompt and its trajectories.

    fetched: the payloads themselves, once the trainer has them. scores: where log-prob servers score what waits, object
    references of its scores by the newest version. issued_at, ready_at: when, by the monotonic clock. given_up: it
    failed or was left out, so that none of its trajectories is tried again.
    """

    def __init__(self, group: Group, row: dict[str, Any], size: int) -> None:
        self.group, self.row = group, row
        self.trajectories = [TrajectoryRun(self, n) for n in range(size)]
        self.fetched: list[Any] = []
        self.scores: list[Any] = []
        self.given_up = False
        self.issued_at, self.ready_at = time.monotonic(), 0.0

    @property
    def payloads(self) -> list[Any]:
        """Of each trajectory, None where it is not complete."""
        return [each.payload for each in self.trajectories]

    @property
    def keys(self) -> set[str]:
        """Of the attempts under way."""
        return {each.key for each in self.trajectories if each.under_way}

    @property
    def is_complete(self) -> bool:
        return all(each.payload is not None for each in self.trajectories)

    @property
    def states(self) -> list[TrajectoryState]:
        """Of its trajectories while none is under way."""
        pending, sampled = TrajectoryState.PENDING, TrajectoryState.SAMPLED
        return [pending if each.payload is None else sampled for each in self.trajectories]

    def begin_anew(self) -> None:
        """All that it has brought is lost."""
        self.scores = []
        for each in self.trajectories:
            each.begin_anew()

    @property
    def complete(self) -> list[TrajectoryScored]:
        """Of the trajectories whose payloads are there."""
        return [each.scored for each in self.trajectories if each.payload is not None and each.scored is not None]

    @property
    def cut_tokens(self) -> int:
        """Tokens of cut answers in the trajectories that are complete."""
        return sum(scored.cut_tokens for scored in self.complete)

    @property
    def sampled_tokens(self) -> int:
        """Tokens that a policy sampled, in the trajectories that are complete."""
        return sum(scored.sampled_tokens for scored in self.complete)

    @property
    def is_uniform(self) -> bool:
        """Whether several answers are there and nothing tells them apart."""
        return len(self.complete) > 1 and len({scored.filter_metric for scored in self.complete}) == 1

    @property
    def oldest_version(self) -> int:
        return min(scored.oldest_version for scored in self.complete)

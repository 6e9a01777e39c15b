# SPDX-License-Identifier: Apache-2.0
"""The scheduler's settings, its objects for live groups and trajectories, and the errors that it handles.

On the scheduler's side a trajectory is one object, `TrajectoryRun`, from the issue of its group to its end, over all
its attempts. The scheduler decides when an attempt is made, and the pool of workers makes it and writes the result
here. The answers of a validation use the same objects.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.core.groups import Group, GroupState, OnNonFinite
from recipe.async_engine.core.prompt_manager import TrajectoryState
from recipe.async_engine.record.events import GROUPS, TRAJECTORIES, Event
from recipe.async_engine.rollout.kept_answers import TrajectoryRecord
from recipe.async_engine.rollout.loop_output import RewardError


class RolloutFailed(RecipeError):
    """Generation cannot continue, or gave no batch in time. The cause is chained."""


class AgentLoopError(RecipeError):
    """An agent loop raised an error. A note has its traceback, which Ray would cut short."""


class TrajectoryFailed(RecipeError):
    """One attempt at a trajectory failed. A note has the traceback."""


class TrajectoryDisturbed(TrajectoryFailed):
    """An attempt ended for a reason that another trajectory of the same worker may have caused.

    The worker died, or the attempt was cancelled in the worker although nobody had asked for that.
    """


class TrajectoryCancelled(RecipeError):
    """An attempt was ended on request."""


DEATHS_FOR_NOTHING = 2
"""How often a trajectory may lose its worker before it gets one of its own, because another trajectory may be the
cause.
"""
DEATHS_ALONE = 2
"""How often it may lose a worker of its own. An earlier trajectory may have left the cause of the first loss."""


@dataclass(frozen=True)
class SchedulerSettings:
    """The settings of the scheduler, which do not change during a run.

    Attributes:
        group_size: trajectories in a group (``rollout.n``).
        slots: trajectories that may be at the engines at once, over all replicas.
        max_retries: attempts at one trajectory beyond the first.
        max_consecutive_failures: groups that may fail in a row before the run ends.
        slots_with_tools: trajectories that may be under way if some of them are in tools. None: the same as ``slots``.
        filter_groups: whether complete groups are left out if all their answers have the same `filter_metric`, because
            their advantages are zero. New prompts replace them.
        filter_limit: groups that may be left out for one batch before the run ends. 0: any number.
        on_non_finite: how a group with a non-finite number is counted.
        prompt_timeout_s: the data loader's deadline for one prompt.
        turns: whether generation happens in turns, each of which ends with its batch. Otherwise it is a stream.
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
    """The facts about a finished trajectory that the scheduler needs.

    Attributes:
        score: the reward. None if the trainer computes it, with a reward model on its own accelerators.
        oldest_version, newest_version: of the response's sampled tokens.
        exact_versions: False if the agent loop rewrote its answer, or left out parts so that two readings fit. Each
            uncertain token then counts as sampled by the oldest version that is possible.
        interruptions: weight syncs that cut this trajectory.
        reprefilled_tokens: tokens that were sent to an engine again because of these interruptions.
        response_tokens: the length of the response, tool tokens included.
        cut_tokens: tokens that were sampled before an interruption, in the answer that it cut.
        recovered_tokens: tokens that were fetched from a server before it died.
        restored_tokens: tokens of answers that came from a checkpoint.
        filter_metric: the value by which groups are filtered (``algorithm.filter_groups``). None without a filter.
        sampled_tokens: tokens of the response that a policy sampled.
        received_tokens: tokens that servers answered in this process, whether or not the agent loop used them.
        tool_s: seconds in tools.
        asked_s: seconds in which the trajectory waited for servers.
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

    Attributes:
        of: the group of the trajectory.
        n: its number in the group.
        record: what a checkpoint holds of it, until its first attempt ends.
        errors: the errors of its failed attempts.
        scored, payload: the result of the attempt that succeeded, the payload as an object reference.
        key: the name of the newest attempt at its worker.
        worker_id: the worker of the newest attempt.
        under_way: whether the newest attempt has not ended yet.
        submitted: whether the worker has the newest attempt.
        cancelled: whether the newest attempt is to end before the worker has it.
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
        """Whether the next attempt gets a worker of its own, because workers died under earlier attempts."""
        return self.disturbances >= DEATHS_FOR_NOTHING

    def may_try_again(self, max_retries: int) -> bool:
        """Return whether the trajectory has another attempt.

        It may fail ``max_retries`` times by itself. Attempts that another trajectory of its worker may have disturbed
        do not count. But if the disturbances continue while it has a worker of its own, it is taken to cause them
        itself.
        """
        if self.errors and isinstance(self.errors[-1], TrajectoryCancelled | RewardError):
            return False
        own = len(self.errors) - self.disturbances
        return self.disturbances < DEATHS_FOR_NOTHING + DEATHS_ALONE and own <= max_retries

    def kept(self, told: dict[str, TrajectoryRecord | None]) -> TrajectoryRecord | None:
        """Return what a checkpoint keeps of the trajectory.

        Args:
            told: what the workers said of their attempts, by key. A trajectory that no worker mentions keeps its own
                record.
        """
        if self.payload is not None:
            return None
        return told[self.key] if self.under_way and self.key in told else self.record

    def begin_anew(self) -> None:
        """Forget the result, because the payload is lost."""
        self.scored = self.payload = None
        self.errors.clear()


class GroupRun:
    """A live group: its prompt and its trajectories.

    Attributes:
        fetched: the payloads themselves, once the trainer has fetched them.
        scores: object references of the scores by the newest version, if log-prob servers score groups that wait.
        issued_at, ready_at: times of the monotonic clock.
        given_up: whether the group failed or was left out, so that none of its trajectories is tried again.
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
        """The payload of each trajectory, None for one that is not complete."""
        return [each.payload for each in self.trajectories]

    @property
    def keys(self) -> set[str]:
        """The keys of the attempts under way."""
        return {each.key for each in self.trajectories if each.under_way}

    @property
    def is_complete(self) -> bool:
        return all(each.payload is not None for each in self.trajectories)

    @property
    def states(self) -> list[TrajectoryState]:
        """The states of the trajectories while no attempt is under way."""
        pending, sampled = TrajectoryState.PENDING, TrajectoryState.SAMPLED
        return [pending if each.payload is None else sampled for each in self.trajectories]

    def begin_anew(self) -> None:
        """Forget all results, because payloads are lost."""
        self.scores = []
        for each in self.trajectories:
            each.begin_anew()

    @property
    def complete(self) -> list[TrajectoryScored]:
        """The results of the trajectories that have a payload."""
        return [each.scored for each in self.trajectories if each.payload is not None and each.scored is not None]

    @property
    def cut_tokens(self) -> int:
        """Tokens of cut answers in the complete trajectories."""
        return sum(scored.cut_tokens for scored in self.complete)

    @property
    def sampled_tokens(self) -> int:
        """Sampled tokens in the complete trajectories."""
        return sum(scored.sampled_tokens for scored in self.complete)

    @property
    def is_uniform(self) -> bool:
        """Whether there are several complete answers and all have the same filter metric."""
        return len(self.complete) > 1 and len({scored.filter_metric for scored in self.complete}) == 1

    @property
    def oldest_version(self) -> int:
        return min(scored.oldest_version for scored in self.complete)


def group_events(run: GroupRun, group: Group, version: int, reason: str | None = None) -> Iterator[Event]:
    """Return the events of a group that was trained at ``version``, or was filtered or failed for a ``reason``, now.

    docs/run-record.md has the meaning of the events.
    """
    now = time.monotonic()
    what = "trained" if group.state is GroupState.TAKEN else group.state.value
    if run.ready_at:
        yield Event(GROUPS, "ready", run.ready_at, now, version=version, group=group.id)
    tokens, start = run.sampled_tokens, run.group.start
    yield Event(GROUPS, what, run.issued_at, now, version=start, group=group.id, tokens=tokens, text=reason)


def attempt_events(run: GroupRun, n: int, began: float, sampled: float | None) -> Iterator[Event]:
    """Return the events of an attempt at trajectory ``n`` that began at ``began`` and ends now.

    ``sampled`` is the time of its last token, or None if it did not get so far. docs/run-record.md has the meaning of
    the events.
    """
    now, trajectory = time.monotonic(), run.trajectories[n]
    scored = trajectory.scored
    attempt = Event(TRAJECTORIES, "generating", began, sampled or now, 1.0, run.group.start, run.group.id, n)
    tokens = None if scored is None else scored.sampled_tokens
    ended = "" if scored is not None else ", without a reward"
    yield attempt._replace(tokens=tokens, text=f"attempt {len(trajectory.errors) + 1}{ended}")
    if sampled is not None:
        yield attempt._replace(what="reward", start=sampled, end=now)
    if scored is not None and scored.tool_s and sampled is not None:
        yield attempt._replace(what="tools", start=sampled - scored.tool_s, end=sampled, tokens=None)
    if scored is not None and scored.interruptions:
        yield attempt._replace(what="interrupted", tokens=scored.reprefilled_tokens)

# SPDX-License-Identifier: Apache-2.0
"""The scheduler's settings, its objects for live groups and trajectories, and the errors that it handles.

The scheduler has one object, `TrajectoryRun`, for each trajectory, from the issue of its group to the end of its last
attempt. The scheduler decides when to make an attempt. The worker pool makes the attempt and writes the result into the
object. A validation uses the same objects.
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
    """Generation cannot continue, or no batch was ready in time. A causing error is chained."""


class AgentLoopError(RecipeError):
    """An agent loop raised an error. A note has the whole traceback, because Ray shortens long messages."""


class TrajectoryFailed(RecipeError):
    """One attempt at a trajectory failed. If an agent loop raised, a note has the traceback."""


class TrajectoryDisturbed(TrajectoryFailed):
    """An attempt failed, possibly because of another trajectory in the same worker.

    Either the worker died, or code in the worker cancelled the attempt without a request from the scheduler.
    """


class TrajectoryCancelled(RecipeError):
    """The scheduler had an attempt cancelled."""


DEATHS_FOR_NOTHING = 2
"""Number of disturbed attempts after which a trajectory runs alone in a worker. Another trajectory may have caused
these disturbances.
"""
DEATHS_ALONE = 2
"""Number of further disturbed attempts, alone in a worker, after which a trajectory fails. An earlier trajectory may
have damaged the first of these workers.
"""


@dataclass(frozen=True)
class SchedulerSettings:
    """The settings of the scheduler, which do not change during a run.

    Attributes:
        group_size: number of trajectories in a group (``rollout.n``).
        slots: number of trajectories that may be at the engines at once, over all replicas.
        max_retries: number of attempts at one trajectory beyond the first.
        max_consecutive_failures: number of groups in a row whose failure ends the run.
        slots_with_tools: number of trajectories that may be running while some of them use tools. None means ``slots``.
        filter_groups: whether a complete group is dropped if all its answers have the same `filter_metric`, so that
            their advantages are zero. A group of a new prompt replaces it.
        filter_limit: number of groups that may be dropped for one batch before the run ends; 0 for no limit.
        on_non_finite: whether a group with a number that is NaN, infinite or missing counts as failed or as dropped.
        prompt_timeout_s: seconds within which the data loader has to return a prompt.
        turns: whether generation happens in turns, each of which ends when its batch is taken. Otherwise generation is
            a continuous stream.
        places: sequence slots of all engines together; 0 means ``slots``.
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
    places: int = 0


@dataclass(frozen=True)
class TrajectoryScored:
    """The facts about a finished trajectory that the scheduler needs.

    Attributes:
        score: the reward, or None if the trainer computes the reward, with a reward model on its own accelerators.
        oldest_version, newest_version: the oldest and the newest version that sampled tokens of the response.
        exact_versions: False if the agent loop changed the sampled tokens, or dropped some of them, so that the version
            of some tokens is ambiguous. Each such token counts as sampled by the oldest possible version.
        interruptions: number of interruptions, by weight syncs or deaths of servers, after which an answer was resumed.
        reprefilled_tokens: number of tokens that were sent to an engine again because of these interruptions.
        response_tokens: length of the response in tokens, including the tokens that tools added.
        cut_tokens: number of tokens that were sampled before an interruption of their answer.
        recovered_tokens: number of tokens that were fetched from a server before it died.
        restored_tokens: number of tokens in answers that came from a checkpoint.
        filter_metric: the value by which groups are filtered (``algorithm.filter_groups``). None without a filter.
        sampled_tokens: number of tokens of the response that the policy sampled.
        received_tokens: number of tokens that servers returned to this process, including those that the agent loop
            did not use.
        tool_s: seconds in tools.
        asked_s: seconds for which the trajectory waited for servers.
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
        n: number of the trajectory in its group, from 0.
        record: the trajectory's answers in the checkpoint that the run resumed from, until the first attempt ends.
        scored: the facts about the attempt that succeeded, if any.
        payload: an object reference of that attempt's padded trajectory.
        key: the name of the newest attempt, by which its worker knows it.
        worker_id: the worker of the newest attempt.
        under_way: whether the newest attempt has not ended yet.
        submitted: whether the newest attempt was sent to its worker.
        cancelled: whether the newest attempt was cancelled before it was sent to its worker.
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
        """Whether the next attempt runs alone in a worker, because it may have caused the earlier disturbances."""
        return self.disturbances >= DEATHS_FOR_NOTHING

    def may_try_again(self, max_retries: int) -> bool:
        """Return whether another attempt may be made.

        A trajectory is retried up to ``max_retries`` times. Disturbed attempts do not count, because another trajectory
        may be the cause. If disturbances continue while the trajectory runs alone in a worker, it is taken to be the
        cause, and fails.
        """
        if self.errors and isinstance(self.errors[-1], TrajectoryCancelled | RewardError):
            return False
        own = len(self.errors) - self.disturbances
        return self.disturbances < DEATHS_FOR_NOTHING + DEATHS_ALONE and own <= max_retries

    def kept(self, told: dict[str, TrajectoryRecord | None]) -> TrajectoryRecord | None:
        """Return the answers that a checkpoint keeps of an unfinished trajectory, or None for a finished one.

        Args:
            told: the answers that the workers reported, by key of the attempt. If no worker reported on the newest
                attempt, the result is `record`.
        """
        if self.payload is not None:
            return None
        return told[self.key] if self.under_way and self.key in told else self.record

    def begin_anew(self) -> None:
        """Forget the result and the errors, because the payload is lost."""
        self.scored = self.payload = None
        self.errors.clear()


class GroupRun:
    """A live group: its prompt and its trajectories.

    Attributes:
        fetched: the payloads themselves, once the trainer has fetched them.
        scores: object references of log-probs by the newest version, if log-prob servers score waiting groups.
        issued_at, ready_at: times of `time.monotonic` at which the group was issued and became ready.
        sampled_at: time of the last token of the trajectory that was sampled last, or None.
        given_up: whether the group failed or was dropped, so that none of its trajectories is retried.
    """

    def __init__(self, group: Group, row: dict[str, Any], size: int) -> None:
        self.group, self.row = group, row
        self.trajectories = [TrajectoryRun(self, n) for n in range(size)]
        self.fetched: list[Any] = []
        self.scores: list[Any] = []
        self.given_up = False
        self.issued_at, self.ready_at = time.monotonic(), 0.0
        self.sampled_at: float | None = None

    @property
    def payloads(self) -> list[Any]:
        """Object references of the trajectories' payloads, with None for each trajectory that is not complete."""
        return [each.payload for each in self.trajectories]

    @property
    def keys(self) -> set[str]:
        return {each.key for each in self.trajectories if each.under_way}

    @property
    def is_complete(self) -> bool:
        return all(each.payload is not None for each in self.trajectories)

    @property
    def states(self) -> list[TrajectoryState]:
        """The states of the trajectories of a group of which no attempt is running."""
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
        """Number of tokens in the complete trajectories that were sampled before an interruption."""
        return sum(scored.cut_tokens for scored in self.complete)

    @property
    def sampled_tokens(self) -> int:
        return sum(scored.sampled_tokens for scored in self.complete)

    @property
    def is_uniform(self) -> bool:
        return len(self.complete) > 1 and len({scored.filter_metric for scored in self.complete}) == 1

    @property
    def oldest_version(self) -> int:
        return min(scored.oldest_version for scored in self.complete)


def group_events(run: GroupRun, group: Group, version: int, reason: str | None = None) -> Iterator[Event]:
    """Return the events of a group that was just trained at ``version``, filtered or failed.

    ``reason`` says why the group was filtered or failed. docs/run-record.md explains the events.
    """
    now = time.monotonic()
    what = "trained" if group.state is GroupState.TAKEN else group.state.value
    if run.ready_at:
        yield Event(GROUPS, "ready", run.ready_at, now, version=version, group=group.id)
    tokens, start = run.sampled_tokens, run.group.start
    yield Event(GROUPS, what, run.issued_at, now, version=start, group=group.id, tokens=tokens, text=reason)


def attempt_events(run: GroupRun, n: int, began: float, sampled: float | None) -> Iterator[Event]:
    """Return the events of an attempt at trajectory ``n`` that began at ``began`` and ends now.

    ``sampled`` is the time of the last token, or None if the attempt ended before. docs/run-record.md explains the
    events.
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

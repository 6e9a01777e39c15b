# SPDX-License-Identifier: Apache-2.0
"""The rollout scheduler's settings, its objects for prompt groups and their trajectories, and the errors it handles.

A group consists of a prompt and several trajectories for it. The scheduler has a `GroupRun` for each group that is
being generated or waits to be trained, with a `TrajectoryRun` for each trajectory. The scheduler decides when to make
an attempt at a trajectory. The worker pool makes the attempt and writes the result into the `TrajectoryRun`. Validation
uses the same objects.
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
    """Generation cannot continue, or no batch was ready in time. If another error led to this, it is ``__cause__``."""


class AgentLoopError(RecipeError):
    """An agent loop raised an error. The traceback of the loop's error is added to this exception with ``add_note``.

    It is not in the message, because Ray shortens long messages.
    """


class TrajectoryFailed(RecipeError):
    """One attempt at a trajectory failed.

    If the cause is an error of an agent loop, the traceback of that error is added to this exception with ``add_note``.
    """


class TrajectoryDisturbed(TrajectoryFailed):
    """An attempt failed, possibly because of another trajectory in the same worker.

    Either the worker died, or code in the worker cancelled the attempt without a request from the scheduler.
    """


class TrajectoryCancelled(RecipeError):
    """An attempt was cancelled at the request of the scheduler."""


DEATHS_FOR_NOTHING = 2
"""Number of disturbed attempts (`TrajectoryDisturbed`) after which a trajectory runs alone in a worker. Before that,
another trajectory in the same worker is assumed to be the cause.
"""
DEATHS_ALONE = 2
"""A trajectory that runs alone in a worker fails when this number of its attempts there were disturbed
(`TrajectoryDisturbed`). One is not enough, because another trajectory may have damaged the worker before.
"""


@dataclass(frozen=True)
class SchedulerSettings:
    """The settings of the scheduler, which do not change during a run.

    Attributes:
        group_size: number of trajectories in a group (``rollout.n``), unless the prompt's data row sets another.
        slots: number of trajectories that may generate at once, in all replicas together.
        max_retries: number of attempts at one trajectory after the first.
        max_consecutive_failures: the run ends when this number of groups in a row have failed.
        slots_with_tools: upper limit to which ``slots`` may grow while trajectories use tools. None means ``slots``.
        filter_groups: whether a complete group is dropped if all its answers have the same
            `TrajectoryScored.filter_metric`, which would make their advantages zero. A new group replaces it.
        filter_limit: number of groups that may be dropped for one batch before the run ends; 0 means no limit.
        on_non_finite: what happens to a group with a log-prob or reward that is NaN, infinite or missing: it fails, or
            it is dropped.
        prompt_timeout_s: seconds within which the data loader has to return a prompt.
        places: number of sequences that all engines together can generate at once; 0 means ``slots``.
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
    places: int = 0


@dataclass(frozen=True)
class TrajectoryScored:
    """The facts about a finished trajectory that the scheduler needs.

    A trajectory consists of a prompt and a response. If the agent loop returned a list of outputs, these are the facts
    about all outputs together.

    Attributes:
        score: the reward of the last output, or None if the trainer computes the reward later with a reward model on
            the trainer's accelerators.
        oldest_version, newest_version: the oldest and the newest policy version that sampled tokens of the response.
        exact_versions: False if the agent loop changed or dropped sampled tokens, so that the version of some tokens is
            ambiguous. Each such token counts as sampled by the oldest possible version.
        interruptions: number of times that a weight sync or a server's death interrupted an answer, which was resumed.
        reprefilled_tokens: number of tokens that an engine had to read again because of these interruptions.
        response_tokens: number of tokens of the response, including those that tools added.
        cut_tokens: number of tokens that belong to an interrupted answer and were sampled before the interruption.
        recovered_tokens: number of tokens that were fetched from a server before it died.
        restored_tokens: number of tokens in answers that came from a checkpoint instead of a server.
        filter_metric: the value by which groups are filtered (``algorithm.filter_groups``). None without a filter.
        sampled_tokens: number of tokens of the response that the policy sampled.
        received_tokens: number of tokens that servers returned, including those that the agent loop did not use.
        tool_s: seconds that the trajectory spent in tools.
        asked_s: seconds for which the trajectory waited for rollout servers.
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
    """The state of one trajectory, over all of its attempts.

    Attributes:
        of: the group of the trajectory.
        n: index of the trajectory in its group, from 0.
        record: the trajectory's answers in the checkpoint from which the run was resumed. None after the first attempt.
        errors: the error of each failed attempt.
        scored: the facts about the successful attempt, if any.
        payload: Ray object reference to the padded outputs of the successful attempt.
        key: the name of the newest attempt. The attempt's worker identifies it by this name.
        worker_id: the worker of the newest attempt.
        under_way: whether the newest attempt is still running.
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
        """Whether the trajectory has to run alone in a worker, because it may have disturbed other trajectories."""
        return self.disturbances >= DEATHS_FOR_NOTHING

    def may_try_again(self, max_retries: int) -> bool:
        """Return whether another attempt at this trajectory may be made.

        A trajectory is retried up to ``max_retries`` times. Disturbed attempts (`TrajectoryDisturbed`) do not count,
        because another trajectory may have caused the disturbance. If attempts are still disturbed when the trajectory
        runs alone in a worker, the trajectory counts as the cause and fails. A trajectory that was cancelled, or whose
        reward failed, is not retried.
        """
        if self.errors and isinstance(self.errors[-1], TrajectoryCancelled | RewardError):
            return False
        own = len(self.errors) - self.disturbances
        return self.disturbances < DEATHS_FOR_NOTHING + DEATHS_ALONE and own <= max_retries

    def kept(self, told: dict[str, TrajectoryRecord | None]) -> TrajectoryRecord | None:
        """Return the answers of this trajectory for a checkpoint, or None if it is finished or has no answers.

        Args:
            told: the answers that workers reported for running attempts, by the attempt's key. If there are none for
                this trajectory, `record` is returned.
        """
        if self.payload is not None:
            return None
        return told[self.key] if self.under_way and self.key in told else self.record

    def begin_anew(self) -> None:
        """Drop the result and the errors, so that the trajectory is generated again after its payload was lost."""
        self.scored = self.payload = None
        self.errors.clear()


class GroupRun:
    """A group that is being generated or waits to be trained: its prompt and its trajectories.

    Times are those of `time.monotonic`.

    Attributes:
        group: the group's entry in the sample ledger.
        row: the prompt's row from the data loader.
        fetched: the payloads (packed trajectories), after the trainer has fetched them.
        scores: Ray object references to the trajectories' log-probs under the newest version, if log-prob servers score
            the groups that wait to be trained.
        issued_at, ready_at: the times at which the group's generation began, and at which the group became ready.
        sampled_at: the latest time at which one of the trajectories got its last token, or None.
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
        """Ray object references to the packed trajectories, with None for each trajectory that is not finished."""
        return [each.payload for each in self.trajectories]

    @property
    def keys(self) -> set[str]:
        return {each.key for each in self.trajectories if each.under_way}

    @property
    def is_complete(self) -> bool:
        return all(each.payload is not None for each in self.trajectories)

    @property
    def states(self) -> list[TrajectoryState]:
        """The states of the trajectories. The value is valid only while no trajectory has a running attempt."""
        pending, sampled = TrajectoryState.PENDING, TrajectoryState.SAMPLED
        return [pending if each.payload is None else sampled for each in self.trajectories]

    def begin_anew(self) -> None:
        """Drop the results of all trajectories, so that the group is generated again after payloads were lost."""
        self.scores = []
        for each in self.trajectories:
            each.begin_anew()

    @property
    def complete(self) -> list[TrajectoryScored]:
        return [each.scored for each in self.trajectories if each.payload is not None and each.scored is not None]

    @property
    def cut_tokens(self) -> int:
        """Sum of `TrajectoryScored.cut_tokens` over the finished trajectories."""
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
    """Yield the run record's events for a group that was trained at ``version``, was filtered, or failed.

    ``reason`` says why the group was filtered or failed. docs/run-record.md explains the events.
    """
    now = time.monotonic()
    what = "trained" if group.state is GroupState.TAKEN else group.state.value
    if run.ready_at:
        yield Event(GROUPS, "ready", run.ready_at, now, version=version, group=group.id)
    tokens, start = run.sampled_tokens, run.group.start
    yield Event(GROUPS, what, run.issued_at, now, version=start, group=group.id, tokens=tokens, text=reason)


def attempt_events(run: GroupRun, n: int, began: float, sampled: float | None) -> Iterator[Event]:
    """Yield the run record's events for an attempt at trajectory ``n``. The attempt began at ``began`` and ends now.

    ``sampled`` is the time of the attempt's last token, or None if the attempt failed before all tokens were sampled.
    docs/run-record.md explains the events.
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

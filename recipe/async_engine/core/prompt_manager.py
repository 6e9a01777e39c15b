# SPDX-License-Identifier: Apache-2.0
"""Which trajectory generates next, in a stream or in turns, between which training has the accelerators.

Contract. The prompt manager stands on the sample ledger: the ledger knows the groups, this knows the trajectories of
those that are not complete yet. A trajectory is PENDING, RUNNING or SAMPLED, and

- a trajectory begins only while generation is open, and only in one of `slots` free slots; the ledger's admission
  policy ranks those that wait, and says whether a group begins only when there are slots for all of it;
- an issued group goes before a new prompt, and a new prompt is issued only if the ledger admits it (its staleness gate,
  its bound on live groups), so the number of groups in flight is bounded;
- a trajectory that runs keeps its slot until its last token is sampled: over the end of a turn, in which it waits with
  its tokens, and over a failed attempt, which is followed by the next one.

    PENDING -> RUNNING -> SAMPLED        a failed attempt leads from SAMPLED back to PENDING

A stream is a turn that no batch closes, but it can be drained before a weight sync: nothing begins, what runs goes on.

Plain state: no clock, no threads, no events. Its caller holds the ledger's lock. Tests:
tests/core/test_prompt_manager.py, tests/core/test_policy.py.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from recipe.async_engine.core.errors import LedgerError
from recipe.async_engine.core.groups import Group, GroupState, PromptRef
from recipe.async_engine.core.ledger import SampleLedger
from recipe.async_engine.core.policy import rank_of


class TrajectoryState(StrEnum):
    """The one state of a trajectory whose group is not complete."""

    PENDING = "pending"
    RUNNING = "running"
    SAMPLED = "sampled"


class Why(StrEnum):
    """Why nothing more begins to generate.

    GENERATING: all slots are taken. LAST_...: trajectories generate, and for this reason no other one begins beside
    them. The others: none generates.
    """

    GENERATING = "generating"
    LAST_OF_DRAIN = "generating, drain"
    LAST_OF_TURN = "generating, turn"
    LAST_OF_GATE = "generating, gate"
    LAST_OF_PROMPTS = "generating, prompts"
    LAST_OF_END = "generating, end"
    DRAIN = "drain"
    TURN = "turn"
    GATE = "gate"
    REWARD = "reward"
    PROMPTS = "prompts"
    END = "end"


LAST_OF = {
    Why.DRAIN: Why.LAST_OF_DRAIN,
    Why.TURN: Why.LAST_OF_TURN,
    Why.GATE: Why.LAST_OF_GATE,
    Why.PROMPTS: Why.LAST_OF_PROMPTS,
    Why.END: Why.LAST_OF_END,
}
"""While trajectories generate, for each reason that keeps others from beginning."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The `index`-th answer to a group's prompt."""

    group_id: int
    index: int


@dataclass(frozen=True, slots=True)
class PromptCounts:
    """Number of groups of which nothing runs and something waits for a slot, and of running trajectories.

    Between turns what runs is interrupted: ``interrupted`` are its groups, ``interrupted_trajectories`` are they.
    """

    pending: int
    interrupted: int
    running_trajectories: int
    interrupted_trajectories: int


class PromptManager:
    """See the module's contract.

    ledger: shared with whoever takes batches. group_size: trajectories of a group. slots: trajectories that may run at
    once; it may change. stream: whether generation is one.
    """

    def __init__(self, ledger: SampleLedger, group_size: int, slots: int, stream: bool = False) -> None:
        if group_size < 1 or slots < 1:
            raise LedgerError(f"{group_size} trajectories a group on {slots} slots: both must be at least 1")
        self.ledger = ledger
        self.group_size = group_size
        self.slots = slots
        self.stream = stream
        self.is_open = False
        self._states: dict[int, list[TrajectoryState]] = {}
        self._groups_in: Counter[TrajectoryState] = Counter()
        self._trajectories_in: Counter[TrajectoryState] = Counter()
        # (rank, group id, index) of those that wait; entries whose trajectory no longer does are skipped.
        self._waiting: list[tuple[float, int, int]] = []

    @property
    def running(self) -> int:
        """Trajectories that have a slot."""
        return self._trajectories_in[TrajectoryState.RUNNING]

    @property
    def generating(self) -> int:
        """Trajectories that run and are not interrupted."""
        return self.running if self.is_open or self.stream else 0

    def open_turn(self) -> None:
        """Begin a generation turn, or let a stream go on."""
        if self.is_open:
            raise LedgerError("a generation turn is open already")
        self.is_open = True

    def close_turn(self) -> int:
        """Interrupt everything that runs; returns how many trajectories that are."""
        if not self.is_open:
            raise LedgerError("no generation turn is open")
        self.is_open = False
        return self.running

    def drain(self) -> None:
        """Give no slots until the stream is opened again; what has one goes on."""
        self.is_open = False

    def next(self) -> Trajectory | None:
        """Give a free slot to the next trajectory, which runs from now on; None if none may run or none waits.

        Where groups begin whole, ask until there is none: the group that began has its slots then.
        """
        if not self.is_open or not self.anything_waits():
            return None
        _, group_id, index = self._waiting[0]
        if not self._fits(self._states[group_id].count(TrajectoryState.PENDING)):
            return None
        heapq.heappop(self._waiting)
        trajectory = Trajectory(group_id, index)
        self._set(trajectory, TrajectoryState.RUNNING)
        return trajectory

    def picks(self, issue: Callable[[], bool], portion: int | None = None) -> Iterator[Trajectory]:
        """The trajectories that may generate from now on, those of new prompts once none waits.

        Args:
            issue: issues a group for the next prompt; False if there is none now.
            portion: about so many of them, so that a lock is held for a moment only; None for all. A group is never cut
                in two, which a drain would leave half begun.
        """
        count, last = 0, None
        while portion is None or count < portion or self.first_waiting() == last:
            trajectory = self.next()
            if trajectory is not None:
                count, last = count + 1, trajectory.group_id
                yield trajectory
            elif not (self.wants_prompt() and issue()):
                return

    def why(self, prompts_left: bool, waits_for_rewards: bool) -> Why:
        """Why nothing more begins to generate.

        Args:
            prompts_left: whether there is a next prompt, now or later.
            waits_for_rewards: whether only rewards keep the run from going on while nothing generates.
        """
        if self.generating:
            if self.is_open and (not self.has_room() or self.anything_waits()):
                return Why.GENERATING
            return LAST_OF[self._held_by(prompts_left)]
        return Why.REWARD if waits_for_rewards else self._held_by(prompts_left)

    def _held_by(self, prompts_left: bool) -> Why:
        """What keeps a trajectory that would have its slots from beginning."""
        if not self.is_open:
            return Why.DRAIN if self.stream else Why.TURN
        if self.ledger.all_issued or not prompts_left:
            return Why.END
        return Why.PROMPTS if self.ledger.can_issue() else Why.GATE

    def wants_prompt(self) -> bool:
        """Whether slots are free for a new prompt; ask when `next` gives nothing."""
        return self.is_open and self.has_room() and not self.anything_waits() and self.ledger.can_issue()

    def has_room(self) -> bool:
        """Whether slots are free for a new prompt."""
        return self._fits(self.group_size)

    def issue(self, prompt: PromptRef) -> Group:
        """Issue a group for this prompt; its trajectories wait for slots."""
        if not self.is_open:
            raise LedgerError("a prompt is issued in a generation turn only")
        group = self.ledger.issue(prompt)
        self.adopt(group, [TrajectoryState.PENDING] * self.group_size)
        return group

    def adopt(self, group: Group, states: Sequence[TrajectoryState]) -> None:
        """Take over a running group, new or of a checkpoint; none of its trajectories runs."""
        if group.state is not GroupState.RUNNING or group.id in self._states:
            raise LedgerError(f"group {group.id} is {group.state} or known already: it cannot be adopted")
        if len(states) != self.group_size or TrajectoryState.RUNNING in states:
            raise LedgerError(
                f"group {group.id} has {self.group_size} trajectories, none of which runs: {list(states)}"
            )
        self._states[group.id] = list(states)
        self._groups_in[_group_state(states)] += 1
        self._trajectories_in.update(states)
        for index in range(self.group_size):
            self._wait(Trajectory(group.id, index))

    def state(self, trajectory: Trajectory) -> TrajectoryState:
        """The state of a trajectory of a group that is not complete."""
        if trajectory.group_id not in self._states:
            raise LedgerError(f"group {trajectory.group_id} is complete, ended or was never issued")
        return self._states[trajectory.group_id][trajectory.index]

    def sampled(self, trajectory: Trajectory) -> None:
        """The trajectory's last token is sampled: its slot is free."""
        self._expect(trajectory, TrajectoryState.RUNNING)
        self._set(trajectory, TrajectoryState.SAMPLED)

    def begin_again(self, trajectory: Trajectory) -> bool:
        """The attempt failed and its tokens are lost.

        Returns whether the trajectory has its slot still and begins again at once; otherwise it waits for one.
        """
        self._expect(trajectory, TrajectoryState.RUNNING, TrajectoryState.SAMPLED)
        if self.state(trajectory) is TrajectoryState.RUNNING:
            return True
        self._set(trajectory, TrajectoryState.PENDING)
        return False

    def complete(self, group_id: int, oldest_version: int) -> Group:
        """All trajectories are sampled and rewarded: the group is ready to be trained."""
        unfinished = [state for state in self._states[group_id] if state is not TrajectoryState.SAMPLED]
        if unfinished:
            raise LedgerError(f"group {group_id} is not complete: {[state.value for state in unfinished]}")
        self._leave(group_id)
        return self.ledger.mark_ready(group_id, oldest_version)

    def forget(self, group_id: int) -> None:
        """The group is given up; the slots of its trajectories are free. The caller filters or fails it."""
        self._leave(group_id)

    def counts(self) -> PromptCounts:
        """Number of groups and trajectories by state."""
        interrupted = self.running > self.generating
        return PromptCounts(
            pending=self._groups_in[TrajectoryState.PENDING],
            interrupted=self._groups_in[TrajectoryState.RUNNING] if interrupted else 0,
            running_trajectories=self.generating,
            interrupted_trajectories=self.running - self.generating,
        )

    def anything_waits(self) -> bool:
        """Whether a trajectory waits for a slot."""
        return self.first_waiting() is not None

    def first_waiting(self) -> int | None:
        """The group of the trajectory that gets the next slot; None if none waits."""
        while self._waiting:
            _, group_id, index = self._waiting[0]
            states = self._states.get(group_id)
            if states is not None and states[index] is TrajectoryState.PENDING:
                return group_id
            heapq.heappop(self._waiting)
        return None

    def _fits(self, waiting: int) -> bool:
        """Whether slots are free for a group of which so many trajectories wait."""
        return self.slots - self.running >= (waiting if self.ledger.policy.whole_groups else 1)

    def _expect(self, trajectory: Trajectory, *states: TrajectoryState) -> None:
        state = self.state(trajectory)
        if state not in states:
            raise LedgerError(f"{trajectory} is {state}, expected {' or '.join(states)}")

    def _set(self, trajectory: Trajectory, state: TrajectoryState) -> None:
        states = self._states[trajectory.group_id]
        self._groups_in[_group_state(states)] -= 1
        self._trajectories_in[states[trajectory.index]] -= 1
        states[trajectory.index] = state
        self._groups_in[_group_state(states)] += 1
        self._trajectories_in[state] += 1
        self._wait(trajectory)

    def _leave(self, group_id: int) -> None:
        states = self._states.pop(group_id)
        self._groups_in[_group_state(states)] -= 1
        self._trajectories_in.subtract(states)

    def _wait(self, trajectory: Trajectory) -> None:
        """Queue the trajectory if it waits for a slot, by the rank that the policy gives it now."""
        group = self.ledger.find(trajectory.group_id)
        if group is not None and self.state(trajectory) is TrajectoryState.PENDING:
            policy = self.ledger.policy
            rank = rank_of(policy, group, 0 if policy.whole_groups else trajectory.index)
            heapq.heappush(self._waiting, (rank, group.id, trajectory.index))


def _group_state(states: Sequence[TrajectoryState]) -> TrajectoryState:
    """RUNNING if one of these trajectories runs, else PENDING if one waits for a slot."""
    for state in (TrajectoryState.RUNNING, TrajectoryState.PENDING):
        if state in states:
            return state
    return TrajectoryState.SAMPLED


MEMORY = 4
"""Ended trajectories that count, in multiples of the slots without tools."""


class Slots:
    """How many trajectories may have a generation slot while some of these are at tools.

    A slot's trajectory keeps an engine busy only while it waits for an answer. Where agent loops use tools there are
    more slots than the engines need at once, in the ratio of the time that ended trajectories had in all to their time
    at engines, and never more than ``most``; without tools there are ``least``, exactly. What ended longer ago counts
    for less. Shown by tests/core/test_slots.py.

    count: of slots, now.
    """

    def __init__(self, least: int, most: int) -> None:
        self.count = self._least = least
        self._most = most
        self._at_engines_s = self._at_tools_s = 0.0

    def ended(self, at_engines_s: float, at_tools_s: float) -> int:
        """A trajectory has ended that waited for answers, and was at tools, for so many seconds; returns `count`."""
        kept = 1 - 1 / (MEMORY * self._least)
        self._at_engines_s = kept * self._at_engines_s + at_engines_s
        self._at_tools_s = kept * self._at_tools_s + at_tools_s
        if self._at_engines_s > 0:
            at_tools = self._least * self._at_tools_s / self._at_engines_s
            self.count = int(min(self._most, self._least + at_tools))
        return self.count

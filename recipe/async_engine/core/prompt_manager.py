# SPDX-License-Identifier: Apache-2.0
"""Decides which trajectory generates next, in a continuous stream or in turns that alternate with training.

Contract. The ledger knows the groups; the prompt manager knows the trajectories of groups that are not complete. A
trajectory is PENDING, RUNNING or SAMPLED, and

- a trajectory starts only while generation is open and only in one of `slots` free slots. The ledger's admission policy
  sets the priority of waiting trajectories, and says whether a group starts only when slots are free for all of its
  trajectories;
- an issued group goes before a new prompt. A new prompt is issued only if the ledger admits it (staleness gate and
  bound on live groups), so the number of groups in flight is bounded;
- a running trajectory keeps its slot until its last token is sampled: also after the end of a turn, when it waits with
  its tokens, and after a failed attempt that is followed by another one.

    PENDING -> RUNNING -> SAMPLED        a failed attempt leads from SAMPLED back to PENDING

A stream is a single turn that no batch closes. It can be drained before a weight sync: then no trajectory starts, and
running trajectories finish.

The prompt manager is plain state without clock, threads or events. Its caller holds the ledger's lock. Tests:
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
    """The state of a trajectory whose group is not complete."""

    PENDING = "pending"
    RUNNING = "running"
    SAMPLED = "sampled"


class Why(StrEnum):
    """Why no further trajectory starts to generate.

    GENERATING: all slots are taken. LAST_...: some trajectories generate, and no other one starts for the named reason.
    With all other values no trajectory generates.
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
"""For each reason that keeps trajectories from starting, the reason to report while others still generate."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The ``index``-th answer to a group's prompt."""

    group_id: int
    index: int


@dataclass(frozen=True, slots=True)
class PromptCounts:
    """Numbers of groups and trajectories that wait for a slot, run or are interrupted.

    pending: groups without a running trajectory that wait for a slot. Between turns running trajectories are
    interrupted: ``interrupted`` is the number of their groups, ``interrupted_trajectories`` that of the trajectories.
    sampled: groups whose trajectories are all sampled, but not all rewarded.
    """

    pending: int
    interrupted: int
    running_trajectories: int
    interrupted_trajectories: int
    sampled: int


class PromptManager:
    """Assigns generation slots to trajectories, as the module's contract describes.

    ledger: shared with the trainer. group_size: number of trajectories in a group. slots: number of trajectories that
    may run at once; it may change. stream: whether generation is a stream instead of turns.
    """

    def __init__(self, ledger: SampleLedger, group_size: int, slots: int, stream: bool = False) -> None:
        if group_size < 1 or slots < 1:
            raise LedgerError(f"{group_size} trajectories per group on {slots} slots: both must be at least 1")
        self.ledger = ledger
        self.group_size = group_size
        self.slots = slots
        self.stream = stream
        self.is_open = False
        self._states: dict[int, list[TrajectoryState]] = {}
        self._groups_in: Counter[TrajectoryState] = Counter()
        self._trajectories_in: Counter[TrajectoryState] = Counter()
        # Heap of (priority, group id, index) of waiting trajectories; entries that no longer wait are skipped.
        self._waiting: list[tuple[float, int, int]] = []

    @property
    def running(self) -> int:
        """Return the number of trajectories that have a slot."""
        return self._trajectories_in[TrajectoryState.RUNNING]

    @property
    def pending(self) -> int:
        """How many trajectories of issued groups wait for a slot."""
        return self._trajectories_in[TrajectoryState.PENDING]

    @property
    def generating(self) -> int:
        """Return the number of trajectories that run and are not interrupted."""
        return self.running if self.is_open or self.stream else 0

    def open_turn(self) -> None:
        """Start a generation turn, or let a stream continue."""
        if self.is_open:
            raise LedgerError("a generation turn is open already")
        self.is_open = True

    def close_turn(self) -> int:
        """End the turn, which interrupts all running trajectories; return their number."""
        if not self.is_open:
            raise LedgerError("no generation turn is open")
        self.is_open = False
        return self.running

    def drain(self) -> None:
        """Assign no more slots until the stream is opened again; running trajectories continue."""
        self.is_open = False

    def next(self) -> Trajectory | None:
        """Assign a free slot to the next trajectory and return it, or None if no slot fits or no trajectory waits.

        If groups start whole, call this until it returns None, so that all trajectories of a started group get slots.
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
        """Yield the trajectories that may start now; when none waits, issue new prompts and yield theirs.

        Args:
            issue: issues a group for the next prompt; returns False if there is no prompt now.
            portion: number of trajectories after which to stop, so that the caller's lock is held only briefly; None
                for no limit. All trajectories of a group are yielded even beyond it, since a drain would otherwise
                leave the group half started.
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
        """Return why no further trajectory starts to generate.

        Args:
            prompts_left: whether there is a next prompt, now or later.
            waits_for_rewards: whether no trajectory generates and the run waits only for rewards.
        """
        if self.generating:
            if self.is_open and (not self.has_room() or self.anything_waits()):
                return Why.GENERATING
            return LAST_OF[self._held_by(prompts_left)]
        return Why.REWARD if waits_for_rewards else self._held_by(prompts_left)

    def _held_by(self, prompts_left: bool) -> Why:
        """Return why no new trajectory may start although slots are free."""
        if not self.is_open:
            return Why.DRAIN if self.stream else Why.TURN
        if self.ledger.all_issued or not prompts_left:
            return Why.END
        return Why.PROMPTS if self.ledger.can_issue() else Why.GATE

    def wants_prompt(self) -> bool:
        """Return whether a new prompt may be issued for free slots. Call this when `next` returns None."""
        return self.is_open and self.has_room() and not self.anything_waits() and self.ledger.can_issue()

    def has_room(self) -> bool:
        """Return whether enough slots are free for a new prompt."""
        return self._fits(self.group_size)

    def issue(self, prompt: PromptRef) -> Group:
        """Issue a group for this prompt and queue its trajectories for slots."""
        if not self.is_open:
            raise LedgerError("a prompt may be issued only in a generation turn")
        group = self.ledger.issue(prompt)
        self.adopt(group, [TrajectoryState.PENDING] * self.group_size)
        return group

    def adopt(self, group: Group, states: Sequence[TrajectoryState]) -> None:
        """Take over a running group that is new or from a checkpoint. None of its trajectories may be running."""
        if group.state is not GroupState.RUNNING or group.id in self._states:
            raise LedgerError(f"group {group.id} is {group.state} or known already: it cannot be adopted")
        if len(states) != self.group_size or TrajectoryState.RUNNING in states:
            raise LedgerError(
                f"group {group.id} needs {self.group_size} states other than RUNNING, but got {list(states)}"
            )
        self._states[group.id] = list(states)
        self._groups_in[_group_state(states)] += 1
        self._trajectories_in.update(states)
        for index in range(self.group_size):
            self._wait(Trajectory(group.id, index))

    def state(self, trajectory: Trajectory) -> TrajectoryState:
        """Return the state of a trajectory whose group is not complete."""
        if trajectory.group_id not in self._states:
            raise LedgerError(f"group {trajectory.group_id} is complete, ended or was never issued")
        return self._states[trajectory.group_id][trajectory.index]

    def sampled(self, trajectory: Trajectory) -> None:
        """Free the slot of a trajectory, because its last token is sampled."""
        self._expect(trajectory, TrajectoryState.RUNNING)
        self._set(trajectory, TrajectoryState.SAMPLED)

    def begin_again(self, trajectory: Trajectory) -> bool:
        """Record that an attempt failed and its tokens are lost.

        Return True if the trajectory still has its slot and starts again at once, False if it waits for a slot.
        """
        self._expect(trajectory, TrajectoryState.RUNNING, TrajectoryState.SAMPLED)
        if self.state(trajectory) is TrajectoryState.RUNNING:
            return True
        self._set(trajectory, TrajectoryState.PENDING)
        return False

    def complete(self, group_id: int, oldest_version: int) -> Group:
        """Mark a group as ready for training, because all of its trajectories are sampled and rewarded."""
        unfinished = [state for state in self._states[group_id] if state is not TrajectoryState.SAMPLED]
        if unfinished:
            raise LedgerError(f"group {group_id} is not complete: {[state.value for state in unfinished]}")
        self._leave(group_id)
        return self.ledger.mark_ready(group_id, oldest_version)

    def forget(self, group_id: int) -> None:
        """Drop a group and free its slots. The caller filters the group or marks it as failed in the ledger."""
        self._leave(group_id)

    def counts(self) -> PromptCounts:
        """Return the number of groups and trajectories by state."""
        interrupted = self.running > self.generating
        return PromptCounts(
            pending=self._groups_in[TrajectoryState.PENDING],
            interrupted=self._groups_in[TrajectoryState.RUNNING] if interrupted else 0,
            running_trajectories=self.generating,
            interrupted_trajectories=self.running - self.generating,
            sampled=self._groups_in[TrajectoryState.SAMPLED],
        )

    def anything_waits(self) -> bool:
        """Return whether any trajectory waits for a slot."""
        return self.first_waiting() is not None

    def first_waiting(self) -> int | None:
        """Return the id of the group whose trajectory gets the next slot, or None if no trajectory waits."""
        while self._waiting:
            _, group_id, index = self._waiting[0]
            states = self._states.get(group_id)
            if states is not None and states[index] is TrajectoryState.PENDING:
                return group_id
            heapq.heappop(self._waiting)
        return None

    def _fits(self, waiting: int) -> bool:
        """Return whether enough slots are free for a group with ``waiting`` pending trajectories."""
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
        """Queue the trajectory if it is pending, with the priority that the admission policy gives it now."""
        group = self.ledger.find(trajectory.group_id)
        if group is not None and self.state(trajectory) is TrajectoryState.PENDING:
            policy = self.ledger.policy
            rank = rank_of(policy, group, 0 if policy.whole_groups else trajectory.index)
            heapq.heappush(self._waiting, (rank, group.id, trajectory.index))


def _group_state(states: Sequence[TrajectoryState]) -> TrajectoryState:
    """Return RUNNING if one of a group's trajectories runs, else PENDING if one waits for a slot, else SAMPLED."""
    for state in (TrajectoryState.RUNNING, TrajectoryState.PENDING):
        if state in states:
            return state
    return TrajectoryState.SAMPLED


MEMORY = 4
"""Number of recently ended trajectories that determine the slot count, as a multiple of the slots without tools."""


class Slots:
    """Computes how many trajectories may have a generation slot while some of them wait for tools.

    A trajectory uses an engine only while it waits for an answer. If agent loops use tools, the number of slots grows
    in proportion to the time that ended trajectories spent at tools, relative to their time at engines, up to ``most``.
    Without tools there are ``least`` slots. Older trajectories have less weight. Test: tests/core/test_slots.py.

    share: factor of all numbers, such as 2 while twice as many replicas are awake.
    """

    def __init__(self, least: int, most: int) -> None:
        self._count = self._least = least
        self._most = most
        self.share = 1.0
        self._at_engines_s = self._at_tools_s = 0.0

    def ended(self, at_engines_s: float, at_tools_s: float) -> int:
        """Record how many seconds an ended trajectory waited for engines and for tools; return the new `count`."""
        kept = 1 - 1 / (MEMORY * self._least)
        self._at_engines_s = kept * self._at_engines_s + at_engines_s
        self._at_tools_s = kept * self._at_tools_s + at_tools_s
        if self._at_engines_s > 0:
            at_tools = self._least * self._at_tools_s / self._at_engines_s
            self._count = int(min(self._most, self._least + at_tools))
        return self.count

    @property
    def count(self) -> int:
        """Present number of slots."""
        return int(self._count * self.share)

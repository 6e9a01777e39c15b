# SPDX-License-Identifier: Apache-2.0
"""Decides which trajectory generates next.

Contract. The ledger has the state of each prompt group; the prompt manager has that of each trajectory whose group is
not complete: PENDING (waiting for a slot), RUNNING or SAMPLED (all tokens generated).

- A trajectory starts only while generation is open, and takes one of `slots` generation slots. The admission policy
  sets the priorities of waiting trajectories, and whether a group starts only when all of its trajectories get slots.
- A new prompt is issued only if no trajectory waits and the ledger admits one more group.
- A running trajectory keeps its slot until its last token is sampled, even during a retry, and even if the number of
  slots becomes 0 meanwhile. If an attempt fails after that, for example in its reward, the trajectory is PENDING again.

The number of slots may change at any time; while it is 0, all running trajectories are interrupted. Generation can also
be drained before a weight sync: then no trajectory starts, and running trajectories finish. The prompt manager has no
clock and no threads; its caller holds the ledger's lock. Tests: tests/core/test_prompt_manager.py,
tests/core/test_policy.py.
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
    """Why no further trajectory starts to generate, for the run's time account.

    GENERATING: trajectories use all slots. LAST_OF_...: some trajectories generate, but slots are free, and the named
    reason keeps further trajectories from starting. All other values: no trajectory generates, for the named reason.

    The reasons are DRAIN: no slots are assigned (see `PromptManager.drain`). TURN: the number of slots is 0, because
    trainer and engines use the same accelerators in turns. GATE: the ledger admits no further group. PROMPTS: the next
    prompt has not been read yet. END: the run needs no further prompt, or the data has none. REWARD: the run waits only
    for rewards.
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
"""For each reason that keeps trajectories from starting, the value to report while other trajectories generate."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The ``index``-th answer to a group's prompt."""

    group_id: int
    index: int


@dataclass(frozen=True, slots=True)
class PromptCounts:
    """Numbers of incomplete groups and of their trajectories.
    pending: groups without a running trajectory in which at least one trajectory waits for a slot. interrupted: if the
    number of slots is 0, groups with running trajectories, else 0. sampled: groups whose trajectories are all sampled,
    but not all rewarded. running_trajectories, interrupted_trajectories: trajectories, where a trajectory with a slot
    counts as interrupted if the number of slots is 0, else as running.
    """

    pending: int
    interrupted: int
    running_trajectories: int
    interrupted_trajectories: int
    sampled: int


class PromptManager:
    """Assigns generation slots to trajectories.

    group_size: usual number of trajectories in a group; `issue` may be given another one. slots: number of trajectories
    that may run at once; it may change, even to 0.
    """

    def __init__(self, ledger: SampleLedger, group_size: int, slots: int) -> None:
        if group_size < 1 or slots < 1:
            raise LedgerError(f"{group_size} trajectories per group on {slots} slots: both must be at least 1")
        self.ledger = ledger
        self.group_size = group_size
        self.slots = slots
        self.is_open = False
        self._states: dict[int, list[TrajectoryState]] = {}
        self._groups_in: Counter[TrajectoryState] = Counter()
        self._trajectories_in: Counter[TrajectoryState] = Counter()
        # A heap of (priority, group id, index). Entries of trajectories that no longer wait are skipped on reading.
        self._waiting: list[tuple[float, int, int]] = []

    @property
    def running(self) -> int:
        return self._trajectories_in[TrajectoryState.RUNNING]

    @property
    def pending(self) -> int:
        """Return the number of trajectories of issued groups that wait for a slot."""
        return self._trajectories_in[TrajectoryState.PENDING]

    @property
    def generating(self) -> int:
        """Return the number of trajectories that run and are not interrupted."""
        return self.running if self.slots else 0

    def open(self) -> None:
        """Allow trajectories to get slots from now on."""
        self.is_open = True

    def drain(self) -> None:
        """Allow no further trajectory to get a slot until `open` is called; running trajectories continue."""
        self.is_open = False

    def next(self) -> Trajectory | None:
        """Assign a slot to the waiting trajectory with the highest priority and return it; None if none may start.

        Call this until it returns None, so that all trajectories of a group start if the policy wants whole groups.
        """
        if not self.is_open or not self.anything_waits():
            return None
        _, group_id, index = self._waiting[0]
        states = self._states[group_id]
        # A group that has begun needs only one free slot, even if groups start whole: a group with more trajectories
        # than there are slots can never run as a whole.
        begun = TrajectoryState.RUNNING in states
        if not self._fits(1 if begun else states.count(TrajectoryState.PENDING)):
            return None
        heapq.heappop(self._waiting)
        trajectory = Trajectory(group_id, index)
        self._set(trajectory, TrajectoryState.RUNNING)
        return trajectory

    def picks(self, issue: Callable[[], bool], portion: int | None = None) -> Iterator[Trajectory]:
        """Yield all trajectories that may start now; when no trajectory waits, issue further prompts.

        Args:
            issue: issues a group for the next prompt; returns False if there is no prompt now.
            portion: number of trajectories after which to stop, so that the caller's lock is held only briefly, or
                None for no limit. The group of the last trajectory is completed nevertheless, if slots are free.
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
            prompts_left: whether the data has a further prompt.
            waits_for_rewards: whether the run waits only for rewards; used if no trajectory generates.
        """
        if self.generating:
            if self.is_open and (not self.has_room() or self.anything_waits()):
                return Why.GENERATING
            return LAST_OF[self._held_by(prompts_left)]
        return Why.REWARD if waits_for_rewards else self._held_by(prompts_left)

    def _held_by(self, prompts_left: bool) -> Why:
        """Return what, apart from a lack of free slots, keeps new trajectories from starting."""
        if not self.slots:
            return Why.TURN
        if not self.is_open:
            return Why.DRAIN
        if self.ledger.all_issued or not prompts_left:
            return Why.END
        return Why.PROMPTS if self.ledger.can_issue() else Why.GATE

    def wants_prompt(self) -> bool:
        """Return whether a further prompt should be issued now, because slots are free and no trajectory waits."""
        return self.is_open and self.has_room() and not self.anything_waits() and self.ledger.can_issue()

    def has_room(self) -> bool:
        """Return whether enough slots are free for a new group to start.

        It needs one slot, or, if groups start whole, as many slots as it has trajectories (but at most all slots).
        """
        return self._fits(self.group_size)

    def issue(self, prompt: PromptRef, size: int | None = None) -> Group:
        """Issue a group of ``size`` trajectories, by default `group_size`, and queue them for slots."""
        if not self.is_open:
            raise LedgerError("no prompt may be issued before generation begins, or during a drain")
        group = self.ledger.issue(prompt)
        self.adopt(group, [TrajectoryState.PENDING] * (size or self.group_size))
        return group

    def adopt(self, group: Group, states: Sequence[TrajectoryState]) -> None:
        """Add a group that is new or from a checkpoint. ``states`` are its trajectories' states, never RUNNING."""
        if group.state is not GroupState.RUNNING or group.id in self._states:
            raise LedgerError(f"group {group.id} cannot be adopted: it is {group.state}, or was adopted before")
        if not states or TrajectoryState.RUNNING in states:
            raise LedgerError(
                f"the trajectories of group {group.id} need a state each, none of them RUNNING, but the states are "
                f"{list(states)}"
            )
        self._states[group.id] = list(states)
        self._groups_in[_group_state(states)] += 1
        self._trajectories_in.update(states)
        for index in range(len(states)):
            self._wait(Trajectory(group.id, index))

    def state(self, trajectory: Trajectory) -> TrajectoryState:
        if trajectory.group_id not in self._states:
            raise LedgerError(f"group {trajectory.group_id} is complete, ended or was never issued")
        return self._states[trajectory.group_id][trajectory.index]

    def sampled(self, trajectory: Trajectory) -> None:
        """Free the slot of a trajectory, because its last token is sampled."""
        self._expect(trajectory, TrajectoryState.RUNNING)
        self._set(trajectory, TrajectoryState.SAMPLED)

    def is_sampled(self, group_id: int) -> bool:
        """Return whether all trajectories of an incomplete group are sampled."""
        return _group_state(self._states[group_id]) is TrajectoryState.SAMPLED

    def begin_again(self, trajectory: Trajectory) -> bool:
        """Record that an attempt at a trajectory failed, so that the trajectory must be generated from scratch.

        Return True if the trajectory still has its slot and may start at once, False if it now waits for a slot.
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
            found = [state.value for state in unfinished]
            raise LedgerError(f"group {group_id} is not complete: some of its trajectories are {found}")
        self._leave(group_id)
        return self.ledger.mark_ready(group_id, oldest_version)

    def forget(self, group_id: int) -> None:
        """Remove a group and free its slots. The caller marks the group as filtered or failed in the ledger."""
        self._leave(group_id)

    def counts(self) -> PromptCounts:
        interrupted = self.running > self.generating
        return PromptCounts(
            pending=self._groups_in[TrajectoryState.PENDING],
            interrupted=self._groups_in[TrajectoryState.RUNNING] if interrupted else 0,
            running_trajectories=self.generating,
            interrupted_trajectories=self.running - self.generating,
            sampled=self._groups_in[TrajectoryState.SAMPLED],
        )

    def anything_waits(self) -> bool:
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
        """Return whether enough slots are free to start a group of which ``waiting`` trajectories are pending.

        One free slot is enough, unless the admission policy starts groups whole. A group with more pending trajectories
        than there are slots may start when all slots are free.
        """
        wanted = max(1, min(waiting, self.slots)) if self.ledger.policy.whole_groups else 1
        return self.slots - self.running >= wanted

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
"""The times from which `Slots` computes the number of slots are averages over the trajectories that ended last, about
``MEMORY * least`` of them. ``least`` is the argument of `Slots`.
"""


class Slots:
    """Computes how many generation slots there should be, so that engines stay busy while some trajectories use tools.

    A trajectory that waits for a tool keeps its slot, but does not use an engine. The number of slots is therefore
    ``least`` times (1 + time at tools / time at engines), but at most ``most``. The times are those of recently ended
    trajectories. Test: tests/core/test_slots.py.

    share: factor by which the number is multiplied, such as 2 while twice as many replicas as usual are awake.
    """

    def __init__(self, least: int, most: int) -> None:
        self._count = self._least = least
        self._most = most
        self.share = 1.0
        self._at_engines_s = self._at_tools_s = 0.0

    def ended(self, at_engines_s: float, at_tools_s: float) -> int:
        """Record how many seconds an ended trajectory waited for engines and for tools; return the number of slots."""
        kept = 1 - 1 / (MEMORY * self._least)
        self._at_engines_s = kept * self._at_engines_s + at_engines_s
        self._at_tools_s = kept * self._at_tools_s + at_tools_s
        if self._at_engines_s > 0:
            at_tools = self._least * self._at_tools_s / self._at_engines_s
            self._count = int(min(self._most, self._least + at_tools))
        return self.count

    @property
    def count(self) -> int:
        """Return the number of slots that there should be now."""
        return int(self._count * self.share)

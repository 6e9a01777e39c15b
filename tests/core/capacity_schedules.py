# SPDX-License-Identifier: Apache-2.0
"""Random schedules in which the number of generation slots changes at any moment, judged like `schedule_simulator`.

A `PromptManager` assigns slots to the trajectories of each group. Besides the events of `Schedule`, the number of slots
changes (also to 0, as when trainer and engines share accelerators), drains begin and end, a trajectory's last token is
sampled, attempts fail before and after that, and groups are given up with whatever their trajectories do. Further
kinds of `Violation`:

- `capacity`: a trajectory starts although no slot is free, or generation is drained
- `order`: a trajectory of a younger group starts while one of an older group waits
- `twice`: a trajectory starts that runs or is sampled already
"""

from __future__ import annotations

from typing import Any

from schedule_simulator import Schedule, Tally, Violation

from recipe.async_engine.core.groups import GroupState
from recipe.async_engine.core.prompt_manager import PromptManager, Trajectory, TrajectoryState

WAITS, RUNS, SAMPLED = "waits", "runs", "sampled"
# A checkpoint has no slots, so what ran waits for one, to go on from its tokens.
IN_A_CHECKPOINT = {
    WAITS: TrajectoryState.PENDING,
    RUNS: TrajectoryState.PENDING,
    SAMPLED: TrajectoryState.SAMPLED,
}


class CapacitySchedule(Schedule):
    """One random schedule; the model of its trajectories is ``states``, from (group id, index) to a state."""

    def __init__(self, seed: int, manager_type: type[PromptManager] = PromptManager) -> None:
        super().__init__(seed)
        self.manager_type = manager_type
        self.size = self.rng.randint(1, 3)
        self.most = self.rng.randint(self.size, 3 * self.size * self.b)
        self.change_weight, self.fail_weight = self.rng.choice((0.05, 0.5, 3.0)), self.rng.choice((0.0, 0.1, 0.5))
        self.drain_weight = self.rng.choice((0.0, 0.1))
        self.give_up_weight = self.rng.choice((0.0, 0.02))
        self.states: dict[tuple[int, int], str] = {}
        self.straggling: set[tuple[int, int]] = set()
        self.changes = self.failed_attempts = 0
        self.is_open = True
        self.manager = self.new_manager()

    def new_manager(self) -> PromptManager:
        manager = self.manager_type(self.ledger, self.size, self.most)
        manager.open()
        return manager

    def of(self, *states: str) -> list[tuple[int, int]]:
        return [key for key, state in self.states.items() if state in states]

    def sampled_groups(self) -> list[int]:
        return [group for group in self.running if all(self.states[group, n] == SAMPLED for n in range(self.size))]

    def step(self) -> bool:
        plan = self.plan
        ordinary = [key for key in self.of(RUNS) if key not in self.straggling]
        trainer = self.trainer_event()
        events: list[tuple[float, Any]] = [
            (plan.issue_weight, self.begin),
            (plan.end_weight, lambda: self.sample(self.rng.choice(ordinary))) if ordinary else (0, None),
            (plan.end_weight, lambda: self.end_group(self.rng.choice(self.sampled_groups())))
            if self.sampled_groups()
            else (0, None),
            (plan.train_weight, trainer) if trainer else (0, None),
            (plan.announce_weight, self.announce) if self.announced < self.version else (0, None),
        ]
        disturbances = [
            (self.change_weight, self.change_capacity),
            (self.fail_weight if self.of(RUNS, SAMPLED) else 0, self.fail_attempt),
            (self.drain_weight, self.drain_or_open),
            (self.give_up_weight if self.running else 0, self.give_up),
        ]
        if plan.resume_share and self.rng.random() < plan.resume_share:
            self.resume()
            return True
        before = self.progress()
        weighed = [event for event in events if event[1] and event[0]]
        if weighed and self.rng.random() < 0.98:
            weighed += [event for event in disturbances if event[0]]
            self.rng.choices([event for _, event in weighed], [weight for weight, _ in weighed])[0]()
        if self.progress() != before or self.rng.random() < 0.5:
            return True
        return self.anything_else()

    def anything_else(self) -> bool:
        """With all slots and no drain, do whatever can still happen; return whether anything did."""
        self.manager.slots = self.most
        self.manager.open()
        self.is_open = True
        before = self.progress()
        self.begin()
        if groups := self.sampled_groups():
            self.end_group(groups[0])
        elif keys := self.of(RUNS):
            self.sample(keys[0])
        elif (trainer := self.trainer_event()) is not None:
            trainer()
        elif self.announced < self.version:
            self.announce()
        return self.progress() != before

    def progress(self) -> tuple[Any, ...]:
        states = (len(self.of(WAITS)), len(self.of(RUNS)), len(self.of(SAMPLED)))
        return self.issued, self.taken, self.version, self.announced, self.tally.trained, self.tally.restarted, states

    def change_capacity(self) -> None:
        self.manager.slots = self.rng.choice((0, self.rng.randint(0, self.most), self.most))
        self.changes += 1

    def drain_or_open(self) -> None:
        (self.manager.drain if self.is_open else self.manager.open)()
        self.is_open = not self.is_open

    def begin(self) -> None:
        """Start what may start, and compare each start with the model."""
        portion = self.rng.choice((None, 1, 2))
        seen, own = (self.manager.running, self.manager.pending), (len(self.of(RUNS)), len(self.of(WAITS)))
        if seen != own:
            raise Violation("identity", f"{seen} run and wait, expected {own}")
        for trajectory in self.manager.picks(self.issue_next, portion):
            key = (trajectory.group_id, trajectory.index)
            if not self.is_open or len(self.of(RUNS)) >= self.manager.slots:
                raise Violation("capacity", f"{trajectory} starts with {len(self.of(RUNS))} of {self.manager.slots}")
            if self.states[key] != WAITS:
                raise Violation("twice", f"{trajectory} {self.states[key]}")
            oldest = min((self.starts[group], group) for group, _ in self.of(WAITS))
            if (self.starts[trajectory.group_id], trajectory.group_id) != oldest:
                raise Violation("order", f"{trajectory} starts, and group {oldest[1]} of version {oldest[0]} waits")
            self.states[key] = RUNS
            if self.rng.random() < self.plan.straggler_share:
                self.straggling.add(key)

    def issue_next(self) -> bool:
        if self.issued >= self.plan.prompts:
            return False
        group_id = self.issue_by(self.manager.issue)
        self.running.append(group_id)
        self.states |= {(group_id, n): WAITS for n in range(self.size)}
        return True

    def sample(self, key: tuple[int, int]) -> None:
        self.manager.sampled(Trajectory(*key))
        self.states[key] = SAMPLED
        self.straggling.discard(key)

    def fail_attempt(self) -> None:
        """An attempt fails, or a worker dies with some of them; each begins again, in its slot if it has one."""
        keys = self.of(RUNS, SAMPLED)
        for key in self.rng.sample(keys, self.rng.randint(1, min(3, len(keys)))):
            keeps = self.manager.begin_again(Trajectory(*key))
            if keeps != (self.states[key] == RUNS):
                raise Violation("capacity", f"{key} {self.states[key]} begins again, with a slot: {keeps}")
            self.states[key] = RUNS if keeps else WAITS
            self.failed_attempts += 1

    def end_group(self, group_id: int) -> None:
        """End a group of which everything is sampled, as `Schedule.end` does, and let the manager know of it."""
        self.running.remove(group_id)
        restarted = self.tally.restarted
        if self.rng.random() < 0.5:
            # Ready groups are reported by the manager, which refuses those of which something still runs.
            self.manager.complete(group_id, self.starts[group_id])
            self.ready.add(group_id)
        else:
            self.manager.forget(group_id)
            self.end(group_id)
        for n in range(self.size):
            del self.states[group_id, n]
        if self.tally.restarted > restarted:
            group = self.ledger.find(group_id)
            assert group is not None
            self.manager.adopt(group, [TrajectoryState.PENDING] * self.size)
            self.states |= {(group_id, n): WAITS for n in range(self.size)}

    def give_up(self) -> None:
        """A group fails for good, whatever its trajectories are doing."""
        group_id = self.running.pop(self.rng.randrange(len(self.running)))
        self.manager.forget(group_id)
        self.ledger.fail(group_id, "reward_error")
        self.tally.failed += 1
        for n in range(self.size):
            del self.states[group_id, n]
            self.straggling.discard((group_id, n))

    def resume(self) -> None:
        super().resume()
        self.manager, self.is_open = self.new_manager(), True
        self.straggling.clear()
        for group in self.ledger.in_state(GroupState.RUNNING):
            self.manager.adopt(group, [IN_A_CHECKPOINT[self.states[group.id, n]] for n in range(self.size)])
        self.states = {key: SAMPLED if state == SAMPLED else WAITS for key, state in self.states.items()}


def run_capacity_schedules(seeds: range, manager_type: type[PromptManager] = PromptManager) -> dict[str, int]:
    """Run the schedules of these seeds; raise at the first that breaks a promise. Return how often what happened."""
    total, changes, failed = Tally(), 0, 0
    for seed in seeds:
        schedule = CapacitySchedule(seed, manager_type)
        total.merge(schedule.run())
        changes, failed = changes + schedule.changes, failed + schedule.failed_attempts
    return {
        "changes": changes,
        "failed attempts": failed,
        "trained": total.trained,
        "resumed": total.resumed,
        "restarted": total.restarted,
        "at the bound": total.at_bound,
        "late": total.late,
    }

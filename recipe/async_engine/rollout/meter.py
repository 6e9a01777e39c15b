# SPDX-License-Identifier: Apache-2.0
"""What the rollout side does at this moment, and did since the run began.

The scheduler tells it under its lock. Shown by tests/integration/test_scheduler.py and test_turn_scheduler.py.
"""

from collections import Counter
from collections.abc import Sequence

from recipe.async_engine.core.groups import NON_FINITE_REASON, UNIFORM_REASON, LedgerCounts
from recipe.async_engine.core.prompt_manager import PromptCounts
from recipe.async_engine.record.timeline import Timeline
from recipe.async_engine.rollout.trajectory_events import TrajectoryScored

# Fields of a scored trajectory that are summed.
SUMMED = ("reprefilled_tokens", "recovered_tokens", "restored_tokens")


class RolloutMeter:
    """See the module.

    Args:
        timeline: the run's; in turns its rollout side has capacity in turns only.
        places: trajectories that generate at once.
        turns: whether generation happens in turns.

    Attributes:
        complete: sums over the trajectories of complete groups.
    """

    def __init__(self, timeline: Timeline, places: int, turns: bool) -> None:
        self._time = timeline.rollout
        self._version_began: tuple[float, float, float, int] = (0.0, 0.0, 0.0, 0)
        self._of_version: dict[str, float] = {}
        self._groups = 0
        self._places = places
        self._turns = turns
        self._interruptions = 0
        self._turn_began = (0.0, 0.0)
        self._turn_occupancy = 0.0
        self.complete: Counter[str] = Counter()
        if turns:
            self._time.set(capacity=0)

    def completed(self, trajectories: Sequence[TrajectoryScored]) -> None:
        """A group is complete."""
        self._groups += 1
        self.complete["interrupted_trajectories"] += sum(scored.interruptions > 0 for scored in trajectories)
        for name in SUMMED:
            self.complete[name] += sum(getattr(scored, name) for scored in trajectories)

    def end_version(self) -> None:
        """A version is announced: account for the time since the one before, as stock's rollouter does."""
        self._time.advance()
        now = self._time.seconds, self._time.offered, self._time.idle, self._groups
        seconds, offered, idle, groups = (
            after - before for after, before in zip(now, self._version_began, strict=True)
        )
        self._version_began = now
        share = idle / offered if offered > 0 else 0.0
        self._of_version = {
            "fully_async/rollouter/version_time": seconds,
            "fully_async/rollouter/active_time": seconds * (1.0 - share),
            "fully_async/rollouter/idle_ratio": share,
            "fully_async/rollouter/step_generated_samples": groups,
        }

    def begin_turn(self) -> None:
        """A generation turn begins."""
        self._time.set(capacity=self._places)
        self._turn_began = self._time.offered, self._time.used

    def end_turn(self, interrupted: int) -> None:
        """It is over, and interrupted so many trajectories."""
        self._interruptions += interrupted
        self._time.set(capacity=0)
        offered, used = self._turn_began
        offered, used = self._time.offered - offered, self._time.used - used
        self._turn_occupancy = used / offered if offered else 0.0

    def metrics(self, groups: LedgerCounts, prompts: PromptCounts) -> dict[str, float]:
        """In the keys of docs/run-record.md; those of docs/partial-rollout.md beside them in turns."""
        turns = {
            "partial_rollout/groups_pending": prompts.pending,
            "partial_rollout/groups_interrupted": prompts.interrupted,
            "partial_rollout/groups_complete": groups.ready + groups.taken,
            "partial_rollout/trajectories_interrupted": prompts.interrupted_trajectories,
            "partial_rollout/interruptions": self._interruptions,
            "partial_rollout/turn_occupancy": self._turn_occupancy,
        }
        return {
            "fully_async/rollouter/generating_trajectories": prompts.running_trajectories,
            "fully_async/rollouter/groups_running": groups.running,
            "fully_async/rollouter/groups_ready": groups.ready,
            "fully_async/rollouter/idle_share": self._time.idle_share,
            "fully_async/rollouter/occupancy": self._time.occupancy,
            "fully_async/rewards/scoring": self._time.scoring,
            "fully_async/rewards/seconds": self._time.scored,
            "fully_async/rewards/hidden_share": self._time.hidden_share,
            **{f"fully_async/partial/{name}": self.complete[name] for name in ("interrupted_trajectories", *SUMMED)},
            "fully_async/ledger/filtered_uniform": groups.filtered_by_reason.get(UNIFORM_REASON, 0),
            "fully_async/ledger/non_finite": groups.filtered_by_reason.get(NON_FINITE_REASON, 0)
            + groups.failed_by_reason.get(NON_FINITE_REASON, 0),
            "fully_async/count/total_generated_samples": self._groups,
            "fully_async/count/staleness_samples": groups.live,
            "fully_async/count/dropped_stale_samples": 0,
            **self._of_version,
            **(turns if self._turns else {}),
        }

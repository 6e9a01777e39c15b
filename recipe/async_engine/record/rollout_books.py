# SPDX-License-Identifier: Apache-2.0
"""Accounts for the rollout side of a run: its capacity over time, and its answers and their tokens.

Contract. Time is accounted by the number of trajectories that generate, against the number that could. Reward seconds
are counted once for each trajectory that is being scored. They are exposed while nothing generates and the trainer
waits for a batch, because then only rewards hold the run up. All others are hidden. Engines count the tokens that they
sample, workers those that they are answered with, and this module those of complete answers and how their groups end.
`TokenBooks.not_known` is 0 only if the three agree. If a worker or an engine died, its count is lost, and the count of
the next stage is used instead.

Shown by tests/core/test_timeline.py, tests/integration/test_token_books.py and, for real runs, tests/accounts.py. The
books hold plain state without threads. The scheduler updates them under its lock.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from recipe.async_engine.core.groups import NON_FINITE_REASON, UNIFORM_REASON, LedgerCounts
from recipe.async_engine.core.prompt_manager import PromptCounts
from recipe.async_engine.record.events import Class, Clock, Lane, TokenBooks

SUMMED = ("reprefilled_tokens", "recovered_tokens", "restored_tokens")
"""Fields of `TrajectoryScored` that are summed over complete groups."""


class RolloutBooks:
    """The books of the module's contract.

    Args:
        clock: the clock of the levels, which may be stopped.
        capacity: trajectories that generate at once, on all live replicas together.
        lane_clock: the clock of the lane.

    Attributes:
        lane: why no more trajectories begin to generate.
        seconds: the time accounted for.
        offered: its capacity-seconds.
        used: the capacity-seconds that generated. Trajectories above the capacity do not count.
        idle: the capacity-seconds in which nothing generated at all.
        scored, exposed: reward seconds, and the exposed ones among them.
        tokens: tokens of complete answers: received in this start, restored from a checkpoint, trained, filtered,
            failed and cut.
    """

    def __init__(self, clock: Clock, capacity: int, lane_clock: Clock | None = None) -> None:
        self._clock, self._places = clock, capacity
        self.lane = Lane(lane_clock or clock, Class.START_UP)
        # The levels are the trajectories that generate, the capacity, the trajectories being scored, and whether the
        # trainer waits.
        self._levels = {"running": 0, "capacity": capacity, "scoring": 0, "waiting": 0}
        self._since = clock()
        self.tokens: Counter[str] = Counter()
        self._complete: Counter[str] = Counter()
        self._groups = self._interruptions = 0
        self._version_began = (0.0, 0.0, 0.0, 0)
        self._of_version: dict[str, float] = {}
        self._turn_began = (0.0, 0.0)
        self._turn_occupancy: float | None = None
        self.seconds = self.offered = self.used = self.idle = self.scored = self.exposed = 0.0

    # Time.

    def set(self, **levels: int) -> None:
        """Set these levels from now on."""
        self.advance()
        self._levels.update(levels)

    @property
    def waits_for_rewards(self) -> bool:
        """Whether only rewards hold the run up."""
        running, _, scoring, waiting = self._levels.values()
        return bool(running == 0 and scoring and waiting)

    @property
    def scoring(self) -> int:
        """The number of trajectories that are being scored now."""
        return self._levels["scoring"]

    def advance(self) -> None:
        """Account for the time up to now."""
        running, capacity, scoring, waiting = self._levels.values()
        now = self._clock()
        seconds, self._since = now - self._since, now
        self.seconds += seconds
        self.offered += seconds * capacity
        self.used += seconds * min(running, capacity)
        self.scored += seconds * scoring
        if running == 0:
            self.idle += seconds * capacity
            self.exposed += seconds * scoring * waiting

    def reset(self) -> None:
        """Forget the time before now, but not the present levels."""
        self.advance()
        self.seconds = self.offered = self.used = self.idle = self.scored = self.exposed = 0.0

    @property
    def idle_share(self) -> float:
        """The share of the capacity-seconds in which no trajectory generated, 0.0 if there were none."""
        self.advance()
        return self.idle / self.offered if self.offered else 0.0

    @property
    def occupancy(self) -> float:
        """The share of the capacity-seconds that generated, 0.0 if there were none."""
        self.advance()
        return self.used / self.offered if self.offered else 0.0

    @property
    def hidden_share(self) -> float:
        """The share of the reward seconds that were hidden, 1.0 if there were none."""
        self.advance()
        return 1.0 - self.exposed / self.scored if self.scored else 1.0

    def end_version(self) -> None:
        """Account for the time since the version before was announced, as stock verl's rollouter does."""
        self.advance()
        now = self.seconds, self.offered, self.idle, self._groups
        since = zip(now, self._version_began, strict=True)
        seconds, offered, idle, groups = (after - before for after, before in since)
        self._version_began = now
        share = idle / offered if offered > 0 else 0.0
        self._of_version = {
            "fully_async/rollouter/version_time": seconds,
            "fully_async/rollouter/active_time": seconds * (1.0 - share),
            "fully_async/rollouter/idle_ratio": share,
            "fully_async/rollouter/step_generated_samples": groups,
        }

    def wait_for_turns(self) -> None:
        """Note that generation happens in turns, so that there is no capacity outside of them."""
        self.set(capacity=0)
        self._turn_occupancy = 0.0

    def begin_turn(self) -> None:
        """Note that a generation turn begins."""
        self.set(capacity=self._places)
        self._turn_began = self.offered, self.used

    def end_turn(self, interrupted: int) -> None:
        """Note that the turn is over and interrupted so many trajectories."""
        self._interruptions += interrupted
        self.set(capacity=0)
        offered, used = self._turn_began
        offered, used = self.offered - offered, self.used - used
        self._turn_occupancy = used / offered if offered else 0.0

    # Answers and their tokens.

    def arrived(self, scored: Any, is_wanted: bool) -> None:
        """Count a complete answer (`TrajectoryScored`). It is wanted unless its group has ended before."""
        arrived = scored.received_tokens + scored.restored_tokens
        self.tokens["received"] += scored.received_tokens
        self.tokens["restored"] += scored.restored_tokens
        self.tokens["cut"] += arrived - scored.sampled_tokens if is_wanted else arrived

    def completed(self, answers: Iterable[Any]) -> None:
        """Count a group that has all its answers (`TrajectoryScored`)."""
        self._groups += 1
        for scored in answers:
            self._complete["interrupted_trajectories"] += scored.interruptions > 0
            for name in SUMMED:
                self._complete[name] += getattr(scored, name)

    def close(
        self,
        live: int,
        workers: Mapping[str, int] | None,
        before: Mapping[str, int] | None,
        engines: Mapping[str, int] | None,
    ) -> TokenBooks:
        """Return what became of every token, at the end of the run.

        Args:
            live: tokens in complete answers of groups that have not ended.
            workers: the workers' counts together: received, dropped, unfinished. None if one of them is not known.
            before: the engines' counts before the unfinished trajectories were ended.
            engines: the engines' counts afterwards. None if one of them is not known.
        """
        of_workers = Counter(workers if workers is not None else {"received": self.tokens["received"]})
        known = before is not None and engines is not None
        begun, after = Counter(before if known else {}), Counter(engines if known else {})
        answered = after["answered"] if known else of_workers["received"]
        return TokenBooks(
            sampled=answered + _thrown_away(after) + after["under_way"],
            restored=self.tokens["restored"],
            trained=self.tokens["trained"],
            filtered=self.tokens["filtered"],
            failed=self.tokens["failed"],
            # An answer that was on its way to an ended trajectory reached nobody.
            cut=self.tokens["cut"]
            + _thrown_away(begun)
            + max(0, answered - of_workers["received"])
            + of_workers["dropped"],
            in_flight=live + _thrown_away(after) - _thrown_away(begun) + after["under_way"] + of_workers["unfinished"],
        )

    def metrics(self, groups: LedgerCounts, prompts: PromptCounts) -> dict[str, float]:
        """Return the metrics of docs/metrics.md, and with turns also those of docs/partial-rollout.md."""
        in_turns = {
            "partial_rollout/groups_pending": prompts.pending,
            "partial_rollout/groups_interrupted": prompts.interrupted,
            "partial_rollout/groups_complete": groups.ready + groups.taken,
            "partial_rollout/trajectories_interrupted": prompts.interrupted_trajectories,
            "partial_rollout/interruptions": self._interruptions,
            "partial_rollout/turn_occupancy": self._turn_occupancy or 0.0,
        }
        return {
            "fully_async/rollouter/generating_trajectories": prompts.running_trajectories,
            "fully_async/rollouter/groups_running": groups.running,
            "fully_async/rollouter/groups_ready": groups.ready,
            "fully_async/rollouter/idle_share": self.idle_share,
            "fully_async/rollouter/occupancy": self.occupancy,
            "fully_async/rewards/scoring": self.scoring,
            "fully_async/rewards/seconds": self.scored,
            "fully_async/rewards/hidden_share": self.hidden_share,
            **{f"fully_async/partial/{name}": self._complete[name] for name in ("interrupted_trajectories", *SUMMED)},
            "fully_async/ledger/filtered_uniform": groups.filtered_by_reason.get(UNIFORM_REASON, 0),
            "fully_async/ledger/non_finite": groups.filtered_by_reason.get(NON_FINITE_REASON, 0)
            + groups.failed_by_reason.get(NON_FINITE_REASON, 0),
            "fully_async/count/total_generated_samples": self._groups,
            "fully_async/count/staleness_samples": groups.live,
            "fully_async/count/dropped_stale_samples": 0,
            **self._of_version,
            **({} if self._turn_occupancy is None else in_turns),
        }


def _thrown_away(engines: Mapping[str, int]) -> int:
    """Return the tokens of requests that ended without an answer."""
    return engines["sampled"] - engines["answered"] - engines["under_way"]

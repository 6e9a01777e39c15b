# SPDX-License-Identifier: Apache-2.0
"""Counts how much of a run's generation capacity is used, the time of rewards, and what becomes of answers and tokens.

Contract. Capacity-seconds are the number of trajectories that could generate at once, multiplied by time. Reward
seconds are the time that rewards took to compute, summed over trajectories. Reward seconds are *exposed* while nothing
generates and the trainer waits for a batch, because the run then waits only for rewards; all others are *hidden*. Each
token is counted three times: by the engine that samples it, by the agent-loop worker that receives it in an answer, and
here, when the answer is complete, by what becomes of its prompt group. `TokenBooks.not_known` is 0 only if the three
counts agree. If a worker or an engine died, its count is lost, and the count of the next stage is used instead.

The module uses no threads and no locks; the scheduler calls it under its own lock. Shown by
tests/core/test_timeline.py, tests/integration/test_token_books.py and, for real runs, tests/accounts.py.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from recipe.async_engine.core.groups import NON_FINITE_REASON, UNIFORM_REASON, LedgerCounts
from recipe.async_engine.core.prompt_manager import PromptCounts
from recipe.async_engine.record.events import Class, Clock, Lane, TokenBooks

SUMMED = ("reprefilled_tokens", "recovered_tokens", "restored_tokens")
"""Fields of `TrajectoryScored` whose sums over all complete groups are metrics."""


class RolloutBooks:
    """Counts how much of a run's generation capacity is used, the time of rewards, and tokens by what became of them.

    Args:
        clock: clock for capacity and rewards, in seconds. It may stand still after the last step (`Timeline.stop`).
        capacity: number of trajectories that can generate at once on all live replicas together.
        lane_clock: clock for the attribute ``lane``, which does not stand still; by default ``clock``.

    Attributes:
        lane: a `Lane` that records why the scheduler starts no further trajectory.
        seconds: seconds counted so far.
        offered: capacity-seconds so far (capacity multiplied by time).
        used: seconds of generation, summed over trajectories, except for trajectories beyond the capacity.
        idle: capacity-seconds of the time in which no trajectory generated.
        scored: seconds that rewards took, summed over trajectories.
        exposed: the part of `scored` that held up the run.
        tokens: numbers of tokens in complete answers, by name: ``received`` since this launch, ``restored`` from a
            checkpoint, ``trained``, ``filtered``, ``failed``, and ``cut``, which were discarded for another reason.
    """

    def __init__(self, clock: Clock, capacity: int, lane_clock: Clock | None = None) -> None:
        self._clock = clock
        self.lane = Lane(lane_clock or clock, Class.START_UP)
        # `running`, `capacity` and `scoring` are the current numbers of trajectories that generate, that could
        # generate, and whose reward is being computed. `waiting` is 1 while the trainer waits for a batch, else 0.
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

    def set(self, **levels: int) -> None:
        """Set some of the current numbers `running`, `capacity`, `scoring` (trajectories) and `waiting` (0 or 1)."""
        self.advance()
        self._levels.update(levels)

    @property
    def waits_for_rewards(self) -> bool:
        running, _, scoring, waiting = self._levels.values()
        return bool(running == 0 and scoring and waiting)

    @property
    def scoring(self) -> int:
        return self._levels["scoring"]

    def advance(self) -> None:
        """Add the time since the last call to all time counts."""
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
        """Set all time counts to 0, but keep the current numbers of trajectories."""
        self.advance()
        self.seconds = self.offered = self.used = self.idle = self.scored = self.exposed = 0.0

    @property
    def idle_share(self) -> float:
        """The share of capacity-seconds that passed while no trajectory generated; 0.0 without capacity."""
        self.advance()
        return self.idle / self.offered if self.offered else 0.0

    @property
    def occupancy(self) -> float:
        """The share of capacity-seconds in which trajectories generated; 0.0 without capacity."""
        self.advance()
        return self.used / self.offered if self.offered else 0.0

    @property
    def hidden_share(self) -> float:
        """The share of reward time that did not delay the run, or 1.0 if no rewards were computed."""
        self.advance()
        return 1.0 - self.exposed / self.scored if self.scored else 1.0

    def end_version(self) -> None:
        """Compute the metrics that stock verl's rollouter reports, for the time since this method was last called."""
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

    def use_places(self, places: int, running: int) -> None:
        """Set the number of trajectories that can generate at once to ``places``.

        If it is 0, a turn of generation ends, which interrupts ``running`` trajectories.
        """
        self.set(capacity=places)
        if places:
            self._turn_began = self.offered, self.used
            return
        self._interruptions += running
        offered, used = self._turn_began
        offered, used = self.offered - offered, self.used - used
        self._turn_occupancy = used / offered if offered else 0.0

    def arrived(self, scored: Any, is_wanted: bool) -> None:
        """Count the tokens of a complete answer (`TrajectoryScored`); ``is_wanted`` is False if its group has ended."""
        arrived = scored.received_tokens + scored.restored_tokens
        self.tokens["received"] += scored.received_tokens
        self.tokens["restored"] += scored.restored_tokens
        self.tokens["cut"] += arrived - scored.sampled_tokens if is_wanted else arrived

    def completed(self, answers: Iterable[Any]) -> None:
        """Count a group whose answers (`TrajectoryScored`) are all complete."""
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
        """Return, at the end of the run, what became of every token.

        Args:
            live: number of tokens in complete answers of groups that have not ended.
            workers: sums of the token counts `received`, `dropped` and `unfinished` over all workers; None if those of
                one are unknown.
            before: token counts of the engines just before the unfinished trajectories are ended.
            engines: the same counts after these trajectories have ended; None if those of one engine are unknown.
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
            # Discarded tokens include those of answers that no worker received, because their trajectories had ended.
            cut=self.tokens["cut"]
            + _thrown_away(begun)
            + max(0, answered - of_workers["received"])
            + of_workers["dropped"],
            in_flight=live + _thrown_away(after) - _thrown_away(begun) + after["under_way"] + of_workers["unfinished"],
        )

    def metrics(self, groups: LedgerCounts, prompts: PromptCounts) -> dict[str, float]:
        """Return the metrics of docs/metrics.md; with shared accelerators, also those of docs/partial-rollout.md."""
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
    """Return the number of tokens that engines sampled for requests that ended without an answer."""
    return engines["sampled"] - engines["answered"] - engines["under_way"]

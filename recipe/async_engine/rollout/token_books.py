# SPDX-License-Identifier: Apache-2.0
"""What became of every sampled token: counts of the scheduler, and what workers and engines say when the run ends.

Contract: engines count what they sample, workers what they are answered with, the scheduler what its groups' answers
have and how they end; `TokenBooks.not_known` is 0 only if the three agree. Of a worker or an engine that died the count
is lost: what the next one of the three knows of its tokens stands for it then. Shown by
tests/integration/test_token_books.py and, of real runs, tests/accounts.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from recipe.async_engine.core.groups import GroupState
from recipe.async_engine.record.events import TokenBooks
from recipe.async_engine.rollout.kept_answers import TokenFlow
from recipe.async_engine.rollout.trajectory_events import TrajectoryScored


@dataclass
class AnswerTokens:
    """Tokens of complete answers, as the scheduler counts them; see `TokenBooks` for the names.

    received: sampled in this start, those included that an agent loop left out of its response.
    """

    received: int = 0
    restored: int = 0
    trained: int = 0
    filtered: int = 0
    failed: int = 0
    cut: int = 0

    def arrived(self, scored: TrajectoryScored, is_wanted: bool) -> None:
        """A complete answer is here; ``is_wanted``: its group has not ended."""
        self.received += scored.received_tokens
        self.restored += scored.restored_tokens
        self.cut += scored.received_tokens + scored.restored_tokens - scored.sampled_tokens
        if not is_wanted:
            self.cut += scored.sampled_tokens

    def ended(self, tokens: int, state: GroupState) -> None:
        """A group with so many tokens in its complete answers was filtered, or it failed."""
        if state is GroupState.FILTERED:
            self.filtered += tokens
        else:
            self.failed += tokens

    def close(
        self,
        live: int,
        workers: TokenFlow | None,
        before: Mapping[str, int] | None,
        engines: Mapping[str, int] | None,
    ) -> TokenBooks:
        """The books at the end of the run.

        Args:
            live: tokens in complete answers of groups that have not ended.
            workers: what all of them say; None if one cannot.
            before: the engines' counts before the unfinished trajectories were ended.
            engines: and afterwards; None if one of them cannot say, as one that died.
        """
        if workers is None:
            workers = TokenFlow(received=self.received)
        known = before is not None and engines is not None
        before, after = (before or {}, engines or {}) if known else ({}, {})
        thrown_away = _thrown_away(before)
        answered = after.get("answered", 0) if known else workers.received
        under_way = after.get("under_way", 0)
        return TokenBooks(
            sampled=answered + _thrown_away(after) + under_way,
            restored=self.restored,
            trained=self.trained,
            filtered=self.filtered,
            failed=self.failed,
            # An answer that was on its way to a trajectory that ended came to nobody.
            cut=self.cut + thrown_away + max(0, answered - workers.received) + workers.dropped,
            in_flight=live + _thrown_away(after) - thrown_away + under_way + workers.unfinished,
        )


def _thrown_away(engines: Mapping[str, int]) -> int:
    """Tokens of requests that ended without an answer."""
    return engines.get("sampled", 0) - engines.get("answered", 0) - engines.get("under_way", 0)

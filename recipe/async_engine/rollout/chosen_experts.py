# SPDX-License-Identifier: Apache-2.0
"""Keeps the experts that were chosen when the tokens of a trajectory were sampled, over all its turns.

A turn is a request and its answer. Contract: a request of a later turn sends the earlier turns again, and the engine
reads them again, possibly with newer weights, whose routers choose other experts. The experts that a trainer replays
for the tokens of an earlier turn are those of that turn, because they belong to the log-probs of its tokens. Shown by
tests/integration/test_client.py and, with real engines, test_router_replay.py.
"""

from __future__ import annotations

import numpy as np


class ChosenExperts:
    """The experts of one trajectory's tokens: rows as in `engines.answers.joined_experts`."""

    def __init__(self) -> None:
        self._known: list[tuple[np.ndarray, np.ndarray]] = []

    def first_chosen(self, token_ids: list[int], experts: np.ndarray | None) -> np.ndarray | None:
        """Return ``experts``, but with the earlier values of all rows that are known from an earlier turn.

        ``token_ids`` has the tokens of a request and its answer. A row depends on its token and on all tokens before
        this token, so the row is known if the tokens of an earlier turn began with these tokens.
        """
        if experts is None:
            return None
        tokens = np.array(token_ids)
        shared = [_shared(tokens, earlier) for earlier, _ in self._known]
        most = max(range(len(shared)), key=shared.__getitem__, default=None)
        if most is not None:
            rows = self._known[most][1][: shared[most]]
            experts = np.concatenate([rows, experts[len(rows) :]])
        # Keep earlier turns that are not a prefix of this one: an agent loop may hold several conversations.
        self._known = [known for known, same in zip(self._known, shared, strict=True) if same < len(known[0])]
        self._known.append((tokens, experts))
        return experts


def _shared(one: np.ndarray, other: np.ndarray) -> int:
    """Return the number of tokens that both sequences begin with."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length

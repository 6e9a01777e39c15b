# SPDX-License-Identifier: Apache-2.0
"""Keeps the experts that a model's routers chose while a trajectory was sampled, over all its turns.

A turn is a request and its answer. Contract: the request of a later turn contains the tokens of all earlier turns. The
engine reads these tokens again, possibly with newer weights, whose routers choose other experts. The trainer must
replay the experts of the first reading, because the tokens' log-probs were computed with these. Shown by
tests/integration/test_client.py and, with real engines, test_router_replay.py.
"""

from __future__ import annotations

import numpy as np


class ChosenExperts:
    """The experts chosen for a trajectory: a row (layers, experts per token) for each token that an engine has read."""

    def __init__(self) -> None:
        self._known: list[tuple[np.ndarray, np.ndarray]] = []

    def first_chosen(self, token_ids: list[int], experts: np.ndarray | None) -> np.ndarray | None:
        """Return the ``experts`` of a new turn, but with the rows of an earlier turn for their common first tokens.

        ``token_ids`` has the tokens of the new turn's request and answer, and ``experts`` has a row for each of them
        that the engine has read. A row depends on its token and on all tokens before it, so only rows of a common
        beginning can be taken from an earlier turn.
        """
        if experts is None:
            return None
        tokens = np.array(token_ids)
        shared = [_shared(tokens, earlier) for earlier, _ in self._known]
        most = max(range(len(shared)), key=shared.__getitem__, default=None)
        if most is not None:
            rows = self._known[most][1][: shared[most]]
            experts = np.concatenate([rows, experts[len(rows) :]])
        # Drop earlier turns that this turn continues, because its rows include theirs. Keep the others, because an
        # agent loop may have several conversations.
        self._known = [known for known, same in zip(self._known, shared, strict=True) if same < len(known[0])]
        self._known.append((tokens, experts))
        return experts


def _shared(one: np.ndarray, other: np.ndarray) -> int:
    """Return the length of the longest common prefix of two token sequences."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length

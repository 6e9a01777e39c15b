# SPDX-License-Identifier: Apache-2.0
"""Whole batches: which batch a group is trained in is fixed when it is issued.

Contract. Batches are numbered from 0 and trained in that order, each only when all its groups are ready. A group joins
the first batch that has a place; a group that is filtered or fails leaves its place to the next one that is issued.
Used by the modes whose batches must be those of synchronous training; elsewhere the oldest ready groups are trained.
"""

from __future__ import annotations

from collections.abc import Iterable


class WholeBatches:
    """The untrained batches of a run and their groups.

    first: number of the next batch to train. size: b, groups in a batch.
    """

    def __init__(self, size: int, *, first: int = 0, members: Iterable[tuple[int, int]] = ()) -> None:
        """`members`: (batch, group id) of the groups that are in a batch already."""
        self.size = size
        self.first = first
        self._members: dict[int, set[int]] = {}
        for batch, group_id in members:
            self._members.setdefault(batch, set()).add(group_id)

    def join(self, group_id: int) -> int:
        """Give a new group its place; returns the number of its batch."""
        batch = self.first
        while len(self._members.get(batch, ())) >= self.size:
            batch += 1
        self._members.setdefault(batch, set()).add(group_id)
        return batch

    def leave(self, batch: int, group_id: int) -> None:
        """The group will not be trained: its place is free."""
        self._members[batch].remove(group_id)

    def next(self) -> list[int]:
        """The groups that have a place in the next batch, in issue order."""
        return sorted(self._members.get(self.first, ()))

    def advance(self) -> None:
        """The next batch has been taken for training."""
        del self._members[self.first]
        self.first += 1

    def retreat(self, members: Iterable[int]) -> None:
        """The batch that was taken last, of these groups, is the next one again."""
        self.first -= 1
        self._members[self.first] = set(members)

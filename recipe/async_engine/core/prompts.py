# SPDX-License-Identifier: Apache-2.0
"""Prompts of a run by epoch and index, and compact sets of them.

A run trains millions of prompts; what was issued and what was trained is kept as sorted runs of consecutive indices,
so that the record stays small and "each prompt exactly once" can be shown from it after a resume. An epoch that was
gone through completely is a single run. Test: tests/core/test_ledger.py.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptRef:
    """One prompt of one epoch.

    index: its place in the data set, >= 0. Places in the order in which the sampler yields the prompts make the
        shortest runs; row numbers of a shuffled data set are as correct. epoch: how often the data set was gone
        through before, >= 0. uid: the name of its group in the trainer's batch.
    """

    index: int
    epoch: int
    uid: str

    @property
    def key(self) -> tuple[int, int]:
        """(epoch, index), unique in a run."""
        return self.epoch, self.index


class PromptSet:
    """A set of (epoch, index) pairs, kept per epoch as the ascending edges of its runs: first, end, first, end, ..."""

    def __init__(self, runs: Iterable[Sequence[int]] = ()) -> None:
        """From the form that `to_rows` gives."""
        self._edges: dict[int, list[int]] = {}
        self._size = 0
        for epoch, first, end in runs:
            self._edges.setdefault(epoch, []).extend((first, end))
            self._size += end - first

    def __len__(self) -> int:
        return self._size

    def __contains__(self, key: tuple[int, int]) -> bool:
        epoch, index = key
        return bisect_right(self._edges.get(epoch, []), index) % 2 == 1

    def add(self, key: tuple[int, int]) -> bool:
        """Add the pair; False if it was in the set."""
        if key in self:
            return False
        epoch, index = key
        edges = self._edges.setdefault(epoch, [])
        # The pair is a run of its own; where one of its edges is another run's too, the two are one.
        for edge in (index, index + 1):
            place = bisect_left(edges, edge)
            if place < len(edges) and edges[place] == edge:
                del edges[place]
            else:
                edges.insert(place, edge)
        self._size += 1
        return True

    def to_rows(self) -> list[list[int]]:
        """[epoch, first, end] for every run of consecutive indices first..end-1, sorted."""
        return [
            [epoch, first, end]
            for epoch, edges in sorted(self._edges.items())
            for first, end in zip(edges[::2], edges[1::2], strict=True)
        ]

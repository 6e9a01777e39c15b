# SPDX-License-Identifier: Apache-2.0
"""Prompts of a run by epoch and index, and compact sets of them.

A run trains millions of prompts; what was issued and what was trained is kept as sorted runs of consecutive indices,
so that the record stays small and "each prompt exactly once" can be shown from it after a resume. An epoch that was
gone through completely is a single run. Test: tests/core/test_ledger.py.
"""

from __future__ import annotations

from bisect import bisect_right
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
    """A set of (epoch, index) pairs, kept per epoch as disjoint, sorted, non-adjacent runs [first, end)."""

    def __init__(self, runs: Iterable[Sequence[int]] = ()) -> None:
        """From the form that `to_rows` gives."""
        self._firsts: dict[int, list[int]] = {}
        self._ends: dict[int, list[int]] = {}
        self._size = 0
        for epoch, first, end in runs:
            firsts, ends = self._firsts.setdefault(epoch, []), self._ends.setdefault(epoch, [])
            if not 0 <= first < end or (ends and first <= ends[-1]):
                raise ValueError(f"runs of epoch {epoch} are not sorted and disjoint at [{first}, {end})")
            firsts.append(first)
            ends.append(end)
            self._size += end - first

    def __len__(self) -> int:
        return self._size

    def __contains__(self, key: tuple[int, int]) -> bool:
        epoch, index = key
        place = bisect_right(self._firsts.get(epoch, []), index) - 1
        return place >= 0 and index < self._ends[epoch][place]

    def add(self, key: tuple[int, int]) -> bool:
        """Add the pair; False if it was in the set."""
        if key in self:
            return False
        epoch, index = key
        firsts, ends = self._firsts.setdefault(epoch, []), self._ends.setdefault(epoch, [])
        after = bisect_right(firsts, index)
        joins_before = after > 0 and ends[after - 1] == index
        joins_after = after < len(firsts) and firsts[after] == index + 1
        if joins_before and joins_after:
            ends[after - 1] = ends.pop(after)
            del firsts[after]
        elif joins_before:
            ends[after - 1] = index + 1
        elif joins_after:
            firsts[after] = index
        else:
            firsts.insert(after, index)
            ends.insert(after, index + 1)
        self._size += 1
        return True

    def to_rows(self) -> list[list[int]]:
        """[epoch, first, end] for every run of consecutive indices first..end-1, sorted."""
        return [
            [epoch, first, end]
            for epoch in sorted(self._firsts)
            for first, end in zip(self._firsts[epoch], self._ends[epoch], strict=True)
        ]

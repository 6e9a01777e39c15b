# SPDX-License-Identifier: Apache-2.0
"""How many groups a batch cost: those that were filtered, counted as synchronous training would count them.

Contract. Outcomes are counted in the order of issue, whatever order groups end in: a batch is complete with its b-th
kept group, and the count of filtered ones begins anew with each batch. So how far generation runs ahead, and which
answers are done first, changes nothing: what a synchronous run with these outcomes would train never exceeds the limit
here. A group that fails says nothing of its prompt and is not counted. Test: tests/core/test_group_filter.py.
"""

from collections import OrderedDict


class FilterCount:
    """See the module's contract.

    batch_groups: b. limit: filtered groups that one batch may cost; 0: any number.
    """

    def __init__(self, batch_groups: int, limit: int) -> None:
        self._batch_groups = batch_groups
        self._limit = limit
        self._kept = 0
        self._filtered = 0
        # Those issued since the oldest that has no outcome yet, in order; None: none yet.
        # A plain dict would look past every outcome that has left it, each time it is asked for its first one.
        self._outcomes: OrderedDict[int, bool | None] = OrderedDict()

    @property
    def exceeded(self) -> bool:
        """Whether the batch under way has cost as many filtered groups as it may."""
        return 0 < self._limit <= self._filtered

    def issued(self, group_id: int) -> None:
        """A group begins."""
        self._outcomes[group_id] = None

    def ended(self, group_id: int, kept: bool) -> None:
        """A group is complete: it is kept, or it is filtered."""
        if group_id in self._outcomes:
            self._outcomes[group_id] = kept
            self._advance()

    def forget(self, group_id: int) -> None:
        """A group ended otherwise; one that is counted already stays so."""
        if self._outcomes.get(group_id, True) is None:
            del self._outcomes[group_id]
            self._advance()

    def _advance(self) -> None:
        while self._outcomes and not self.exceeded:
            oldest = next(iter(self._outcomes))
            kept = self._outcomes[oldest]
            if kept is None:
                return
            del self._outcomes[oldest]
            self._kept += kept
            self._filtered += not kept
            if self._kept == self._batch_groups:
                self._kept = self._filtered = 0

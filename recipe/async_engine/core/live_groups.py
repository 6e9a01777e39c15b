# SPDX-License-Identifier: Apache-2.0
"""The live groups of a sample ledger (running, ready or taken), indexed by state, start version and batch.

Contract: the queries that are made after every change of a group (number of ready groups, start versions of the oldest
ones, groups in a batch) do not take longer with more live groups; only listing all groups of a state does. The results
equal those of a scan over all live groups. Test: tests/core/test_live_groups.py.
"""

import heapq
from collections import Counter, defaultdict

from recipe.async_engine.core.groups import Group, GroupState


class LiveGroups:
    """Holds the live groups, and finds them by id, state, start version (version of the oldest token) or batch."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        # Ids of groups by state and start version. A start version without groups has no entry.
        self._by_start: dict[GroupState, dict[int, set[int]]] = {state: {} for state in GroupState}
        self._counts: Counter[GroupState] = Counter()
        self._by_batch: defaultdict[int, set[int]] = defaultdict(set)
        self._ready_of_batch: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, group_id: int) -> Group:
        return self._groups[group_id]

    def find(self, group_id: int) -> Group | None:
        """Return the group with this id, or None if it is not live."""
        return self._groups.get(group_id)

    def put(self, group: Group) -> None:
        """Add ``group``. If there already is a group with its id, replace it, because its state has changed."""
        before = self._groups.get(group.id)
        if before is not None:
            self._leave(before)
        self._groups[group.id] = group
        self._by_start[group.state].setdefault(group.start, set()).add(group.id)
        self._counts[group.state] += 1
        if group.batch is not None:
            self._by_batch[group.batch].add(group.id)
            self._ready_of_batch[group.batch] += group.state is GroupState.READY

    def remove(self, group_id: int) -> None:
        self._leave(self._groups.pop(group_id))

    def all(self) -> list[Group]:
        return list(self._groups.values())

    def count(self, state: GroupState) -> int:
        return self._counts[state]

    def starts(self, state: GroupState) -> dict[int, int]:
        """Return the number of groups in this state, by start version."""
        return {start: len(ids) for start, ids in self._by_start[state].items()}

    def in_state(self, state: GroupState) -> list[Group]:
        return [self._groups[group_id] for group_id in sorted(set().union(*self._by_start[state].values()))]

    def oldest(self, state: GroupState, count: int) -> list[Group]:
        """Return the ``count`` oldest groups in this state (all if there are fewer), sorted by start version and id."""
        found: list[Group] = []
        for _, ids in sorted(self._by_start[state].items()):
            if len(found) == count:
                break
            found += [self._groups[group_id] for group_id in heapq.nsmallest(count - len(found), ids)]
        return found

    def oldest_starts(self, state: GroupState, count: int) -> dict[int, int]:
        """Return the start versions of the groups that `oldest` would return, and the number of groups with each.

        The versions are in ascending order.
        """
        found: dict[int, int] = {}
        for start, ids in sorted(self._by_start[state].items()):
            if count <= 0:
                break
            found[start] = min(count, len(ids))
            count -= found[start]
        return found

    def of_batch(self, batch: int) -> list[Group]:
        """Return the groups whose batch number is ``batch``, in issue order."""
        return [self._groups[group_id] for group_id in sorted(self._by_batch.get(batch, ()))]

    def places_taken(self, batch: int) -> int:
        """Return the number of groups whose batch number is ``batch``."""
        return len(self._by_batch.get(batch, ()))

    def ready_of_batch(self, batch: int) -> int:
        return self._ready_of_batch[batch]

    def _leave(self, group: Group) -> None:
        """Remove a group from all indexes except for the one by id.

        ``group`` must be the object that was last passed to `put`, because the indexes hold the group by its state and
        start version at that time.
        """
        by_start = self._by_start[group.state]
        by_start[group.start].discard(group.id)
        if not by_start[group.start]:
            del by_start[group.start]
        self._counts[group.state] -= 1
        if group.batch is not None:
            self._by_batch[group.batch].discard(group.id)
            self._ready_of_batch[group.batch] -= group.state is GroupState.READY
            if not self._by_batch[group.batch]:
                del self._by_batch[group.batch], self._ready_of_batch[group.batch]

# SPDX-License-Identifier: Apache-2.0
"""Which prompt groups verl's rollout trace has (``actor_rollout_ref.rollout.trace``).

Contract: with ``max_samples_per_step_per_worker`` at most so many groups for each version and agent-loop worker, the
first of the version, each with all of its answers, wherever they run. verl draws them; a group that is issued alone is
drawn from nothing. Shown by tests/integration/test_rollout_trace.py.
"""

from __future__ import annotations

from collections import Counter


class TracedGroups:
    """See the module's contract; ``each_version``: groups of a version, None for all."""

    def __init__(self, each_version: int | None = None) -> None:
        self._each_version = each_version
        self._chosen: set[int] = set()
        self._of_version: Counter[int] = Counter()

    def has(self, group_id: int, version: int) -> bool:
        """Whether it is traced, a group that was issued at ``version``; the same whenever it is asked."""
        if self._each_version is None or group_id in self._chosen:
            return True
        if self._of_version[version] >= self._each_version:
            return False
        self._of_version[version] += 1
        self._chosen.add(group_id)
        return True

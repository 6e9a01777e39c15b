# SPDX-License-Identifier: Apache-2.0
"""Versions that were published with the weights of the version before, although the optimizer had changed them.

Training then goes on against a policy that samples with the same weights for ever, and nothing else says so: losses,
rewards and staleness look as they should. verl 0.9.1 sends the frozen base alone where LoRA adapters are trained and
not merged (verl #7495).

Contract: a version counts as unchanged if its checksum is the previous publication's and one of its updates had a
gradient of a finite norm above 0 and a learning rate above 0. Others (a warm-up that begins at 0, advantages that are
all 0, updates that were skipped) are taken as they come, and neither count nor end a row. What so many in a row mean is
the alarm's to say (`alarms`). Shown by tests/core/test_unchanged.py and, in real runs, tests/e2e/test_lora.py.
"""

import math
from collections.abc import Iterable


class UnchangedWeights:
    """See the module's contract. A step calls :meth:`updated`, its version's last one :meth:`seal` after that."""

    def __init__(self) -> None:
        self._learning_rate: float | None = None
        self._is_due = False
        self._due: set[int] = set()
        self._checksum: str | None = None

    def updated(self, gradient_norms: Iterable[float], next_learning_rate: float) -> None:
        """Take in a step's updates of the policy.

        Args:
            gradient_norms: of each update.
            next_learning_rate: the next step's, which is what verl reports; that of a run's first step is not known.
        """
        moves = self._learning_rate is not None and self._learning_rate > 0
        if moves and any(math.isfinite(norm) and norm > 0 for norm in gradient_norms):
            self._is_due = True
        self._learning_rate = next_learning_rate

    def seal(self, version: int) -> None:
        """The updates since the version before are those of ``version``."""
        if self._is_due:
            self._due.add(version)
        self._is_due = False

    def published(self, version: int, checksum: str | None) -> bool | None:
        """``version`` has reached the replicas, with this checksum; whether it should have been another, None: unknown.

        It is unknown where none of its updates had to change it, and the checksum is as before.
        """
        was_due = any(due <= version for due in self._due)
        self._due = {due for due in self._due if due > version}
        before, self._checksum = self._checksum, checksum
        if checksum is None or checksum != before:
            return False
        return True if was_due else None

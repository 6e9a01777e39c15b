# SPDX-License-Identifier: Apache-2.0
"""verl's trackers (``trainer.logger``); one that fails loses what it was given, and neither the run nor other trackers.

Shown by tests/integration/test_trackers.py and tests/e2e/test_disks.py.
"""

from __future__ import annotations

import logging
from typing import Any

from verl.utils.tracking import Tracking

logger = logging.getLogger(__name__)


class Trackers(Tracking):
    """One that cannot be set up still refuses the start."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._failed: set[str] = set()

    def log(self, data: Any, step: int, backend: Any = None) -> None:
        for name in self.logger:
            if backend is None or name in backend:
                try:
                    super().log(data, step, backend=(name,))
                except Exception as error:  # whatever a disk, a network or a service has
                    if name not in self._failed:
                        self._failed.add(name)
                        logger.error("tracker %s does not take step %d, the run goes on: %r", name, step, error)

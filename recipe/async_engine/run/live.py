# SPDX-License-Identifier: Apache-2.0
"""The figures of a run that goes on, as the main asks for them: never waited for, and missed by nobody.

Shown by tests/core/test_display.py and tests/e2e.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError


class LiveFigures:
    """``ask``: a call of `TaskRunner.live`."""

    def __init__(self, ask: Callable[[], ray.ObjectRef]) -> None:
        self._ask = ask
        self._asked: ray.ObjectRef | None = None

    def newest(self) -> dict[str, Any] | None:
        """The figures that have come since it was called last, and ask for the next ones; None if none have."""
        figures: dict[str, Any] | None = None
        if self._asked is not None:
            if not ray.wait([self._asked], timeout=0)[0]:
                return None
            try:
                figures = ray.get(self._asked, timeout=0)
            except RayError:
                # The run's own errors come another way.
                figures = None
        self._asked = self._ask()
        return figures

# SPDX-License-Identifier: Apache-2.0
"""Updates that an optimizer did not make because the gradient was no number."""

import math
from collections.abc import Iterable

from recipe.async_engine.core.errors import RecipeError


class UpdatesSkipped(RecipeError):
    """So many updates in a row were skipped that the run learns nothing."""


class SkippedUpdates:
    """Counts them for one model; verl's FSDP engine skips an update whose gradient has no finite norm, and goes on."""

    def __init__(self, model: str, limit: int, total: int = 0) -> None:
        """``limit``: as many in a row end the run. ``total``: of the run so far, where it was resumed."""
        self._model, self._limit = model, limit
        self.total = total
        self._in_a_row = 0

    def note(self, gradient_norms: Iterable[float]) -> int:
        """Take in a step's updates, in their order; returns how many were skipped, or raises `UpdatesSkipped`."""
        skipped = 0
        for norm in gradient_norms:
            finite = math.isfinite(norm)
            self._in_a_row = 0 if finite else self._in_a_row + 1
            skipped += not finite
            if self._in_a_row >= self._limit:
                raise UpdatesSkipped(
                    f"{self._in_a_row} updates of the {self._model} in a row were skipped because the norm of its "
                    f"gradient was {norm}, as many as async_training.max_skipped_updates={self._limit} allows: look at "
                    "the learning rate, the loss and the precision; the weights are those of the last update made"
                )
        self.total += skipped
        return skipped

# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Updates that an optimizer did not make because the gradient was no number."""

from __future__ import annotations

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
        """Take in a step's updates, in their order. Returns how many of them were skipped.

        Raises:
            UpdatesSkipped: there have been as many in a row as the limit says.
        """
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

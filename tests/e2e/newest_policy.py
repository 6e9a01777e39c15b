# SPDX-License-Identifier: Apache-2.0
"""An admission policy that always prefers the newest, contrary to a staleness bound."""

from __future__ import annotations

from typing import Any

from recipe.async_engine.core.groups import Group
from recipe.async_engine.core.policy import Turns


class Newest(Turns):
    """Starts the last prompt at hand, fills slots of the newest groups first, and trains the newest ready ones."""

    at_hand = 8

    def next_prompt(self, prompts: Any) -> int | None:
        return len(prompts) - 1

    def rank(self, group: Group, index: int) -> float:
        return -group.id

    def next_batch(self, ready: Any) -> Any:
        return sorted(ready, key=lambda group: -group.id)[: ready.batch_groups]

# SPDX-License-Identifier: Apache-2.0
"""The version that is on its way from the trainer to the replicas, while the trainer goes on.

Contract: see `recipe.async_engine.trainer.beside`. Shown by tests/integration/test_publication.py and
tests/e2e/test_faults.py.
"""

from __future__ import annotations

from collections.abc import Callable

from recipe.async_engine.trainer.beside import Beside
from recipe.async_engine.weights.publisher import PublishFailed

Metrics = dict[str, float]


class Publication(Beside[Metrics]):
    """Versions, published one after the other.

    Args:
        timeout_s: how long one may take in all, after which waiting for it raises PublishFailed.
        setting: what the deadline follows from, for its message.
        alarm: called with the error of one that failed, on its thread.
    """

    def __init__(self, timeout_s: float, setting: str, alarm: Callable[[BaseException], None]) -> None:
        def late(version: int) -> PublishFailed:
            return PublishFailed(f"version {version} was not announced within {timeout_s:g} s ({setting})")

        super().__init__("publication", timeout_s, late, alarm)

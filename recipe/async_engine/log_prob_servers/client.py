# SPDX-License-Identifier: Apache-2.0
"""Asks log-prob servers, any number of them, from one process.

Contract: a request goes to the server with the fewest outstanding tokens of this process, among equals to the one that
had the fewest in all. If that one does not have the version, or fails, or dies, another is asked, each at most once; a
server that died is asked no more. `Unscored` says that none could answer in time: the caller computes those log-probs
itself, or has the trainer do it. Shown by tests/integration/test_scoring_client.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.log_prob_servers.service import Answer

logger = logging.getLogger(__name__)


class Unscored(RecipeError):
    """No log-prob server answered."""


class ScoringClient:
    """See the module's contract.

    servers: those that are asked, actor handles with a method ``score``, by name. timeout_s: longest wait for one
    request, whoever answers it.
    """

    def __init__(self, servers: Mapping[str, Any], timeout_s: float) -> None:
        self.servers = dict(servers)
        self._outstanding: Counter[str] = Counter()
        self._total: Counter[str] = Counter()
        self._timeout_s = timeout_s

    async def score(self, sequence: Any, tokens: int, version: int, start: int) -> Answer:
        """See :meth:`ScoringService.score`; raises `Unscored`, with what each server said, if none answers in time."""
        said: list[str] = []
        answer = None
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._ask(said, sequence, tokens, version, start)
        except TimeoutError:
            said.append(f"no answer within {self._timeout_s:g} s")
        if answer is None:
            reasons = "; ".join(said) or "none is left"
            raise Unscored(f"no log-prob server scored a sequence of version {version}: {reasons}")
        return answer

    async def _ask(self, said: list[str], sequence: Any, tokens: int, version: int, start: int) -> Answer | None:
        """One server after the other; what each one said instead of an answer goes to ``said``."""
        asked: list[str] = []
        while left := [name for name in self.servers if name not in asked]:
            name = min(left, key=lambda name: (self._outstanding[name], self._total[name]))
            asked.append(name)
            self._outstanding[name] += tokens
            self._total[name] += tokens
            try:
                return await self.servers[name].score.remote(sequence, tokens, version, start)
            except (RayTaskError, RecipeError) as error:
                # Before the next one: Ray's error is also an instance of its cause's class.
                cause = error.cause if isinstance(error, RayTaskError) else error
                said.append(f"{name}: {cause}")
            except RayActorError as error:
                logger.error("log-prob server %s died: %s", name, error)
                said.append(f"{name} died")
                self.servers.pop(name, None)
            finally:
                self._outstanding[name] -= tokens
        return None

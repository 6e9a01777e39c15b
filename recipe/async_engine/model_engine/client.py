# SPDX-License-Identifier: Apache-2.0
"""Asks log-prob servers, any number of them, from one process.

Contract: a request goes to the server with the fewest outstanding tokens of this process. If that one does not have
the version, or fails, or dies, another is asked, each at most once; a server that died is asked no more until
it is added again. `Unscored` says that none could answer in time: the caller computes those log-probs itself, or has
the trainer do it. Shown by tests/integration/test_scoring_client.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.core.spread import TokenSpread
from recipe.async_engine.model_engine.service import Answer

logger = logging.getLogger(__name__)


class Unscored(RecipeError):
    """No log-prob server answered."""


class ScoringClient:
    """See the module's contract.

    Args:
        servers: actor handles with a method ``score``, by name.
        timeout_s: longest wait for one request, whoever answers it.
    """

    def __init__(self, servers: Mapping[str, Any], timeout_s: float) -> None:
        self._servers = dict(servers)
        self._spread = TokenSpread(self._servers)
        self._timeout_s = timeout_s

    @property
    def servers(self) -> list[str]:
        """Those that are asked."""
        return list(self._servers)

    def add(self, name: str, server: Any) -> None:
        """A server is there, or there again."""
        self._servers[name] = server
        self._spread.add(name)

    def remove(self, name: str) -> None:
        """A server is asked no more."""
        self._servers.pop(name, None)
        self._spread.remove(name)

    async def score(self, sequence: Any, tokens: int, version: int, start: int) -> Answer:
        """See :meth:`ScoringService.score`.

        Raises:
            Unscored: no server answered in time; it says what each one said.
        """
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
        while (name := self._spread.choose(but=asked)) is not None:
            asked.append(name)
            self._spread.begin(name, tokens)
            try:
                return await self._servers[name].score.remote(sequence, tokens, version, start)
            except (RayTaskError, RecipeError) as error:
                # Before the next one: Ray's error is also an instance of its cause's class.
                cause = error.cause if isinstance(error, RayTaskError) else error
                said.append(f"{name}: {cause}")
            except RayActorError as error:
                logger.error("log-prob server %s died: %s", name, error)
                said.append(f"{name} died")
                self.remove(name)
            finally:
                self._spread.end(name, tokens)
        return None

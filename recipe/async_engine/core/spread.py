# SPDX-License-Identifier: Apache-2.0
"""Which of several servers takes the next piece of work: the one with the fewest outstanding tokens.

Pure bookkeeping. Contract: what was begun counts until it is ended, or its server is gone; among
servers that are equal it is the one that had the fewest tokens in all. Shown by tests/core/test_spread.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


class TokenSpread:
    """Servers and the tokens of the work that each one has."""

    def __init__(self, servers: Iterable[str] = ()) -> None:
        self._outstanding: dict[str, int] = {}
        self._total: dict[str, int] = {}
        for server in servers:
            self.add(server)

    def __len__(self) -> int:
        return len(self._outstanding)

    def __contains__(self, server: str) -> bool:
        return server in self._outstanding

    def add(self, server: str) -> None:
        """A server is there, or there again; it counts as having had as many tokens as any other."""
        self._outstanding.setdefault(server, 0)
        self._total.setdefault(server, max(self._total.values(), default=0))

    def remove(self, server: str) -> None:
        """A server is gone; it need not have been there."""
        self._outstanding.pop(server, None)
        self._total.pop(server, None)

    def choose(self, but: Collection[str] = ()) -> str | None:
        """The server for the next piece of work, other than those in ``but``; None if there is none."""
        candidates = [server for server in self._outstanding if server not in but]
        return min(candidates, key=lambda server: (self._outstanding[server], self._total[server]), default=None)

    def begin(self, server: str, tokens: int) -> None:
        """A server, which `choose` named, has ``tokens`` more to do."""
        self._outstanding[server] += tokens
        self._total[server] += tokens

    def end(self, server: str, tokens: int) -> None:
        """It has done them, or will not."""
        if server in self._outstanding:
            self._outstanding[server] = max(0, self._outstanding[server] - tokens)

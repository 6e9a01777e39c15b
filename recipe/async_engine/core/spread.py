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
"""Which of several servers takes the next piece of work: the one with the fewest outstanding tokens.

Pure bookkeeping. Contract: what was begun counts until it is ended, or its server is gone; servers that are equal take
turns. Shown by tests/core/test_spread.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


class TokenSpread:
    """Servers and the tokens of the work that each one has."""

    def __init__(self, servers: Iterable[str] = ()) -> None:
        self._outstanding: dict[str, int] = {}
        self._turns: dict[str, int] = {}
        for server in servers:
            self.add(server)

    def __len__(self) -> int:
        return len(self._outstanding)

    def __contains__(self, server: str) -> bool:
        return server in self._outstanding

    def add(self, server: str) -> None:
        """A server is there, or there again. Its turn comes when the others have had as many as it."""
        self._outstanding.setdefault(server, 0)
        self._turns.setdefault(server, max(self._turns.values(), default=0))

    def remove(self, server: str) -> None:
        """A server is gone; it need not have been there."""
        self._outstanding.pop(server, None)
        self._turns.pop(server, None)

    def choose(self, but: Collection[str] = ()) -> str | None:
        """The server for the next piece of work, other than those in ``but``; None if there is none."""
        candidates = [server for server in self._outstanding if server not in but]
        return min(candidates, key=lambda server: (self._outstanding[server], self._turns[server]), default=None)

    def begin(self, server: str, tokens: int) -> None:
        """A server, which `choose` named, has ``tokens`` more to do."""
        self._outstanding[server] += tokens
        self._turns[server] += 1

    def end(self, server: str, tokens: int) -> None:
        """It has done them, or will not."""
        if server in self._outstanding:
            self._outstanding[server] = max(0, self._outstanding[server] - tokens)

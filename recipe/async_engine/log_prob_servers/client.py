# SPDX-License-Identifier: Apache-2.0
"""Sends the sampled tokens of a trajectory to log-prob servers while the trajectory is still being generated.

The tokens that one request to a rollout server returned are a `Part` of the trajectory.

Contract: a part is submitted as soon as its request is answered, before the weights can change again, so that the
version that sampled the tokens can compute their log-probs. The client chooses the server with the fewest outstanding
tokens from this process and, among equals, the one to which this process has sent the fewest tokens so far. If the
chosen server lacks the version, fails or dies, each other server is tried once. A dead server is not used again. If no
server answers in time (`Unscored`), the trajectory does not fail, and the trainer computes the log-probs. Shown by
tests/integration/test_scoring_client.py, test_part_scores.py and tests/e2e/test_model_engine.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.core.versions import Part, place
from recipe.async_engine.log_prob_servers.service import Answer, Segment, Unscored

logger = logging.getLogger(__name__)


class ScoringClient:
    """Sends scoring requests to log-prob servers.

    ``servers`` maps the servers' names to their actor handles. ``timeout_s`` is the time limit for one sequence, in
    which several servers may be tried.
    """

    def __init__(self, servers: Mapping[str, Any], timeout_s: float) -> None:
        self.servers = dict(servers)
        self._outstanding: Counter[str] = Counter()
        self._total: Counter[str] = Counter()
        self._timeout_s = timeout_s

    async def score(self, sequence: Any, tokens: int, version: int, start: int) -> Answer:
        """Have one of the servers score a sequence. The arguments are those of :meth:`ScoringService.score`.

        Raises:
            Unscored: no server scored the sequence in time. The message has the reason for each server.
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
        """Ask one server after the other until one answers, and append the reason of each failure to ``said``."""
        asked: list[str] = []
        while left := [name for name in self.servers if name not in asked]:
            name = min(left, key=lambda name: (self._outstanding[name], self._total[name]))
            asked.append(name)
            self._outstanding[name] += tokens
            self._total[name] += tokens
            try:
                return await self.servers[name].score.remote(sequence, tokens, version, start)
            except (RayTaskError, RecipeError) as error:
                # Handle task errors before the other types, because a `RayTaskError` is also an instance of its cause's
                # class.
                cause = error.cause if isinstance(error, RayTaskError) else error
                said.append(f"{name}: {cause}")
            except ActorUnavailableError as error:
                # Keep the server, because it may be alive and only unreachable for this process.
                said.append(f"{name} cannot be reached: {error}")
            except RayActorError as error:
                logger.error("log-prob server %s died: %s", name, error)
                said.append(f"{name} died")
                self.servers.pop(name, None)
            finally:
                self._outstanding[name] -= tokens
        return None


UNSCORED = -1


@dataclass(frozen=True)
class ResponseScores:
    """Results of log-prob servers for a response of R tokens.

    Attributes:
        log_probs, entropy: float32 (R,), 0 at tokens that the policy did not sample, such as tool output.
        versions: int64 (R,), the version that computed each log-prob, ``UNSCORED`` at tokens that were not sampled.
        late_tokens: number of tokens whose log-probs were computed by another version than the requested one.
        queued_s: longest time in seconds that one of the response's requests waited at a server.
    """

    log_probs: np.ndarray
    entropy: np.ndarray
    versions: np.ndarray
    late_tokens: int
    queued_s: float

    @classmethod
    def empty(cls, length: int) -> ResponseScores:
        return cls(np.zeros(length, np.float32), np.zeros(length, np.float32), np.full(length, UNSCORED), 0, 0.0)

    def with_part(self, answer: Answer, first: int, count: int, skipped: int = 0) -> ResponseScores:
        """Store the values of ``count`` tokens of ``answer`` after its first ``skipped`` ones; return the new scores.

        The response has these tokens from index ``first`` on.
        """
        where = slice(first, first + count)
        self.log_probs[where], self.entropy[where] = answer.scores[:, skipped : skipped + count]
        self.versions[where] = answer.version
        late = self.late_tokens + count * answer.late
        return ResponseScores(self.log_probs, self.entropy, self.versions, late, max(self.queued_s, answer.queued_s))


class PartScorer:
    """Submits the parts of one trajectory to log-prob servers as they are generated, and collects their scores."""

    def __init__(self, client: ScoringClient, start: int) -> None:
        """``start`` is the version with which generation of the trajectory's prompt group started.

        Servers score the requests with the lowest ``start``, those of the oldest groups, first.
        """
        self._client = client
        self._start = start
        self._parts: list[Part] = []
        self._tasks: list[asyncio.Task[Answer]] = []

    def add(self, version: int, context: Sequence[int], tokens: Sequence[int]) -> None:
        """Submit ``tokens``, which ``version`` sampled after ``context``, to a log-prob server."""
        part = Part(version, list(context), list(tokens))
        self._parts.append(part)
        self._tasks.append(asyncio.create_task(score(self._client, part, self._start)))

    async def collect(
        self, prompt: Sequence[int], response: Sequence[int], mask: Sequence[int]
    ) -> ResponseScores | None:
        """Wait for the scores of all parts, and return the scores of ``response``; None if a sampled token has none.

        The response is one output of the agent loop. An agent loop may return several outputs, each with its own
        ``prompt``.
        """
        answers = await asyncio.gather(*self._tasks, return_exceptions=True)
        places = place(self._parts, prompt, response, mask)
        if places is None:
            logger.info("the agent loop rewrote its answer; the trainer computes its log-probs")
            return None
        scores = ResponseScores.empty(len(response))
        for part, answer, (first, count) in zip(self._parts, answers, places, strict=True):
            if not count:
                continue
            if isinstance(answer, Unscored):
                logger.warning("a trajectory goes to the trainer without log-probs: %s", answer)
                return None
            if isinstance(answer, BaseException):
                raise answer
            scores = scores.with_part(answer, first, count, len(prompt) + first - len(part.context))
        return scores

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()


async def score(client: ScoringClient, part: Part, start: int) -> Answer:
    """Have a log-prob server score one part of a trajectory; ``start`` means the same as for `PartScorer`.

    Raises:
        Unscored: no server answered in time, or the scores have a wrong shape or are not finite.
    """
    tokens = np.asarray([*part.context, *part.tokens], dtype=np.int32)
    answer = await client.score(Segment(tokens, len(part.context)), len(tokens), part.version, start)
    found, wanted = np.shape(answer.scores), (2, len(part.tokens))
    if found != wanted or not np.isfinite(answer.scores).all():
        what = "are not all finite" if found == wanted else f"have shape {found} instead of {wanted}"
        raise Unscored(f"a log-prob server's scores of version {answer.version} {what}")
    return answer

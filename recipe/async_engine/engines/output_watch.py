# SPDX-License-Identifier: Apache-2.0
"""Keeps the newest output of each request in an engine, so that clients can fetch tokens before an answer ends.

Contract: each fetch of a client gets all tokens that were sampled since the client's last fetch, so the client has
these tokens even if the server dies later (`recipe.async_engine.engines.answers`). Shown by
tests/integration/test_client.py.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from recipe.async_engine.core.versions import RequestVersions, last_runs
from recipe.async_engine.engines.answers import Sampled
from recipe.async_engine.record.activity import EngineActivity


@dataclass(frozen=True, slots=True)
class Answer:
    """The content of an engine's output, in the same form for every engine.

    ``log_probs`` has an entry for each of ``token_ids``, in the engine's own format, or is None if none were requested.
    ``prompt_tokens`` is the length of the prompt. If the request continues an interrupted answer, the tokens from
    before the interruption are not counted.
    """

    token_ids: Sequence[int]
    log_probs: Sequence[Any] | None
    prompt_tokens: int
    finished: bool


class OutputWatch:
    """Keeps the newest output of each request in an engine, and reports all outputs to ``activity``.

    A subclass wraps the engine's ``generate``, and reads the engine's outputs.
    """

    def __init__(self, activity: EngineActivity) -> None:
        self._activity = activity
        self._newest: dict[str, Any] = {}
        self._before: dict[str, int] = {}

    def read(self, output: Any) -> Answer | None:
        """Convert an engine's output to an `Answer`; return None if the output contains no generated sequence."""
        raise NotImplementedError

    def log_prob(self, of_token: Any, token: int) -> float:
        """Return the log-prob of the token id ``token`` from ``of_token``, the token's entry in `Answer.log_probs`."""
        raise NotImplementedError

    def experts(self, request_id: str, known: int, sampled: int) -> np.ndarray | None:
        """Return the rows of chosen experts for the tokens from index ``known`` to index ``sampled - 1`` of an answer.

        `joined_experts` says which rows belong to a token. The result is None if the engine returns no experts.
        """
        return None

    @contextmanager
    def _request(self, request_id: str, before: int) -> Iterator[None]:
        """Watch a request while it is in the engine.

        If the request continues an interrupted answer, ``before`` is the number of tokens from before the interruption;
        otherwise it is 0.
        """
        self._activity.enter(request_id)
        self._before[request_id] = before
        try:
            yield
        finally:
            self._newest.pop(request_id, None)
            self._before.pop(request_id, None)
            self._activity.leave(request_id)

    def asked_tokens(self, request_id: str) -> int:
        """Return the number of tokens in a request: those of the prompt, and those of the answer that it continues.

        The result is 0 until the engine has returned the first output for the request.
        """
        answer = self._answer(request_id)
        return 0 if answer is None else answer.prompt_tokens + self._before[request_id]

    def since(self, request_id: str, known: int, versions: RequestVersions) -> Sampled | None:
        """Return the tokens of an answer after the first ``known`` ones, or None if the answer is complete.

        The result is an empty `Sampled` if the engine has no output for the request yet, or if the version that sampled
        one of its tokens is unknown.

        A complete answer is already in transit to the client. If this method returned its tokens too, the client might
        treat the answer as incomplete, and request tokens beyond its end.
        """
        answer = self._answer(request_id)
        if answer is None:
            return Sampled([], [], None)
        if answer.finished:
            return None
        runs = versions.runs(request_id, len(answer.token_ids))
        if runs is None:
            return Sampled([], [], None)
        tokens, log_probs = list(answer.token_ids[known:]), None
        if answer.log_probs is not None:
            log_probs = [self.log_prob(answer.log_probs[known + n], token) for n, token in enumerate(tokens)]
        experts = self.experts(request_id, known, len(answer.token_ids))
        return Sampled(tokens, last_runs(runs, len(tokens)), log_probs, experts)

    def _answer(self, request_id: str) -> Answer | None:
        output = self._newest.get(request_id)
        return None if output is None else self.read(output)

# SPDX-License-Identifier: Apache-2.0
"""Keeps the newest output of each request in a vLLM engine, so that clients can fetch tokens before an answer ends.

Contract: a client that fetches tokens gets all those that were sampled since its last fetch
(`recipe.async_engine.engines.answers`), and still has them if the server dies. Shown by
tests/integration/test_client.py.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import numpy as np

from recipe.async_engine.core.cuts import sampled_before
from recipe.async_engine.core.versions import RequestVersions, last_runs
from recipe.async_engine.engines.answers import Sampled
from recipe.async_engine.record.activity import EngineActivity


class OutputWatch:
    """Keeps the newest output of each request in an engine, and reports all outputs to ``activity``."""

    def __init__(self, activity: EngineActivity) -> None:
        self._activity = activity
        self._newest: dict[str, Any] = {}
        self._before: dict[str, int] = {}

    def watching(self, generate: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., AsyncGenerator[Any, None]]:
        """Wrap an engine's ``generate`` to record each output before it is yielded.

        The wrapper has parameters with the same names and order, because verl passes all arguments by name, and vLLM's
        HTTP endpoints pass the first three by position.
        """

        async def watched(
            prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
        ) -> AsyncGenerator[Any, None]:
            self._activity.enter(request_id)
            self._before[request_id] = len(sampled_before(sampling_params))
            try:
                # If the caller stops iterating, close the generator at once, so that the engine aborts the request.
                async with aclosing(generate(prompt, sampling_params, request_id, **kwargs)) as outputs:
                    async for output in outputs:
                        self._newest[request_id] = output
                        if output.outputs:
                            self._activity.output(request_id, len(output.outputs[0].token_ids))
                        yield output
            finally:
                self._newest.pop(request_id, None)
                self._before.pop(request_id, None)
                self._activity.leave(request_id)

        return watched

    def asked_tokens(self, request_id: str) -> int:
        """Return the number of tokens in a request: its prompt, and answer tokens sampled before an interruption.

        The result is 0 before the first output for the request.
        """
        output = self._newest.get(request_id)
        return 0 if output is None else len(output.prompt_token_ids or ()) + self._before[request_id]

    def since(self, request_id: str, known: int, versions: RequestVersions, processor: Any) -> Sampled | None:
        """Return the tokens of an answer after the first ``known`` ones, possibly none, or None if it is complete.

        ``processor`` is vLLM's output processor, which has the experts that were chosen for the tokens.

        A complete answer is already in transit to the client. If this method returned its tokens too, the client might
        treat the answer as incomplete, and request tokens beyond its end.
        """
        output = self._newest.get(request_id)
        if output is None or not output.outputs:
            return Sampled([], [], None)
        if output.finished:
            return None
        answer = output.outputs[0]
        runs = versions.runs(request_id, len(answer.token_ids))
        if runs is None:
            return Sampled([], [], None)
        tokens, log_probs = list(answer.token_ids[known:]), None
        if answer.logprobs is not None:
            log_probs = [answer.logprobs[known + n][token].logprob for n, token in enumerate(tokens)]
        experts = self._experts(request_id, known, len(answer.token_ids), processor)
        return Sampled(tokens, last_runs(runs, len(tokens)), log_probs, experts)

    @staticmethod
    def _experts(request_id: str, known: int, sampled: int, processor: Any) -> np.ndarray | None:
        """Return the rows (`joined_experts`) that the tokens from ``known`` to ``sampled`` add; None without experts.

        vLLM returns them only with a complete answer, but its output processor collects them until then.
        """
        names = processor.external_req_ids.get(request_id, ())
        states = [processor.request_states[name] for name in names if name in processor.request_states]
        chunks = [chunk for state in states for chunk in state.routed_experts_chunks]
        if not chunks:
            return None
        # The first chunk has the rows of the first token, and the chunks may be ahead of the newest output.
        first = len(chunks[0])
        return np.concatenate(chunks)[first + known - 1 if known else 0 : first + sampled - 1]

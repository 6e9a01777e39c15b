# SPDX-License-Identifier: Apache-2.0
"""Watches the outputs of a vLLM engine. `recipe.async_engine.engines.output_watch` has the contract."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import numpy as np

from recipe.async_engine.core.cuts import sampled_before
from recipe.async_engine.engines.output_watch import Answer, OutputWatch


class VLLMOutputs(OutputWatch):
    """Keeps the newest output of each request in a vLLM engine.

    ``processor`` is vLLM's output processor. vLLM returns the experts that its routers chose only together with a
    complete answer. Until then ``processor`` collects them, so they can be read from there.
    """

    processor: Any

    def watching(self, generate: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., AsyncGenerator[Any, None]]:
        """Wrap an engine's ``generate`` to record each output before it is yielded.

        The names and the order of the parameters stay as in ``generate``, because verl passes all arguments by name,
        and vLLM's HTTP endpoints pass the first three by position.
        """

        async def watched(
            prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
        ) -> AsyncGenerator[Any, None]:
            with self._request(request_id, len(sampled_before(sampling_params))):
                # If the caller stops iterating, close the generator at once, so that the engine aborts the request.
                async with aclosing(generate(prompt, sampling_params, request_id, **kwargs)) as outputs:
                    async for output in outputs:
                        self._newest[request_id] = output
                        if output.outputs:
                            self._activity.output(request_id, len(output.outputs[0].token_ids))
                        yield output

        return watched

    def read(self, output: Any) -> Answer | None:
        if not output.outputs:
            return None
        answer = output.outputs[0]
        return Answer(answer.token_ids, answer.logprobs, len(output.prompt_token_ids or ()), output.finished)

    def log_prob(self, of_token: Any, token: int) -> float:
        found: float = of_token[token].logprob
        return found

    def experts(self, request_id: str, known: int, sampled: int) -> np.ndarray | None:
        names = self.processor.external_req_ids.get(request_id, ())
        states = [self.processor.request_states[name] for name in names if name in self.processor.request_states]
        chunks = [chunk for state in states for chunk in state.routed_experts_chunks]
        if not chunks:
            return None
        # A chunk has a row of experts for each token that the engine has read. The first chunk has the prompt's rows
        # (`joined_experts`). The last rows may belong to tokens that the newest output does not have yet.
        first = len(chunks[0])
        return np.concatenate(chunks)[first + known - 1 if known else 0 : first + sampled - 1]

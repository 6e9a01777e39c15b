# SPDX-License-Identifier: Apache-2.0
"""Watches the outputs of a vLLM engine. `recipe.async_engine.engines.output_watch` has the contract."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from recipe.async_engine.core.cuts import sampled_before
from recipe.async_engine.engines.output_watch import Answer, OutputWatch


class VLLMOutputs(OutputWatch):
    """Keeps the newest output of each request in a vLLM engine."""

    def watching(self, generate: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., AsyncGenerator[Any, None]]:
        """Wrap an engine's ``generate`` to record each output before it is yielded.

        The wrapper has parameters with the same names and order, because verl passes all arguments by name, and vLLM's
        HTTP endpoints pass the first three by position.
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

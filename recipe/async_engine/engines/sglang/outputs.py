# SPDX-License-Identifier: Apache-2.0
"""Watches the outputs of an SGLang engine. `recipe.async_engine.engines.output_watch` has the contract."""

from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing
from typing import Any

from recipe.async_engine.core.cuts import SAMPLED
from recipe.async_engine.engines.output_watch import Answer, OutputWatch


class SGLangOutputs(OutputWatch):
    """Keeps the newest output of each request in an SGLang engine."""

    @property
    def requests(self) -> Collection[str]:
        """The ids of all requests that are in the engine."""
        return self._before.keys()

    def watching(self, manager: Any, is_ours: Callable[[str], bool]) -> Callable[..., AsyncGenerator[Any, None]]:
        """Wrap ``manager.generate_request`` to record each output.

        verl asks for one output, the whole answer. The wrapper makes SGLang send each token when it is sampled, and
        yields only the last output of a request for which ``is_ours`` is true. Outputs of other requests, which came
        over HTTP, are passed on as they are.
        """
        generate = manager.generate_request

        async def watched(obj: Any, request: Any = None) -> AsyncGenerator[Any, None]:
            if not isinstance(obj.rid, str) or not is_ours(obj.rid):
                async with aclosing(generate(obj, request)) as outputs:
                    async for output in outputs:
                        yield output
                return
            obj.stream = True
            before = (obj.sampling_params.get("custom_params") or {}).get(SAMPLED, [])
            finished = False
            with self._request(obj.rid, len(before)):
                try:
                    async with aclosing(generate(obj, request)) as outputs:
                        async for output in outputs:
                            known = self._newest.get(obj.rid)
                            # If SGLang aborts a request in its queue, the output has only the answer's last token.
                            if known and len(known["output_ids"]) > len(output["output_ids"]):
                                output = {**output, "output_ids": list(known["output_ids"])}
                            self._newest[obj.rid] = output
                            self._activity.output(obj.rid, len(output["output_ids"]))
                            finished = output["meta_info"].get("finish_reason") is not None
                finally:
                    if not finished:
                        manager.abort_request(obj.rid)
                last = self._newest[obj.rid]
            # verl takes only this output and leaves the generator open, so `_request` has to end before the `yield`.
            yield last

        return watched

    def read(self, output: Any) -> Answer | None:
        about = output["meta_info"]
        log_probs = about.get("output_token_logprobs")
        finished = about.get("finish_reason") is not None
        return Answer(output["output_ids"], log_probs, about.get("prompt_tokens", 0), finished)

    def log_prob(self, of_token: Any, token: int) -> float:
        return float(of_token[0])

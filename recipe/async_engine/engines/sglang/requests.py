# SPDX-License-Identifier: Apache-2.0
"""Refuses requests of which SGLang's engine would die, whether they come through the Ray actor or over HTTP."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from recipe.async_engine.core.errors import RequestFailed

NEED_TOKENIZER = ("min_new_tokens", "stop", "stop_regex")
"""Sampling parameters with which SGLang's scheduler uses the tokenizer, and dies if it has none."""


def refuse_what_needs_a_tokenizer(manager: Any) -> None:
    """Make ``manager.generate_request`` raise RequestFailed for parameters that the engine cannot obey."""
    generate = manager.generate_request

    async def checked(obj: Any, request: Any = None) -> AsyncGenerator[Any, None]:
        given = obj.sampling_params if isinstance(obj.sampling_params, list) else [obj.sampling_params]
        for name in NEED_TOKENIZER:
            if manager.tokenizer is None and any((parameters or {}).get(name) for parameters in given):
                raise RequestFailed(
                    f"{name}: SGLang needs its tokenizer for this sampling parameter; set "
                    "actor_rollout_ref.rollout.skip_tokenizer_init=false, or remove it"
                )
        async with aclosing(generate(obj, request)) as outputs:
            async for output in outputs:
                yield output

    manager.generate_request = checked

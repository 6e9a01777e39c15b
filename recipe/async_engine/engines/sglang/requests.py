# SPDX-License-Identifier: Apache-2.0
"""Checks requests to SGLang's engine, whether they come through the Ray actor or over HTTP, and sets priorities."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

from recipe.async_engine.core.errors import RequestFailed

NEED_TOKENIZER = ("min_new_tokens", "stop", "stop_regex")
"""Sampling parameters with which SGLang's scheduler uses the tokenizer, and dies if it has none."""
BY_PRIORITY = {
    "enable_priority_scheduling": True,
    "schedule_low_priority_values_first": True,
    "disable_priority_preemption": True,
    "default_priority_value": 0,
    "schedule_policy": "fcfs",
}
"""SGLang's arguments with which ``rollout.scheduling_policy=priority`` has the same meaning as in vLLM."""

priority: ContextVar[int | None] = ContextVar("priority", default=None)
"""The priority of requests that the current task makes; None if the engine serves requests in the order of arrival."""


def checking(manager: Any) -> Any:
    """Wrap ``manager.generate_request`` to set the priority of each request.

    If the engine has no tokenizer, sampling parameters that need one would end the engine. For these the wrapper raises
    RequestFailed.
    """
    generate = manager.generate_request

    async def checked(obj: Any, request: Any = None) -> AsyncGenerator[Any, None]:
        given = obj.sampling_params if isinstance(obj.sampling_params, list) else [obj.sampling_params]
        for name in NEED_TOKENIZER:
            if manager.tokenizer is None and any((parameters or {}).get(name) for parameters in given):
                raise RequestFailed(
                    f"{name}: SGLang needs its tokenizer for this sampling parameter; set "
                    "actor_rollout_ref.rollout.skip_tokenizer_init=false, or remove the parameter"
                )
        if priority.get() is not None:
            obj.priority = priority.get()
        async with aclosing(generate(obj, request)) as outputs:
            async for output in outputs:
                yield output

    return checked

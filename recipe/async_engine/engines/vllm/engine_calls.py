# SPDX-License-Identifier: Apache-2.0
"""Calls to a rollout server's engine, which has several cores if ``rollout.data_parallel_size`` is above 1.

Contract: each call reaches every core, returns the answer of each, and fails if one of them fails. vLLM's own calls
return only the first core's answer (`DPLBAsyncMPClient.call_utility_async`), which would lose the other cores' token
counts at a swap and their errors in a weight load.

Shown by tests/integration/test_engine_calls.py and, with two real cores under load, tests/e2e/test_swaps.py.
"""

import asyncio
from typing import Any, Literal


async def call_each_core(engine: Any, method: str, *args: Any) -> list[Any]:
    """Return each core's answer to a utility call of vLLM's ``AsyncLLM``."""
    client = engine.engine_core
    calls = [client._call_utility_async(method, *args, engine=core) for core in client.core_engines]
    return list(await asyncio.gather(*calls))


async def call_each_worker(engine: Any, method: str, *args: Any) -> list[Any]:
    """Return the answer of each worker of each core; ``AsyncLLM.collective_rpc`` returns only one core's."""
    of_cores = await call_each_core(engine, "collective_rpc", method, None, args, None)
    return [answer for of_core in of_cores for answer in of_core]


async def pause(engine: Any, mode: Literal["abort", "keep"]) -> None:
    """Pause generation like ``AsyncLLM.pause_generation``, without its sleep of 20 ms for remaining answers.

    A caller that needs those answers must wait for them. No cache is cleared.
    """
    await call_each_core(engine, "pause_scheduler", mode, False)


async def drop_computed(engine: Any) -> None:
    """Drop what the old weights computed: encoder outputs and the KV cache, including that of held requests.

    Preprocessed images, which no weight has touched, are kept. vLLM's own method drops them both in the frontend and in
    the cores; a request on its way between the two would then refer to an image that its core no longer has, and fail.
    """
    # Both arguments are True: reset the cache of running requests and of connectors too.
    if not all(await call_each_core(engine, "reset_prefix_cache", True, True)):
        raise RuntimeError("vLLM did not drop the KV cache that the previous weights computed")
    await call_each_core(engine, "reset_encoder_cache")

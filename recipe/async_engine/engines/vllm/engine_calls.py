# SPDX-License-Identifier: Apache-2.0
"""Calls to a rollout server's engine, which has several vLLM engine cores if ``rollout.data_parallel_size`` > 1.

Contract: each call reaches every core, returns the result of each core, and fails if any core fails. With vLLM's own
calls, which return only the first core's result (`DPLBAsyncMPClient.call_utility_async`), the other cores' token counts
at a swap and their errors in a weight load would be lost. Shown by tests/integration/test_engine_calls.py and, with two
real cores under load, tests/e2e/test_swaps.py.
"""

import asyncio
from typing import Any, Literal


async def call_each_core(engine: Any, method: str, *args: Any) -> list[Any]:
    """Call a utility method of every engine core of an ``AsyncLLM``, and return the results of all cores."""
    client = engine.engine_core
    calls = [client._call_utility_async(method, *args, engine=core) for core in client.core_engines]
    return list(await asyncio.gather(*calls))


async def call_each_worker(engine: Any, method: str, *args: Any) -> list[Any]:
    """Call a method of every worker of every engine core of an ``AsyncLLM``, and return all results."""
    of_cores = await call_each_core(engine, "collective_rpc", method, None, args, None)
    return [answer for of_core in of_cores for answer in of_core]


async def pause(engine: Any, mode: Literal["abort", "keep"]) -> None:
    """Pause generation like ``AsyncLLM.pause_generation``, but without clearing caches or sleeping for 20 ms.

    vLLM sleeps to let the remaining answers arrive. A caller of this function that needs these answers has to wait for
    them itself.
    """
    await call_each_core(engine, "pause_scheduler", mode, False)


async def drop_computed(engine: Any) -> None:
    """Drop everything that the old weights computed: encoder outputs and the KV cache, also that of paused requests.

    Preprocessed images, which do not depend on weights, are kept. vLLM's own method drops the images too. A request on
    its way from vLLM's frontend to a core could then refer to a dropped image, and fail.
    """
    # The two True arguments also reset the KV cache of running requests and of KV connectors.
    if not all(await call_each_core(engine, "reset_prefix_cache", True, True)):
        raise RuntimeError("vLLM did not drop the KV cache that the previous weights computed")
    await call_each_core(engine, "reset_encoder_cache")

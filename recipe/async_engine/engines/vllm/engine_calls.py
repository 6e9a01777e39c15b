# SPDX-License-Identifier: Apache-2.0
"""Calls to a rollout server's engine, which has several cores where ``rollout.data_parallel_size`` is above 1.

Contract: each call reaches every core, returns what each of them answers, and fails if one of them fails. vLLM's own
calls return the first core's answer alone (`DPLBAsyncMPClient.call_utility_async`): the tokens that the others have at
a swap, and what went wrong with their weights, would be lost.

Shown by tests/integration/test_engine_calls.py and, with two real cores under load, tests/e2e/test_swaps.py.
"""

import asyncio
from typing import Any, Literal


async def of_each_core(engine: Any, method: str, *args: Any) -> list[Any]:
    """What each core of vLLM's ``AsyncLLM`` answers to a utility call."""
    client = engine.engine_core
    calls = [client._call_utility_async(method, *args, engine=core) for core in client.core_engines]
    return list(await asyncio.gather(*calls))


async def of_each_worker(engine: Any, method: str, *args: Any) -> list[Any]:
    """What each worker of each core answers; as ``AsyncLLM.collective_rpc``, which asks for no other core's."""
    of_cores = await of_each_core(engine, "collective_rpc", method, None, args, None)
    return [answer for of_core in of_cores for answer in of_core]


async def pause(engine: Any, mode: Literal["abort", "keep"]) -> None:
    """As ``AsyncLLM.pause_generation``, which then sleeps for 20 ms so that most answers are out when it returns.

    Whoever needs them waits for them. No cache is cleared.
    """
    await of_each_core(engine, "pause_scheduler", mode, False)


async def forget_computed(engine: Any) -> None:
    """Drop what the weights have computed: keys and values, also of requests that are held, and encoders' outputs.

    What becomes of images before any weight touches them is kept. vLLM's own way drops that as well, where it is made
    and in the cores, and a request that is between the two meanwhile fails: it names what its core has no more.
    """
    # Of running requests and of connectors too.
    if not all(await of_each_core(engine, "reset_prefix_cache", True, True)):
        raise RuntimeError("vLLM did not drop the keys and values that the weights before have computed")
    await of_each_core(engine, "reset_encoder_cache")

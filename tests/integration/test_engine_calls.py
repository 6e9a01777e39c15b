# SPDX-License-Identifier: Apache-2.0
"""What each core of an engine answers is known, not the first one's alone. vLLM's client is real, without its cores."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core_client import DPLBAsyncMPClient

from recipe.async_engine.engines.vllm.engine_calls import call_each_core, call_each_worker, drop_computed, pause


class Cores(DPLBAsyncMPClient):
    """A client of two cores: ``answers`` has what each answers, by the method; an exception is raised."""

    def __init__(self, **answers: list[Any]) -> None:
        self.core_engines = [b"0", b"1"]
        self.answers, self.asked = answers, []
        self.resources = None

    def __del__(self) -> None: ...

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        self.asked.append((engine, method, *args))
        await asyncio.sleep(0)
        answer = self.answers[method][int(engine)]
        if isinstance(answer, Exception):
            raise answer
        return answer


def engine_of(**answers: list[Any]) -> Any:
    return SimpleNamespace(engine_core=Cores(**answers))


async def test_every_core_is_heard_where_vllm_itself_gives_the_first_ones_answer() -> None:
    engine = engine_of(collective_rpc=[[{"a": 3}, {"a": 3}], [{"b": 5}, {"b": 5}]])
    assert await engine.engine_core.collective_rpc_async("swap_staged", args=(4,)) == [{"a": 3}, {"a": 3}]
    assert await call_each_worker(engine, "swap_staged", 4) == [{"a": 3}, {"a": 3}, {"b": 5}, {"b": 5}]
    # Both are asked by the same messages.
    assert engine.engine_core.asked[:2] == engine.engine_core.asked[2:]
    assert engine.engine_core.asked[0] == (b"0", "collective_rpc", "swap_staged", None, (4,), None)


async def test_failure_of_any_core_is_everybodys() -> None:
    engine = engine_of(pause_scheduler=[None, RuntimeError("of the second core")])
    with pytest.raises(RuntimeError, match="of the second core"):
        await pause(engine, "keep")


async def test_all_that_weights_have_computed_is_dropped_in_each_core_and_no_input_is() -> None:
    engine = engine_of(reset_prefix_cache=[True, True], reset_encoder_cache=[None, None])
    await drop_computed(engine)
    assert {method for _, method, *_ in engine.engine_core.asked} == {"reset_prefix_cache", "reset_encoder_cache"}
    assert len(engine.engine_core.asked) == 4
    refusing = engine_of(reset_prefix_cache=[True, False], reset_encoder_cache=[None, None])
    with pytest.raises(RuntimeError, match="did not drop the KV cache"):
        await drop_computed(refusing)


async def test_engine_with_one_core_is_asked_as_it_asks_itself() -> None:
    engine = engine_of(is_scheduler_paused=[True])
    engine.engine_core.core_engines = [b"0"]
    assert await call_each_core(engine, "is_scheduler_paused") == [True]

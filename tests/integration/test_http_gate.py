# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The gate over HTTP with the real server class, below a small application; vLLM's own in tests/e2e."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from test_server_gate import SOON, load, make_server, settle  # noqa: F401 - a fixture

from recipe.async_engine.rollout.http_gate import HttpGate, guard


class Client:
    """Requests to an application behind the gate of ``server``."""

    def __init__(self, server: Any) -> None:
        self.reached = 0
        assert guard(server) == "recipe.async_engine.rollout.http_gate.HttpGate"
        self._http = httpx.AsyncClient(transport=httpx.ASGITransport(HttpGate(self._app)), base_url="http://server")

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    def request(self, method: str = "POST", path: str = "/v1/completions") -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self._http.request(method, path, json={}))


async def test_request_before_the_first_weights_waits_for_them(make_server: Any) -> None:  # noqa: F811
    server = make_server()
    client = Client(server)
    waiting = client.request()
    await settle()
    assert (waiting.done(), client.reached) == (False, 0)
    await load(server, 0)
    assert (await asyncio.wait_for(waiting, SOON)).status_code == 200


async def test_request_that_waits_too_long_gets_503_and_the_setting(make_server: Any) -> None:  # noqa: F811
    client = Client(make_server(first_weights_s=0.02))
    answer = await client.request()
    assert answer.status_code == 503
    assert "async_training.timeouts.first_weights" in answer.json()["error"]["message"]
    assert client.reached == 0


@pytest.mark.parametrize("path", ["/resume", "/wake_up", "/v1/chat/completions"])
async def test_calls_that_wake_or_resume_open_nothing(path: str, make_server: Any) -> None:  # noqa: F811
    client = Client(make_server(first_weights_s=0.02))
    assert (await client.request("POST", path)).status_code == 503
    assert client.reached == 0


async def test_what_only_reads_needs_no_weights(make_server: Any) -> None:  # noqa: F811
    client = Client(make_server(first_weights_s=0.02))
    assert (await client.request("GET", "/health")).status_code == 200


async def test_request_waits_through_a_pause_and_a_load(make_server: Any) -> None:  # noqa: F811
    server = make_server()
    await load(server, 0)
    client = Client(server)
    await server.abort_all_requests()
    waiting = client.request()
    await settle()
    await server.begin_load(1)
    await server.resume_generation()
    await settle()
    assert (waiting.done(), client.reached) == (False, 0), "version 1 is half loaded"
    await server.set_global_steps(1)
    assert (await asyncio.wait_for(waiting, SOON)).status_code == 200


async def test_server_that_left_routing_or_stays_paused_says_so(make_server: Any) -> None:  # noqa: F811
    server = make_server(pause_s=0.02)
    await load(server, 0)
    client = Client(server)
    await server.abort_all_requests()
    answer = await client.request()
    assert (answer.status_code, client.reached) == (503, 0)
    assert "was paused for 0.02 s" in answer.json()["error"]["message"]
    await server.leave_routing()
    assert "ask another one" in (await client.request()).json()["error"]["message"]

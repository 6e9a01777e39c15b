# SPDX-License-Identifier: Apache-2.0
"""The gate over HTTP with the real server class, below a small application; vLLM's own in tests/e2e."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_server_gate import SOON, load, make_server, settle  # noqa: F401 - a fixture

from recipe.async_engine.engines.http_gate import CHANGING, SERVED, HttpGate, guard


class Client:
    """Requests to an application behind the gate of ``server``."""

    def __init__(self, server: Any) -> None:
        self.reached = 0
        assert guard(server.admit) == "recipe.async_engine.engines.http_gate.HttpGate"
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


async def test_call_that_would_generate_opens_nothing(make_server: Any) -> None:  # noqa: F811
    client = Client(make_server(first_weights_s=0.02))
    assert (await client.request("POST", "/v1/chat/completions")).status_code == 503
    assert client.reached == 0


def offered_by_vllm() -> set[tuple[str, str]]:
    """Method and path of every endpoint that the sources of the installed vLLM declare, development mode included."""
    package = Path(importlib.util.find_spec("vllm").origin).parent
    declared = re.compile(r'@(?:router|app)\.(post|put|delete|patch|websocket)\(\s*"([^"]+)"')
    sources = [path.read_text() for path in (package / "entrypoints").rglob("*.py")]
    return {found for source in sources for found in declared.findall(source)}


async def test_what_vllm_offers_beyond_generation_is_refused_also_with_weights(make_server: Any) -> None:  # noqa: F811
    server = make_server()
    await load(server, 0)
    client = Client(server)
    offered = {(method.upper(), path) for method, path in offered_by_vllm() if method != "websocket"}
    harmful = {"/scale_elastic_ep", "/sleep", "/wake_up", "/collective_rpc", "/pause", "/resume", "/abort_requests"}
    harmful |= {"/reset_prefix_cache", "/start_profile", "/v1/load_lora_adapter", "/update_weights"}
    assert harmful < {path for _, path in offered}, "this test knows the endpoints of another vLLM"
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize"} < {path for _, path in offered}
    for method, path in offered:
        before = client.reached
        answer = await client.request(method, path)
        assert (answer.status_code, client.reached - before) == ((200, 1) if path in SERVED else (403, 0)), path
    assert not harmful & SERVED
    assert all(path.startswith(("/v1/", "/inference/", "/tokenize", "/detokenize", "/classify")) for path in SERVED)


@pytest.mark.parametrize("path", ["/sleep/", "//sleep", "/v1/../sleep", "/SLEEP", "/v1/completions/", "/no_such"])
async def test_path_in_another_spelling_is_refused(path: str, make_server: Any) -> None:  # noqa: F811
    server = make_server()
    await load(server, 0)
    client = Client(server)
    scope = {"type": "http", "method": "POST", "path": path}
    assert await sent_by(client, scope) == ["http.response.start", "http.response.body"]
    assert client.reached == 0


async def test_websocket_is_refused(make_server: Any) -> None:  # noqa: F811
    server = make_server()
    await load(server, 0)
    client = Client(server)
    assert ("websocket", "/v1/realtime") in offered_by_vllm()
    assert await sent_by(client, {"type": "websocket", "path": "/v1/realtime"}) == ["websocket.close"]
    assert client.reached == 0


async def sent_by(client: Client, scope: dict[str, Any]) -> list[str]:
    """Types of the messages with which the gate answers a request that no HTTP client would send so."""
    sent: list[str] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message["type"])

    await HttpGate(client._app)(scope, None, send)
    return sent


async def test_what_only_reads_needs_no_weights(make_server: Any) -> None:  # noqa: F811
    client = Client(make_server(first_weights_s=0.02))
    assert (await client.request("GET", "/health")).status_code == 200


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
async def test_endpoints_of_sglang_that_act_by_get_too_are_refused(make_server: Any) -> None:  # noqa: F811
    import verl.workers.config  # noqa: F401  # It prepares a CPU for SGLang.
    from verl.workers.rollout.sglang_rollout.async_sglang_server import app

    offered = [(route.path, getattr(route, "methods", None) or ()) for route in app.routes]
    both = {path for path, methods in offered if {"GET", "POST"} <= set(methods)}
    assert "/release_memory_occupation" in both
    assert both <= CHANGING <= {path for path, _ in offered}
    client = Client(make_server())
    for path in CHANGING:
        assert (await client.request("GET", path)).status_code == 403
    assert client.reached == 0


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
    assert "waited 0.02 s at a paused rollout server" in answer.json()["error"]["message"]
    await server.leave_routing()
    assert "ask another one" in (await client.request()).json()["error"]["message"]

# SPDX-License-Identifier: Apache-2.0
"""Middleware that makes HTTP requests to an engine wait for complete weights, as requests through the Ray actor do.

Contract: requests that only read (GET, HEAD, OPTIONS) pass at once, unless their endpoint is in ``CHANGING``. All other
requests may use only the endpoints in ``SERVED``, which generate, score or count tokens and change nothing. They wait
when a request through the Ray actor would wait: until the first complete weights are loaded, during a load, and during
a pause. If a request waits too long, or if the server has left the load balancer, the request gets status 503 with the
reason. A request to an endpoint outside ``SERVED`` (to sleep, pause, scale, load weights or adapters, or call workers)
gets status 403, and WebSockets are refused. Shown by tests/integration/test_http_gate.py and, with the real servers,
tests/e2e/test_replacement.py and tests/integration/test_sglang_server.py.
"""

import json
from collections.abc import Awaitable, Callable
from typing import Any

from recipe.async_engine.core.errors import RecipeError

HARMLESS = ("GET", "HEAD", "OPTIONS")
SERVED = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/inference/v1/generate",
        "/tokenize",
        "/detokenize",
        # Reward models use these two (verl/experimental/reward_loop/reward_loop.py:238-265).
        "/classify",
        "/v1/embeddings",
    }
)
CHANGING = frozenset(
    {
        *("/flush_cache", "/clear_hicache_storage_backend", "/release_memory_occupation", "/resume_memory_occupation"),
        *("/start_profile", "/stop_profile", "/set_trace_level", "/freeze_gc", "/slow_down", "/configure_logging"),
        *(f"/{verb}_expert_distribution_record" for verb in ("start", "stop", "dump")),
        *("/open_session", "/close_session", "/get_weights_by_name", "/health_generate"),
    }
)
"""Endpoints of SGLang that accept GET requests although they change or occupy the engine."""
WEBSOCKET_REFUSED = 1008
ASGIApp = Callable[[Any, Any, Any], Awaitable[None]]


_admit: Callable[[], Awaitable[None]] | None = None


def guard(admit: Callable[[], Awaitable[None]]) -> str:
    """Make HTTP requests to this process wait for ``admit``, which raises RecipeError to refuse a request.

    Returns:
        The import path of `HttpGate`, from which vLLM loads the middleware.
    """
    global _admit
    _admit = admit
    return f"{__name__}.{HttpGate.__name__}"


class HttpGate:
    """ASGI middleware that passes, delays or refuses requests by the rules in the module's docstring."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": WEBSOCKET_REFUSED, "reason": "not offered"})
            return
        if scope["type"] == "http" and (scope["method"] not in HARMLESS or scope["path"] in CHANGING):
            if scope["path"] not in SERVED:
                await _refuse(send, 403, "PermissionError", f"a rollout server does not offer {scope['path']}")
                return
            assert _admit is not None, "guard() must be called before the application is created"
            try:
                await _admit()
            except RecipeError as error:
                await _refuse(send, 503, "ServiceUnavailableError", str(error))
                return
        await self._app(scope, receive, send)


async def _refuse(send: Any, status: int, kind: str, why: str) -> None:
    body = json.dumps({"error": {"message": why, "type": kind, "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

# SPDX-License-Identifier: Apache-2.0
"""Middleware that makes HTTP requests to an engine wait for complete weights, like other requests to a server.

Contract: requests that only read (GET, HEAD, OPTIONS) pass, except to the engine's commands. Other requests may use
only the endpoints in ``SERVED``, which generate, score or count tokens and change nothing. A request to any other
endpoint (to sleep, pause, scale, load weights or adapters, or call workers) gets status 403, and WebSockets are
refused. A request to an endpoint in ``SERVED`` waits when a request through the Ray actor would wait: until the first
complete weights are loaded, during a load, and during a pause. If a request waits too long, or if the server has left
the load balancer, the request gets status 503 with the reason. Shown by tests/integration/test_http_gate.py and, with
the real servers, tests/e2e/test_replacement.py and tests/integration/test_sglang_server.py.
"""

import json
from collections.abc import Awaitable, Callable, Collection
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
WEBSOCKET_REFUSED = 1008
ASGIApp = Callable[[Any, Any, Any], Awaitable[None]]


_admit: Callable[[], Awaitable[None]] | None = None
_commands: Collection[str] = ()


def guard(admit: Callable[[], Awaitable[None]], commands: Collection[str] = ()) -> str:
    """Make HTTP requests to this process wait for ``admit``, which raises RecipeError to refuse a request.

    ``commands`` are paths at which even a GET request changes something, so that they are always refused.

    Returns:
        The import path of `HttpGate`, from which vLLM loads the middleware.
    """
    global _admit, _commands
    _admit, _commands = admit, commands
    return f"{__name__}.{HttpGate.__name__}"


class HttpGate:
    """ASGI middleware that passes, delays or refuses requests by the rules in the module's docstring."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": WEBSOCKET_REFUSED, "reason": "not offered"})
            return
        if scope["type"] == "http" and (scope["method"] not in HARMLESS or scope["path"] in _commands):
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

# SPDX-License-Identifier: Apache-2.0
"""The gate of a rollout server over its HTTP endpoints, as middleware of vLLM's application.

Contract: what reads (GET, HEAD, OPTIONS) passes. Of what else vLLM offers, only the endpoints in ``SERVED`` are there,
which generate, score or count tokens and change nothing; whatever else a version of vLLM has or will have (to sleep, to
pause, to scale, to load weights or adapters, to call its workers) is answered with status 403, and WebSockets are
refused. A request that passes waits like one over the actor's interface: for the first complete weights, through a
load, and through a pause; what waits too long, or finds a server that has left routing, is answered with status 503 and
the reason. Shown by tests/integration/test_http_gate.py and, with the real server, tests/e2e/test_replacement.py.
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
        # Of a reward model (verl/experimental/reward_loop/reward_loop.py:238-265).
        "/classify",
        "/v1/embeddings",
    }
)
WEBSOCKET_REFUSED = 1008
ASGIApp = Callable[[Any, Any, Any], Awaitable[None]]


_admit: Callable[[], Awaitable[None]] | None = None


def guard(admit: Callable[[], Awaitable[None]]) -> str:
    """Have requests of this process wait for ``admit``, whose RecipeError says why one may not reach the engine.

    Returns the import path that vLLM takes as middleware.
    """
    global _admit
    _admit = admit
    return f"{__name__}.{HttpGate.__name__}"


class HttpGate:
    """See the module's contract."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": WEBSOCKET_REFUSED, "reason": "not offered"})
            return
        if scope["type"] == "http" and scope["method"] not in HARMLESS:
            if scope["path"] not in SERVED:
                await _refuse(send, 403, "PermissionError", f"a rollout server does not offer {scope['path']}")
                return
            assert _admit is not None, "guard() comes before the application is made"
            try:
                await _admit()
            except RecipeError as error:
                await _refuse(send, 503, "ServiceUnavailableError", str(error))
                return
        await self._app(scope, receive, send)


async def _refuse(send: Any, status: int, kind: str, why: str) -> None:
    """As vLLM words its errors."""
    body = json.dumps({"error": {"message": why, "type": kind, "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

# SPDX-License-Identifier: Apache-2.0
"""Serves the policy to agents through OpenAI's API. Each trajectory has its own address and key.

Contract: ``http://host:port/t/ID/v1`` answers only requests with the key that was made for this address, and only until
the trajectory has ended. An unknown address and a wrong key get the same error. The server listens on one host address,
which is loopback unless another one is set. A request's body may have at most `BODY_BYTES`, and has to arrive within
`BODY_S`. If a client disconnects, its request is cancelled. Errors have OpenAI's form. They tell OpenAI's client not to
retry, because the rollout client behind this server has already retried requests that failed in the engines. Shown by
tests/integration/test_agents.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import uvicorn
from openai.pagination import SyncPage
from openai.types import Model
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from recipe.agents import chat, responses
from recipe.agents.errors import Refused
from recipe.agents.session import Ask, Session

logger = logging.getLogger(__name__)

BODY_BYTES = 64 << 20
BODY_S = 60.0
PING_S = 15
DONE = ({"data": "[DONE]"},)
Events = Iterator[dict[str, str]]
Work = Coroutine[Any, Any, tuple[Any, Events]]
Handler = Callable[["Trajectory", dict[str, Any]], tuple[Ask, Work]]
"""Reads a request's body; returns its `Ask`, and a coroutine that returns the reply as one object and as events."""


@dataclass
class Trajectory:
    """A served trajectory. ``responses`` maps the id of each response to the messages up to and including it."""

    session: Session
    key: str
    responses: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def decode(self, tokens: Any) -> str:
        text: str = self.session.tokenizer.decode(list(tokens))
        return text


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, which would replace those of the process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Gateway:
    """One server for all trajectories of a process. It runs in the event loop in which `start` is called."""

    def __init__(self, host: str = "127.0.0.1", model: str = "policy") -> None:
        self._host, self._model = host, model
        self._trajectories: dict[str, Trajectory] = {}
        self._port: int | None = None
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Listen on a port that the operating system chooses, and serve requests."""
        # It listens from here on: an agent on another thread may connect before the server's task has begun.
        listening = socket.create_server(
            (self._host, 0), family=socket.AF_INET6 if ":" in self._host else socket.AF_INET
        )
        self._port = listening.getsockname()[1]
        config = uvicorn.Config(
            self.app(), log_config=None, access_log=False, lifespan="off", ws="none", server_header=False
        )
        self._server = _Server(config)
        # Use an empty context, because the server outlives the trajectory that starts it.
        self._task = asyncio.create_task(
            self._server.serve(sockets=[listening]), context=Context(), name="agents' gateway"
        )

    async def stop(self) -> None:
        if self._server is not None and self._task is not None:
            self._server.should_exit = self._server.force_exit = True
            await self._task

    def open(self, session: Session) -> tuple[str, str]:
        """Create an address and a key for a trajectory, and return them."""
        name, key = secrets.token_hex(16), secrets.token_urlsafe(32)
        self._trajectories[name] = Trajectory(session, key)
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}/t/{name}/v1", key

    async def close(self, address: str) -> None:
        """Stop answering at an address, and cancel its open requests."""
        trajectory = self._trajectories.pop(address.split("/")[-2], None)
        if trajectory is not None:
            await trajectory.session.close()

    def app(self) -> Starlette:
        handlers: dict[str, Handler] = {
            "chat/completions": self._chat,
            "completions": self._completions,
            "responses": self._responses,
        }
        return Starlette(
            routes=[
                *[Route(f"/t/{{name}}/v1/{path}", self._post(of), methods=["POST"]) for path, of in handlers.items()],
                Route("/t/{name}/v1/models", self._models, methods=["GET"]),
                Route("/t/{name}/v1/models/{model:path}", self._models, methods=["GET"]),
            ],
            exception_handlers={Refused: _refused, HTTPException: _no_route},
        )

    def _trajectory(self, request: Request) -> Trajectory:
        """Return the trajectory to which a request's address and key belong."""
        found = self._trajectories.get(request.path_params["name"])
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        given = key if kind.lower() == "bearer" else ""
        # Compare even for an unknown address, so that its error takes as long as that of a wrong key.
        if not secrets.compare_digest(given.encode(), (found.key if found else secrets.token_urlsafe(32)).encode()):
            raise Refused(401, "no trajectory has this address and key", code="invalid_api_key")
        assert found is not None
        return found

    async def _models(self, request: Request) -> Response:
        self._trajectory(request)
        name = request.path_params.get("model", self._model)
        model = Model(id=name, created=0, object="model", owned_by="recipe")
        if "model" in request.path_params:
            return JSONResponse(model.to_dict())
        return JSONResponse(SyncPage[Model](data=[model], object="list").to_dict())

    def _post(self, handler: Handler) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        async def answer(request: Request) -> Response:
            trajectory = self._trajectory(request)
            body = await _body(request)
            ask, work = handler(trajectory, body)
            task = asyncio.create_task(trajectory.session.in_context(work))
            try:
                if body.get("stream"):
                    # Begin the stream only after the engines are asked, so that a refused request gets its HTTP status.
                    await _first(request, task, ask.begun.wait())
                    return EventSourceResponse(_stream(task), ping=PING_S, sep="\n")
                await _first(request, task)
                whole, _ = task.result()
            except BaseException:
                task.cancel()
                raise
            return JSONResponse(whole.to_dict(mode="json", exclude_unset=True))

        return answer

    def _chat(self, of: Trajectory, body: dict[str, Any]) -> tuple[Ask, Work]:
        messages, ask = chat.messages_of(body), chat.ask_of(body)

        async def answered() -> tuple[Any, Events]:
            answers = await of.session.chat(messages, ask)
            chunks = ({"data": _json(each)} for each in chat.chat_chunks(body, answers, of.decode))
            return chat.chat_completion(body, answers, of.decode), chain(chunks, DONE)

        return ask, answered()

    def _completions(self, of: Trajectory, body: dict[str, Any]) -> tuple[Ask, Work]:
        prompt, ask = chat.prompt_of(body), chat.ask_of({**body, "tools": None})

        async def answered() -> tuple[Any, Events]:
            whole = chat.completion(body, await of.session.complete(prompt, ask), of.decode)
            return whole, chain([{"data": _json(whole)}], DONE)

        return ask, answered()

    def _responses(self, of: Trajectory, body: dict[str, Any]) -> tuple[Ask, Work]:
        messages, ask = responses.asked(body, of.responses)

        async def answered() -> tuple[Any, Events]:
            (answer,) = await of.session.chat(messages, ask)
            whole = responses.response(body, answer)
            of.responses[whole.id] = responses.kept(messages, body, answer)
            return whole, ({"event": each.type, "data": _json(each)} for each in responses.events(whole))

        return ask, answered()


def _json(value: Any) -> str:
    text: str = value.to_json(indent=None)
    return text


async def _body(request: Request) -> dict[str, Any]:
    """Return the JSON object in a request's body.

    Raises:
        Refused: the body is too long, arrives too slowly, or is not a JSON object.
    """
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                data += chunk
                if len(data) > BODY_BYTES:
                    raise Refused(413, f"the body has more than {BODY_BYTES} bytes", code="request_too_large")
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {BODY_S:g} s") from None
    except ClientDisconnect:
        raise Refused(400, "the client disconnected") from None
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refused(400, "the body is not a JSON object")
    return body


async def _first(request: Request, task: asyncio.Task[Any], *others: Coroutine[Any, Any, Any]) -> None:
    """Wait for ``task`` or one of ``others``; raise Refused if ``task`` failed or the client disconnected first."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    leaving = asyncio.create_task(left())
    rest = [asyncio.create_task(other) for other in others]
    try:
        await asyncio.wait({task, leaving, *rest}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await _or_refused(task)
        elif leaving.done():
            raise Refused(499, "the client disconnected")
    finally:
        for each in (leaving, *rest):
            each.cancel()


async def _or_refused(task: asyncio.Task[Any]) -> Any:
    """Return the result of a task; raise Refused if it failed."""
    try:
        return await task
    except Refused:
        raise
    except asyncio.CancelledError:
        raise Refused(503, "the trajectory has ended") from None
    except Exception as error:  # the engines or a parser may raise anything
        logger.warning("an agent's request failed", exc_info=error)
        raise Refused(500, f"the policy gave no answer: {type(error).__name__}: {error}") from error


async def _stream(task: asyncio.Task[Any]) -> AsyncIterator[dict[str, str]]:
    try:
        _, events = await _or_refused(task)
    except Refused as error:
        events = iter([{"data": json.dumps(error.body())}])
    finally:
        task.cancel()
    for event in events:
        yield event


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return JSONResponse(error.body(), error.status, headers={"x-should-retry": "false"})


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return await _refused(request, Refused(error.status_code, f"{error.detail}: {request.method} {request.url.path}"))

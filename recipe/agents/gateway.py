# SPDX-License-Identifier: Apache-2.0
"""Serves the policy to agents through OpenAI's API. Each trajectory has its own address and key.

Contract: ``http://host:port/t/ID/v1`` answers only requests with the key that was made for this address, and only until
the trajectory has ended. An unknown address and a wrong key get the same error. The server listens on one host address,
which is loopback unless another one is set. If a client disconnects, its request is cancelled, and when a trajectory
ends, its connections are closed. Errors have OpenAI's form. They tell OpenAI's client not to retry, because the rollout
client behind this server has already retried requests that failed in the engines.

No agent can use up what all share. A trajectory may have `AT_ONCE` open requests with `BODY_BYTES` in their bodies. A
body has to arrive within `BODY_S`, and a request's head within twice `HEAD_S`. If there are more than `CONNECTIONS`,
those without a request are closed, the oldest first. Shown by tests/integration/test_agents.py
and tests/integration/test_hostile_agents.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from recipe.agents import chat, responses
from recipe.agents.errors import Refused
from recipe.agents.session import Ask, Session

logger = logging.getLogger(__name__)

BODY_BYTES = 64 << 20
BODY_S = 60.0
HEAD_BYTES = 1 << 20
HEAD_S = 30.0
AT_ONCE = 256
CONNECTIONS, ACCEPTED = 2048, 64
PING_S = 15
DONE = ({"data": "[DONE]"},)
Events = Iterator[dict[str, str]]
Work = Coroutine[Any, Any, tuple[Any, Events]]
Handler = Callable[["Trajectory", dict[str, Any]], tuple[Ask, Work]]
"""Reads a request's body; returns its `Ask`, and a coroutine that returns the reply as one object and as events."""


@dataclass
class Held:
    """The number of open requests of one trajectory, and the number of bytes in their bodies."""

    open: int = 0
    bytes: int = 0

    @contextmanager
    def request(self) -> Iterator[bytearray]:
        """Count a request as open within the ``with`` block, and provide the buffer for its body."""
        if self.open >= AT_ONCE:
            raise Refused(429, f"there are {AT_ONCE} open requests already", code="rate_limit_exceeded")
        body = bytearray()
        self.open += 1
        try:
            yield body
        finally:
            self.open, self.bytes = self.open - 1, self.bytes - len(body)


@dataclass
class Trajectory:
    """A served trajectory. ``responses`` maps the id of each response to the messages up to and including it."""

    session: Session
    key: str
    responses: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    held: Held = field(default_factory=Held)

    def decode(self, tokens: Any) -> str:
        text: str = self.session.tokenizer.decode(list(tokens))
        return text


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, which would replace those of the process."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen with a long queue: uvicorn's is as short as `ACCEPTED`, and connections beyond it may be reset."""
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(CONNECTIONS)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Connection(HttpToolsProtocol):
    """uvicorn's connection with limits on the number of connections, and on the bytes of a request's head."""

    head = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.logger, self.began = logger.getChild("connection"), self.loop.time()
        if len(self.connections) > min(CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2):
            waiting = sorted(
                (each for each in self.connections if isinstance(each, _Connection) and each.waits),
                key=lambda each: (each.cycle is not None, each.began),
            )
            # Close several connections at once: sorting them whenever a new one arrives would take too much time.
            for each in waiting[: 1 + len(waiting) // 8]:
                each.transport.abort()

    @property
    def waits(self) -> bool:
        """Whether no request on this connection is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_head = self.scope is not None and (self.cycle is None or self.cycle.scope is not self.scope)
        self.head = self.head + len(data) if is_head else 0
        if self.head > HEAD_BYTES:
            self.transport.abort()


class Gateway:
    """One server for all trajectories of a process. It runs in the event loop in which `start` is called."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        model: str = "policy",
        port: int = 0,
        routes: Sequence[Route] = (),
        beside: Sequence[Callable[[], Coroutine[Any, Any, None]]] = (),
    ) -> None:
        self._host, self._model, self._routes, self._beside = host, model, routes, beside
        self._trajectories: dict[str, Trajectory] = {}
        self._port = port
        self._server: _Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Listen and serve requests, by default on a port that the operating system chooses."""
        # It listens from here on: an agent on another thread may connect before the server's task has begun.
        listening = socket.create_server(
            (self._host, self._port), family=socket.AF_INET6 if ":" in self._host else socket.AF_INET
        )
        self._port = listening.getsockname()[1]
        config = uvicorn.Config(
            self.app(),
            http=_Connection,
            # asyncio accepts up to this many connections in one step of the event loop, in which nothing else can run.
            backlog=ACCEPTED,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
        )
        self._server = _Server(config)
        # Use an empty context, because the server outlives the trajectory that starts it.
        self._tasks = [
            asyncio.create_task(work, context=Context(), name="agents' gateway")
            for work in (
                self._server.serve(sockets=[listening]),
                self._end_stalled(),
                *(each() for each in self._beside),
            )
        ]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.should_exit = self._server.force_exit = True
            serving, *beside = self._tasks
            for task in beside:
                task.cancel()
            await serving

    def _connections(self) -> list[_Connection]:
        assert self._server is not None
        return [each for each in self._server.server_state.connections if isinstance(each, _Connection)]

    async def _end_stalled(self) -> None:
        """Close connections on which no request has begun for `HEAD_S`. uvicorn closes only those without any bytes."""
        stalled: set[tuple[_Connection, Any]] = set()
        while True:
            await asyncio.sleep(HEAD_S)
            found = {(each, each.cycle) for each in self._connections() if each.waits}
            for each, _ in found & stalled:
                each.transport.abort()
            stalled = found

    def open(self, session: Session) -> tuple[str, str]:
        """Create an address and a key for a trajectory, and return them."""
        name, key = secrets.token_hex(16), secrets.token_urlsafe(32)
        self._trajectories[name] = Trajectory(session, key)
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}/t/{name}/v1", key

    async def close(self, address: str) -> None:
        """Stop answering at an address, cancel its open requests, and close its connections."""
        name = address.split("/")[-2]
        trajectory = self._trajectories.pop(name, None)
        if trajectory is not None:
            await trajectory.session.close()
            for each in self._connections():
                if each.cycle is not None and f"/{name}/" in each.cycle.scope["path"]:
                    each.transport.close()

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
                *self._routes,
            ],
            exception_handlers={Refused: _refused, HTTPException: _no_route},
        )

    def _trajectory(self, request: Request) -> Trajectory:
        """Return the trajectory to which a request's address and key belong."""
        found = self._trajectories.get(request.path_params["name"])
        # Compare even for an unknown address, so that its error takes as long as that of a wrong key.
        if not secrets.compare_digest(
            bearer(request).encode(), (found.key if found else secrets.token_urlsafe(32)).encode()
        ):
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
            with ExitStack() as opened:
                data = opened.enter_context(trajectory.held.request())
                body = await body_of(request, trajectory.held, data)
                trajectory.session.received += len(data)
                try:
                    ask, work = handler(trajectory, body)
                except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
                    raise Refused(400, f"the body cannot be read: {type(error).__name__}: {error}") from None
                task = trajectory.session.in_context(work)
                ended = opened.pop_all()
            task.add_done_callback(lambda _: ended.close())
            try:
                if body.get("stream"):
                    # Begin the stream only after the engines are asked, so that a refused request gets its HTTP status.
                    await first_of(request, task, ask.begun.wait())
                    return EventSourceResponse(_stream(task), ping=PING_S, sep="\n")
                await first_of(request, task)
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


def bearer(request: Request) -> str:
    """Return the key that a request brings, or an empty text."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return key if kind.lower() == "bearer" else ""


async def body_of(request: Request, held: Held, data: bytearray) -> dict[str, Any]:
    """Read a request's body into ``data``, and return its JSON object.

    Raises:
        Refused: the body is too long, arrives too slowly, or is not a JSON object.
    """
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                data += chunk
                held.bytes += len(chunk)
                if held.bytes > BODY_BYTES:
                    raise Refused(
                        413, f"open requests have more than {BODY_BYTES} bytes in all", code="request_too_large"
                    )
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


async def first_of(request: Request, task: asyncio.Task[Any], *others: Coroutine[Any, Any, Any]) -> None:
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

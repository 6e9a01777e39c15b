# SPDX-License-Identifier: Apache-2.0
"""Gives trajectories to agents on the user's hosts, through a server at an address that the user names.

Contract: the first process of the run that can listen at the address is the desk (`Jobs`). The others, and the hosts
(`recipe.agents.worker`), send it requests. A request for a job or for a result is answered as soon as there is one, and
after `POLL_S` without one. If the desk's process ends, another process of the run becomes the desk, and learns of the
open jobs from the requests that the others repeat. Every request needs the key in the environment variable `KEY`, which
is compared in constant time. Bodies are JSON, with the limits of `recipe.agents.gateway`. Shown by
tests/integration/test_agent_hosts.py.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import cache
from typing import Any
from uuid import uuid4

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from recipe.agents.errors import AgentFailed, Refused
from recipe.agents.gateway import Gateway, Held, bearer, body_of, first_of
from recipe.agents.jobs import POLL_S, Job, Jobs
from recipe.agents.runner import KEY, hosts_key

LOST_S = 60.0
_desks: dict[tuple[asyncio.AbstractEventLoop, str], Gateway] = {}


class Desk:
    """The desk's routes: the run asks for a job's result, and hosts ask for a job and report about it."""

    def __init__(self, key: str) -> None:
        self._key, self._jobs = key, Jobs(time.monotonic())
        self._changed = asyncio.Condition()
        self.routes = [
            Route("/next", self._guarded(self._next), methods=["POST"]),
            Route("/results/{name}", self._guarded(self._result), methods=["POST"]),
            Route("/jobs/{name}/{turn:int}", self._guarded(self._reported), methods=["POST"]),
        ]

    def _guarded(self, answer: Callable[..., Coroutine[Any, Any, Mapping[str, Any]]]) -> Callable[[Request], Any]:
        async def guarded(request: Request) -> Response:
            if not secrets.compare_digest(bearer(request).encode(), self._key.encode()):
                raise Refused(401, f"the key is not that of the run ({KEY})", code="invalid_api_key")
            with (held := Held()).request() as data:
                body = await body_of(request, held, data)
            task = asyncio.create_task(answer(body, **request.path_params))
            try:
                await first_of(request, task)
            except BaseException:
                task.cancel()
                raise
            return JSONResponse(task.result())

        return guarded

    async def _result(self, body: dict[str, Any], name: str) -> Mapping[str, Any]:
        job = self._jobs.ask(name, body, time.monotonic())
        await self._tell()
        try:
            await self._until(lambda: job.result is not None)
        except asyncio.CancelledError:  # the run does not wait any more
            self._jobs.jobs.pop(name, None)
            raise
        if job.result is None:
            return {}
        self._jobs.jobs.pop(name, None)
        return job.result

    async def _next(self, body: dict[str, Any]) -> Mapping[str, Any]:
        found: tuple[str, Job] | None = None

        def takes() -> bool:
            nonlocal found
            found = self._jobs.take(time.monotonic())
            return found is not None

        await self._until(takes)
        return {} if found is None else {"name": found[0], "turn": found[1].turn, "work": found[1].work}

    async def _reported(self, body: dict[str, Any], name: str, turn: int) -> Mapping[str, Any]:
        goes_on = self._jobs.report(name, turn, body.get("result"), time.monotonic())
        await self._tell()
        return {"end": not goes_on}

    async def _until(self, holds: Callable[[], bool]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_S), self._changed:
                await self._changed.wait_for(holds)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def watch(self) -> None:
        """Apply the jobs' time limits every second (`Jobs.expire`), and wake requests that wait for a job or result."""
        while True:
            await asyncio.sleep(1.0)
            self._jobs.expire(time.monotonic())
            await self._tell()


def open_desk(address: str, key: str) -> None:
    """Listen at ``address``, unless a process already does so, or ``address`` belongs to another node."""
    here = (asyncio.get_running_loop(), address)
    if here in _desks:
        return
    desk = Desk(key)
    host, port = host_and_port(address)
    gateway = Gateway(host, port=port, routes=desk.routes, beside=[desk.watch])
    with suppress(OSError):
        gateway.start()
        _desks[here] = gateway


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise AgentFailed(f"hosts={address!r} is not an address with a port, such as 10.0.0.5:8700")
    return host.strip("[]"), int(port)


@cache
def source_address(address: str) -> str:
    """Return this node's address in the network of ``address``. Hosts that reach ``address`` can reach it, too."""
    host, port = host_and_port(address)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        found: str = probe.getsockname()[0]
        return found


async def run_on_hosts(address: str, work: Mapping[str, Any]) -> Any:
    """Let a host of the user run an agent, and return what the agent returned.

    Raises:
        AgentFailed: the agent or its host failed, no host is connected, or the desk cannot be reached.
    """
    name, key, said = uuid4().hex, hosts_key(), json.dumps(work, default=str)
    headers = {"Authorization": f"Bearer {key}"}
    reached = time.monotonic()
    async with httpx.AsyncClient(headers=headers, timeout=POLL_S + 10, verify=False, trust_env=False) as client:
        while True:
            open_desk(address, key)
            try:
                reply = await client.post(f"http://{address}/results/{name}", content=said)
            except httpx.TransportError as error:
                if time.monotonic() > reached + LOST_S:
                    raise AgentFailed(f"no process of the run answers at hosts={address}: {error}") from error
                await asyncio.sleep(0.5)
                continue
            reached = time.monotonic()
            result = reply.json()
            if "returned" in result:
                return result["returned"]
            if "failed" in result or "error" in result:
                raise AgentFailed(f"at hosts={address}: {result.get('failed') or result['error']['message']}")

# SPDX-License-Identifier: Apache-2.0
"""Requests to log-prob servers: spread, sent elsewhere, given up. Servers are scripted below the actor seam."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from remote_fakes import Handle

from recipe.async_engine.log_prob_servers.client import ScoringClient
from recipe.async_engine.log_prob_servers.service import Answer, Unscored

SOON = 10.0


class Server:
    """Answers with its name; ``script`` has exceptions, and events to wait for."""

    def __init__(self, name: str, *script: Any) -> None:
        self.name = name
        self.script = list(script)
        self.asked: list[Any] = []

    async def score(self, sequence: Any, tokens: int, version: int, start: int) -> Answer:
        self.asked.append(sequence)
        step = self.script.pop(0) if self.script else None
        if isinstance(step, asyncio.Event):
            await step.wait()
        if isinstance(step, BaseException):
            raise step
        return Answer(f"{sequence} by {self.name}", version, False, 0.0)


def client_of(*servers: Server, timeout_s: float = SOON) -> ScoringClient:
    return ScoringClient({server.name: Handle(server) for server in servers}, timeout_s)


def remote(error: Exception) -> RayTaskError:
    """As Ray hands over what an actor's method raised."""
    return RayTaskError("score", "traceback", error).as_instanceof_cause()


async def test_server_with_the_fewest_outstanding_tokens_is_asked() -> None:
    held = asyncio.Event()
    slow, quick = Server("slow", held), Server("quick")
    client = client_of(slow, quick)
    first = asyncio.create_task(client.score("long", 100, 0, 0))
    await asyncio.sleep(0)
    for number in range(5):
        assert (await client.score(number, 90, 0, 0)).scores == f"{number} by quick"
    held.set()
    assert (await asyncio.wait_for(first, SOON)).scores == "long by slow"
    assert slow.asked == ["long"]


async def test_equal_servers_share_the_work() -> None:
    servers = Server("a"), Server("b")
    client = client_of(*servers)
    for number in range(10):
        await client.score(number, 10, 0, 0)
    assert [len(server.asked) for server in servers] == [5, 5]


@pytest.mark.parametrize(
    "error",
    [
        remote(Unscored("version 3 is not here")),
        remote(Unscored("out of memory")),
        ActorUnavailableError("no files", None),
    ],
)
async def test_another_server_is_asked_once_and_the_first_one_stays(error: Exception) -> None:
    first, second = Server("first", error), Server("second")
    client = client_of(first, second)
    assert (await client.score("x", 10, 3, 0)).scores == "x by second"
    assert list(client.servers) == ["first", "second"]


async def test_server_that_is_gone_is_asked_no_more() -> None:
    first, second = Server("first", ActorDiedError()), Server("second")
    client = client_of(first, second)
    for name in "xyz":
        assert (await client.score(name, 10, 0, 0)).scores == f"{name} by second"
    assert list(client.servers) == ["second"] and first.asked == ["x"]


async def test_what_each_server_said_is_in_the_error_if_none_answers() -> None:
    first = Server("first", remote(Unscored("the newest is 2")), ActorDiedError())
    client = client_of(first, Server("second", ActorDiedError()))
    with pytest.raises(Unscored, match=r"version 3: first: the newest is 2; second died"):
        await client.score("x", 10, 3, 0)
    with pytest.raises(Unscored, match="first died"):
        await client.score("x", 10, 3, 0)
    with pytest.raises(Unscored, match="none is left"):
        await client.score("x", 10, 3, 0)


async def test_answer_that_never_comes_ends_at_the_deadline_and_frees_the_server() -> None:
    server = Server("deaf", asyncio.Event())
    client = client_of(server, timeout_s=0.05)
    with pytest.raises(Unscored, match=r"no answer within 0\.05 s"):
        await client.score("x", 10, 0, 0)
    assert (await client.score("y", 10, 0, 0)).scores == "y by deaf"

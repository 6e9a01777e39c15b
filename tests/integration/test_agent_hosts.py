# SPDX-License-Identifier: Apache-2.0
"""Agents on hosts of the user's: real worker processes over loopback, which die, hang, and come back."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from scripted_policy import ScriptedClient, agent_loop, check_trained

from recipe.agents import desk, jobs
from recipe.agents.errors import AgentFailed
from recipe.agents.runner import KEY

PROGRAM = Path(__file__).with_name("misbehaving_agent.py")
ROW = {"raw_prompt": [{"role": "user", "content": "1 + 2?"}], "extra_info": {"index": 3}}
CALLED = """
async def run(client, row):
    reply = await client.chat.completions.create(model="any", messages=row["raw_prompt"])
    return {"reward": float(reply.choices[0].message.content == "3"), "index": row["extra_info"]["index"]}
"""


def command(kind: str) -> list[str]:
    return ["--command", shlex.join([sys.executable, "-I", "-S", str(PROGRAM), kind]), "--passed", "MEETING"]


@pytest.fixture
async def address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[str]:
    """A free address for the desk; the desk is closed afterwards."""
    monkeypatch.setenv(KEY, "a key of the test, long enough")
    monkeypatch.setenv("MEETING", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(jobs, "OPENS_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as free:
        found = f"127.0.0.1:{free.getsockname()[1]}"
    yield found
    await closed(found)


async def closed(address: str) -> None:
    here = (asyncio.get_running_loop(), address)
    if here in desk._desks:
        await desk._desks.pop(here).stop()


@asynccontextmanager
async def worker(address: str, *arguments: str, **more: str) -> AsyncIterator[psutil.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "recipe.agents.worker", "--connect", f"http://{address}", *arguments),
        env={**os.environ, **more},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield psutil.Process(process.pid)
    finally:
        if process.returncode is None:
            process.terminate()
            assert await asyncio.wait_for(process.wait(), 20) in (0, -signal.SIGKILL)


async def trajectory(address: str, script: Any = None, **arguments: Any) -> Any:
    client = ScriptedClient(script or (lambda text: "3"))
    output = await agent_loop(client, hosts=address, **arguments).run({}, **ROW)
    check_trained(client, output)
    return output


def agents(folder: Path) -> list[int]:
    """The processes of agents of this test."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MEETING") == str(folder) and str(PROGRAM) in process.cmdline()[1:5]:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


async def until(holds: Callable[[], Any], seconds: float = 60.0) -> Any:
    over = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < over
        await asyncio.sleep(0.05)
    return found


async def test_a_function_and_a_program_run_on_a_host_and_are_trained(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_agent.py").write_text(CALLED)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    async with worker(address, "--agent", "their_agent.run", "--at-once", "2"):
        outputs = await asyncio.gather(*[trajectory(address) for _ in range(3)])
    for output in outputs:
        assert output.reward_score == 1.0 and output.extra_fields["reward_extra_info"] == {"index": 3}
    async with worker(address, *command("good")):
        assert (await trajectory(address))[-1].reward_score == 1.0
    assert agents(tmp_path) == []


async def test_what_fails_there_is_told_here(address: str) -> None:
    async with worker(address, *command("crashes")):
        with pytest.raises(AgentFailed, match="ended with exit status 1: out of ideas"):
            await trajectory(address)
    async with worker(address, *command("sleeps")):
        with pytest.raises(AgentFailed, match="not done within deadline_s=2"):
            await trajectory(address, deadline_s=2.0)


async def test_what_the_run_gives_up_ends_there(address: str, tmp_path: Path) -> None:
    async with worker(address, *command("escapes_and_sleeps")):
        running = asyncio.create_task(trajectory(address))
        await until(lambda: len(agents(tmp_path)) > 2)
        running.cancel()
        await asyncio.wait({running})
        await until(lambda: not agents(tmp_path))


async def test_a_host_that_dies_costs_the_trajectories_that_it_had_begun(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "SILENT_S", 3.0)
    async with worker(address, *command("sleeps"), "--at-once", "1") as dying:
        first = asyncio.create_task(trajectory(address))
        await until(lambda: agents(tmp_path))
        second = asyncio.create_task(trajectory(address))
        await asyncio.sleep(1.0)
        dying.send_signal(signal.SIGSTOP)
        with pytest.raises(AgentFailed, match="has not been heard of for 3 s"):
            await first
        async with worker(address, *command("good")):
            assert (await second)[-1].reward_score == 1.0
        dying.kill()
        # Its agents end with it.
        await until(lambda: not agents(tmp_path))
        await until(lambda: not dying.is_running() or dying.status() == psutil.STATUS_ZOMBIE)


async def test_a_worker_serves_the_run_again_after_a_restart(address: str, tmp_path: Path) -> None:
    async with worker(address, *command("good")):
        assert (await trajectory(address))[-1].reward_score == 1.0
        await closed(address)
        await asyncio.sleep(2.0)
        assert (await trajectory(address))[-1].reward_score == 1.0


async def test_a_desk_that_is_lost_is_opened_again_and_the_agents_go_on(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker(address, *command("good")):
        running = [asyncio.create_task(trajectory(address)) for _ in range(4)]
        await asyncio.sleep(2.0)
        await closed(address)
        monkeypatch.setattr(jobs, "OPENS_S", 10.0)
        for output in await asyncio.gather(*running):
            assert output[-1].reward_score == 1.0


async def test_without_a_host_or_with_a_wrong_key_it_says_so(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "NO_HOST_S", 3.0)
    with pytest.raises(AgentFailed, match=f"at hosts={address}: no host has been connected for 3 s"):
        await trajectory(address)
    async with httpx.AsyncClient(base_url=f"http://{address}") as http:
        for key in ("", "Bearer wrong", f"Basic {os.environ[KEY]}"):
            for path in ("/next", "/jobs/x/1", "/results/x"):
                assert (await http.post(path, json={}, headers={"Authorization": key})).status_code == 401
        right = {"Authorization": f"Bearer {os.environ[KEY]}"}
        for body, status in ((b"[]", 400), (b"\x80\x04.", 400), (b"{}", 200)):
            assert (await http.post("/jobs/x/1", content=body, headers=right)).status_code == status
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "recipe.agents.worker", "--connect", f"http://{address}", *command("good")),
        env={**os.environ, KEY: "another key of the test"},
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()
    assert (process.returncode, b"the key is not that of the run" in said) == (1, True)
    monkeypatch.setenv(KEY, "short")
    with pytest.raises(AgentFailed, match=f"16 letters or more in {KEY}"):
        await trajectory(address)


@pytest.mark.parametrize("hosts", ["10.0.0.5", "example:x"])
def test_an_address_without_a_port_is_refused(hosts: str) -> None:
    with pytest.raises(AgentFailed, match="not an address with a port"):
        agent_loop(ScriptedClient([]), hosts=hosts)

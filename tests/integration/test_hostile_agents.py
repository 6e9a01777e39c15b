# SPDX-License-Identifier: Apache-2.0
"""64 agents at once, of which most misbehave: each costs its own trajectory, and nothing of it stays behind."""

from __future__ import annotations

import asyncio
import base64
import io
import shlex
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from openai import AsyncOpenAI
from PIL import Image
from scripted_policy import ScriptedClient, agent_loop, check_trained

from recipe.agents import gateway, session
from recipe.agents.errors import AgentFailed, Refused

QUESTION = {"role": "user", "content": "1 + 2?"}
PROGRAM = Path(__file__).with_name("misbehaving_agent.py")
AGENTS, BAD_S, GOOD_S, MOST_BYTES = 64, 25.0, 240.0, 768 << 20
LATE = "not done within deadline_s=25"
BAD = {
    "trespasses": "exit status 1: 401 invalid_api_key",
    "sleeps": LATE,
    "crashes": "exit status 1: out of ideas",
    "faults": "signal SIGSEGV: it printed nothing",
    "ignores": LATE,
    "kills_its_watcher": "the watcher of .*kills_its_watcher' was killed",
    "floods_output": "exit status 1: y+end of the flood",
    "floods_requests": LATE,
    "floods_connections": LATE,
    "floods_heads": LATE,
    "floods_bodies": LATE,
    "floods_text": LATE,
    "drips": LATE,
    "never_reads": LATE,
    "escapes": "exit status 1: gone",
    "escapes_on_and_on": "exit status 1: gone",
}
GOOD = ("visited", "good", "good", "forks")


def of_agents(mark: str) -> list[psutil.Process]:
    """The processes on this machine that have an agent's environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if mark in process.environ().get("MEETING", "") and process.pid != psutil.Process().pid:
                found.append(process)
        except psutil.Error:
            continue
    return found


def threads() -> Counter[str]:
    """The running threads, without those of the event loop's pool, which stay."""
    return Counter(each.name for each in threading.enumerate() if not each.name.startswith("agents_"))


async def refused(policy: AsyncOpenAI, *messages: Any, **asked: Any) -> tuple[int, str | None]:
    with pytest.raises(openai.APIStatusError) as error:
        await policy.chat.completions.create(model="any", messages=messages or [QUESTION], **asked)
    return error.value.status_code, error.value.code


async def test_a_trajectorys_requests_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        *((gateway, "AT_ONCE", 2), (gateway, "BODY_BYTES", 2000), (session, "ANSWERS", 4)),
        *((session, "LETTERS", 100), (session, "LETTERS_PER_TOKEN", 0), (session, "PIXELS", 100)),
    ):
        monkeypatch.setattr(module, name, value)

    async def run(policy: AsyncOpenAI, row: dict[str, Any]) -> float:
        client._seconds = 1.0
        waiting = [asyncio.create_task(policy.chat.completions.create(model="any", messages=[QUESTION])) for _ in "ab"]
        while len(client.requests) < 2:
            await asyncio.sleep(0.01)
        assert await refused(policy) == (429, "rate_limit_exceeded")
        await asyncio.gather(*waiting)
        assert await refused(policy, {"role": "user", "content": "x" * 101}) == (400, "context_length_exceeded")
        assert await refused(policy, {"role": "user", "content": "x" * 2001}) == (413, "request_too_large")
        assert await refused(policy, stop=["x"] * 17) == (400, "invalid_value")
        assert await refused(policy, extra_body={"stream_options": 1, "response_format": "x"}) == (400, None)
        assert await refused(policy, n=3) == (429, "rate_limit_exceeded")
        return 1.0

    client = ScriptedClient(lambda text: "3")
    loop = agent_loop(client, agent="asyncio.sleep")
    loop._agent = run
    check_trained(client, await loop.run({}, raw_prompt=[QUESTION]))
    picture = io.BytesIO()
    Image.new("1", (11, 10)).save(picture, "png")
    address = f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"
    with pytest.raises(Refused, match="more than 100 pixels"):
        session.pixels(address, session.PIXELS)


async def rss_watched(seen: list[int]) -> None:
    while True:
        seen.append(psutil.Process().memory_info().rss)
        await asyncio.sleep(0.05)


async def trajectory(kind: str, took: dict[str, float]) -> float:
    """Run one agent; return its reward, and check that it is trained on what was sampled for it."""
    client = ScriptedClient(lambda text: "3", seconds=0.01)
    command = shlex.join([sys.executable, "-I", "-S", str(PROGRAM), kind])
    deadline_s = BAD_S if BAD.get(kind) == LATE else GOOD_S
    loop = agent_loop(client, command=command, passed="MEETING", deadline_s=deadline_s)
    began = time.monotonic()
    output = await loop.run({})
    took[kind] = max(time.monotonic() - began, took.get(kind, 0))
    check_trained(client, output)
    return (output[-1] if isinstance(output, list) else output).reward_score


async def test_64_agents_cost_no_more_than_their_own_trajectories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gateway, "HEAD_S", 10.0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "files"))
    monkeypatch.setenv("MEETING", str(tmp_path))
    (tmp_path / "files").mkdir()
    took: dict[str, float] = {}
    assert await trajectory("good", took) == 1.0
    me = psutil.Process()
    before = threads(), me.num_fds()
    seen: list[int] = []
    watching = asyncio.create_task(rss_watched(seen))
    base = me.memory_info().rss

    kinds = ["visited", "trespasses"]
    kinds += [kind for kind in BAD if kind != "trespasses"] * 3
    kinds += [(*GOOD[1:],)[number % 3] for number in range(AGENTS - len(kinds))]
    assert len(kinds) == AGENTS
    results = await asyncio.gather(*[trajectory(kind, took) for kind in kinds], return_exceptions=True)
    watching.cancel()
    for kind, result in zip(kinds, results, strict=True):
        if kind in GOOD:
            assert result == 1.0, kind
        else:
            assert isinstance(result, AgentFailed), (kind, result)
            with pytest.raises(AgentFailed, match=BAD[kind]):
                raise result
    with capsys.disabled():
        sys.stdout.write(f"\nmemory grew by {(max(seen) - base) >> 20} MiB; seconds of the slowest: {took}\n")
    assert max(seen) - base < MOST_BYTES

    assert of_agents(str(tmp_path)) == []
    assert list((tmp_path / "files").iterdir()) == []
    until = time.monotonic() + 20
    while (threads(), me.num_fds()) != before and time.monotonic() < until:
        await asyncio.sleep(0.1)
    assert (threads(), me.num_fds()) == before
    assert {each.status for each in me.net_connections("tcp") if each.laddr.ip == "127.0.0.1"} <= {psutil.CONN_LISTEN}

# SPDX-License-Identifier: Apache-2.0
"""An agent that is a command: what it gets, what it gives, and how it ends."""

from __future__ import annotations

import asyncio
import shlex
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from scripted_policy import ScriptedClient, agent_loop, check_trained

from recipe.agents.errors import AgentFailed
from recipe.agents.runner import reward_of, run_command
from recipe.agents.watcher import LAST_WORDS

ROW = {"raw_prompt": [{"role": "user", "content": "1 + 2?"}], "extra_info": {"index": 3}}
ASKING = """
import json, os
from openai import OpenAI
row = json.load(open(os.environ["AGENT_ROW"]))
reply = OpenAI().chat.completions.create(model="any", messages=row["raw_prompt"])
print("thinking aloud")
print(json.dumps({"reward": float(reply.choices[0].message.content == "3"), "index": row["extra_info"]["index"]}))
"""


def python(code: str) -> str:
    return shlex.join([sys.executable, "-c", code])


async def run(code: str, **more: Any) -> Any:
    return await run_command(python(code), "http://127.0.0.1:1/t/x/v1", "key", ROW, **more)


async def test_a_command_asks_the_policy_and_prints_its_reward() -> None:
    client = ScriptedClient(["3"])
    output = await agent_loop(client, command=python(ASKING)).run({}, **ROW)
    check_trained(client, output)
    assert output.reward_score == 1.0
    assert output.extra_fields["reward_extra_info"] == {"index": 3}


async def test_it_gets_none_of_the_runs_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("SEARCH_KEY", "its own")
    show = "import json, os; print(json.dumps({'reward': 0, **{'variables': dict(os.environ)}}))"
    shown = (await run(show, passed=["SEARCH_KEY"]))["variables"]
    assert "secret" not in str(shown)
    assert (shown["SEARCH_KEY"], shown["OPENAI_API_KEY"]) == ("its own", "key")
    assert shown["OPENAI_BASE_URL"] == "http://127.0.0.1:1/t/x/v1"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import sys; print('no tools', file=sys.stderr); sys.exit(3)", "exit status 3: no tools"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "signal SIGSEGV: it printed nothing"),
        ("raise ValueError('of mine')", "exit status 1: Traceback .*ValueError: of mine"),
        ("print('well done')", "not a reward: 'well done'"),
    ],
)
async def test_its_failure_is_told_with_its_last_words(code: str, says: str) -> None:
    with pytest.raises(AgentFailed, match=f"(?s){says}"):
        await run(code)


async def test_much_output_is_read_and_only_its_end_is_kept() -> None:
    assert await run("print('x' * (1 << 20)); print(0.5)") == 0.5
    with pytest.raises(AgentFailed) as failed:
        await run("import sys; sys.stderr.write('x' * (1 << 20) + 'end'); sys.exit(1)")
    assert str(failed.value).endswith("end")
    assert len(str(failed.value)) < 2 * LAST_WORDS


@pytest.mark.parametrize("ends", ["time.sleep(60)", "print(1)"])
async def test_what_it_has_started_ends_with_it(tmp_path: Path, ends: str) -> None:
    started = tmp_path / "pid"
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(started)!r}, "w").write(str(child.pid))
{ends}
"""
    if ends == "print(1)":
        assert await run(code) == 1
    else:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await run(code)
    child = int(started.read_text())
    for _ in range(100):
        if not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("its child goes on")


async def test_a_command_that_does_not_exist_is_named() -> None:
    with pytest.raises(AgentFailed, match="'no-such-agent --x' cannot be started"):
        await run_command("no-such-agent --x", "", "", ROW)


@pytest.mark.parametrize(
    ("returned", "reward"),
    [(1, (1.0, {})), (True, (1.0, {})), (None, (None, {})), ({"reward": 0.5, "steps": 3}, (0.5, {"steps": 3}))],
)
def test_a_reward_is_a_number_a_mapping_or_nothing(returned: Any, reward: Any) -> None:
    assert reward_of(returned) == reward


@pytest.mark.parametrize("returned", ["good", [1], {"steps": 3}, {"reward": "high"}])
def test_what_is_no_reward_is_refused(returned: Any) -> None:
    with pytest.raises(AgentFailed, match="not a number"):
        reward_of(returned)

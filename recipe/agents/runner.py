# SPDX-License-Identifier: Apache-2.0
"""Runs a user's agent for one trajectory, either a callable in this process or a command in a process of its own.

Contract: a command gets the trajectory's address, the key, and the path of a JSON file with the dataset row, in the
environment variables ``OPENAI_BASE_URL``, ``OPENAI_API_KEY`` and ``AGENT_ROW``. From this process's environment it gets
only the variables in `PASSED` and those that the user names, so it gets none of the run's secrets. ``TMPDIR`` is a
folder of its own, which is deleted afterwards. The last line of its standard output is the reward. When the command
ends, its time is over, or this process dies, everything that it has started is killed (`recipe.agents.watcher`). If
the command fails, the error has its exit status and the end of its output. Shown by
tests/integration/test_agent_runner.py and tests/integration/test_hostile_agents.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import shutil
import signal
import ssl
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from recipe.agents import watcher
from recipe.agents.errors import AgentFailed

logger = logging.getLogger(__name__)

PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "VIRTUAL_ENV")
ROW = "AGENT_ROW"
KEY = "AGENT_HOSTS_KEY"
REWARD = "reward"

Agent = Callable[[AsyncOpenAI, dict[str, Any]], Awaitable[Any]]


async def run_callable(agent: Agent, address: str, key: str, row: dict[str, Any]) -> Any:
    """Call the user's callable for a row, and return its result."""
    # Do not retry here, because the rollout client behind the address already retries failed requests.
    http = DefaultAsyncHttpxClient(verify=_certificates())
    async with AsyncOpenAI(base_url=address, api_key=key, max_retries=0, timeout=None, http_client=http) as client:
        return await agent(client, row)


@cache
def _certificates() -> ssl.SSLContext:
    """Return a TLS context that all clients share. To create one often takes longer than a trajectory's requests."""
    return ssl.create_default_context()


async def run_command(
    command: str, address: str, key: str, row: dict[str, Any], passed: Sequence[str] = (), folder: str | None = None
) -> Any:
    """Run a user's command for a row, and return the reward that it prints.

    Args:
        command: the command line, which no shell interprets.
        passed: names of further environment variables that the command gets.
        folder: the command's working directory; None means that of this process.

    Raises:
        AgentFailed: the command cannot be started, its exit status is not 0, or its last line is not a reward.
    """
    place = tempfile.mkdtemp(prefix="agent-")
    try:
        file = Path(place, "row.json")
        file.write_text(json.dumps(row, default=str))
        own = {"OPENAI_BASE_URL": address, "OPENAI_API_KEY": key, ROW: str(file), "TMPDIR": place}
        try:
            ended = await _watched(shlex.split(command), environment_of(os.environ, passed) | own, folder)
        except (OSError, ValueError) as error:
            raise AgentFailed(f"{command!r} cannot be started: {error}") from None
    finally:
        await asyncio.shield(asyncio.to_thread(shutil.rmtree, place, ignore_errors=True))
    if "failed" in ended:
        raise AgentFailed(f"{command!r} cannot be started: {ended['failed']}")
    if status := ended["status"]:
        how = f"exit status {status}" if status > 0 else f"signal {signal.Signals(-status).name}"
        words = (ended["complained"] or ended["printed"]).strip() or "it printed nothing"
        raise AgentFailed(f"{command!r} ended with {how}: {words}")
    return printed_reward(command, ended["printed"])


async def _watched(command: Sequence[str], environment: Mapping[str, str], folder: str | None) -> dict[str, Any]:
    """Run a command under `recipe.agents.watcher`, and return what that program reports about it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", watcher.__file__, *command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment,
        cwd=folder,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        report = await process.stdout.read()
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(watcher.KILLED_S + 5):
                await asyncio.shield(process.wait())
        except TimeoutError:
            process.kill()
    if not report:
        raise AgentFailed(f"the watcher of {shlex.join(command)!r} was killed (exit status {process.returncode})")
    ended: dict[str, Any] = json.loads(report)
    if ended.get("left"):
        logger.warning("%d processes of an agent could not be killed", ended["left"])
    return ended


def hosts_key() -> str:
    """Return the key that the run and the user's hosts share, from the environment variable `KEY`."""
    if len(key := os.environ.get(KEY, "")) < 16:
        raise AgentFailed(f"agents on hosts need a key of 16 letters or more in {KEY}, the same for run and hosts")
    return key


def names_in(text: str) -> list[str]:
    """Return the names that a setting lists, separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def environment_of(environment: Mapping[str, str], passed: Sequence[str]) -> dict[str, str]:
    """Return those variables of ``environment`` that a command gets."""
    return {name: environment[name] for name in (*PASSED, *passed) if name in environment}


def printed_reward(command: str, printed: str) -> Any:
    """Return the reward, which the last line of a command's output gives as JSON: a number, an object or null.
    Without output, return None.
    """
    lines = printed.strip().splitlines()
    try:
        return json.loads(lines[-1]) if lines else None
    except ValueError:
        raise AgentFailed(f"the last line that {command!r} printed is not a reward: {lines[-1][-200:]!r}") from None


def reward_of(returned: Any) -> tuple[float | None, dict[str, Any]]:
    """Return an agent's reward and its other values. If the reward is None, the run's reward function computes it.

    Raises:
        AgentFailed: ``returned`` is neither None nor a number, nor a mapping with a number under `REWARD`.
    """
    report = dict(returned) if isinstance(returned, Mapping) else {REWARD: returned}
    reward = report.pop(REWARD, None)
    if reward is None and not report:
        return None, {}
    try:
        return float(reward), report
    except (TypeError, ValueError):
        raise AgentFailed(
            f"the agent returned {returned!r:.200}, not a number, a mapping with {REWARD!r}, or None"
        ) from None

# SPDX-License-Identifier: Apache-2.0
"""Runs a user's agent for one trajectory, either a callable in this process or a command in a process of its own.

Contract: a command gets the trajectory's address, the key, and the path of a JSON file with the dataset row, in the
environment variables ``OPENAI_BASE_URL``, ``OPENAI_API_KEY`` and ``AGENT_ROW``. From this process's environment it gets
only the variables in `PASSED` and those that the user names, so it gets none of the run's secrets. The last line of its
standard output is the reward. When the command ends or its time is over, its whole process group is killed. If the
command fails, the error has its exit status and the end of its output. Shown by tests/integration/test_agent_runner.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from recipe.agents.errors import AgentFailed

PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV")
ROW = "AGENT_ROW"
LAST_WORDS = 4000
"""Number of bytes that are kept from the end of a command's output."""
REWARD = "reward"

Agent = Callable[[AsyncOpenAI, dict[str, Any]], Awaitable[Any]]


async def run_callable(agent: Agent, address: str, key: str, row: dict[str, Any]) -> Any:
    """Call the user's callable for a row, and return its result."""
    # Do not retry here, because the rollout client behind the address already retries failed requests.
    async with AsyncOpenAI(base_url=address, api_key=key, max_retries=0, timeout=None) as client:
        return await agent(client, row)


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
    with tempfile.TemporaryDirectory(prefix="agent-") as place:
        file = Path(place, "row.json")
        file.write_text(json.dumps(row, default=str))
        environment = environment_of(os.environ, passed) | {
            "OPENAI_BASE_URL": address,
            "OPENAI_API_KEY": key,
            ROW: str(file),
        }
        try:
            process = await asyncio.create_subprocess_exec(
                *shlex.split(command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise AgentFailed(f"{command!r} cannot be started: {error}") from None
        assert process.stdout is not None and process.stderr is not None
        words = [asyncio.create_task(last_words(stream)) for stream in (process.stdout, process.stderr)]
        try:
            # asyncio's wait() would also wait for processes that the command has started and that hold its pipes open.
            await exited(process.pid)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            status = await asyncio.shield(process.wait())
        printed, complained = await asyncio.gather(*words)
    if status:
        how = f"exit status {status}" if status > 0 else f"signal {signal.Signals(-status).name}"
        raise AgentFailed(f"{command!r} ended with {how}: {(complained or printed).strip() or 'it printed nothing'}")
    return printed_reward(command, printed)


def environment_of(environment: Mapping[str, str], passed: Sequence[str]) -> dict[str, str]:
    """Return those variables of ``environment`` that a command gets."""
    return {name: environment[name] for name in (*PASSED, *passed) if name in environment}


async def exited(pid: int) -> None:
    """Wait until the child process ``pid`` has ended."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        loop.add_reader(descriptor, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def last_words(stream: asyncio.StreamReader) -> str:
    """Read a stream until it ends, and return its last `LAST_WORDS` bytes as text."""
    kept = b""
    while data := await stream.read(1 << 16):
        kept = (kept + data)[-LAST_WORDS:]
    return kept.decode(errors="replace")


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

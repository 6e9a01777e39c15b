# SPDX-License-Identifier: Apache-2.0
"""``python -m recipe.agents.worker`` runs agents on a host of the user, for a run that is elsewhere.

Contract: it takes jobs from the run's desk (`recipe.agents.jobs`), and runs the agent that its own command line names,
once for each trajectory, as a process (`recipe.agents.runner`). The run decides only about the row, the deadline, and
the policy's address. An agent is ended when the run does not want it any more, when the run has not answered for
`SILENT_S`, and when this program ends. This program serves the run again after a restart. It needs neither verl nor an
engine. Shown by tests/integration/test_agent_hosts.py and tests/e2e/test_agent_hosts.py.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from recipe.agents.errors import AgentFailed
from recipe.agents.jobs import BEAT_S, POLL_S, SILENT_S
from recipe.agents.runner import ROW, hosts_key, names_in, run_callable, run_command

logger = logging.getLogger(__name__)


class Worker:
    """Runs up to ``at_once`` agents at a time. Each of ``at_once`` tasks asks for a job, runs it, and reports on it."""

    def __init__(self, client: httpx.AsyncClient, command: str, passed: Sequence[str]) -> None:
        self._client, self._command, self._passed = client, command, passed
        self._is_reached = True

    async def serve(self, at_once: int) -> None:
        """Serve until this task is cancelled; raise an ExceptionGroup of AgentFailed if the run refuses the key."""
        async with asyncio.TaskGroup() as places:
            for _ in range(at_once):
                places.create_task(self._place())

    async def _place(self) -> None:
        while True:
            job = await self._post("/next", {})
            if "name" in job:
                await self._job(f"/jobs/{job['name']}/{job['turn']}", job["work"])

    async def _job(self, path: str, work: dict[str, Any]) -> None:
        agent = asyncio.create_task(self._run(work))
        try:
            while not agent.done():
                if (await self._post(path, {})).get("end"):
                    return
                await asyncio.wait({agent}, timeout=BEAT_S)
            await self._post(path, {"result": agent.result()})
        except asyncio.CancelledError:
            with suppress(httpx.HTTPError):
                await self._client.post(path, json={"result": {"failed": "the agent's host has ended"}}, timeout=2.0)
            raise
        finally:
            agent.cancel()
            await asyncio.wait({agent})

    async def _post(self, path: str, said: dict[str, Any]) -> dict[str, Any]:
        """Return the run's answer. After `SILENT_S` without one, return what would tell this worker to end the job."""
        over = time.monotonic() + SILENT_S
        while time.monotonic() < over:
            try:
                reply = await self._client.post(path, json=said)
                if reply.status_code == 401:
                    raise AgentFailed(reply.json()["error"]["message"])
                answer: dict[str, Any] = reply.raise_for_status().json()
                self._is_reached = True
                return answer
            except httpx.HTTPError as error:
                if self._is_reached:
                    logger.warning("no run answers at %s, which is asked again: %r", self._client.base_url, error)
                self._is_reached = False
                await asyncio.sleep(1.0)
        return {"end": True}

    async def _run(self, work: dict[str, Any]) -> dict[str, Any]:
        deadline_s = work["deadline_s"]
        try:
            async with asyncio.timeout(deadline_s) as limit:
                given = work["address"], work["key"], work["row"]
                return {"returned": await run_command(self._command, *given, self._passed)}
        except Exception as error:  # whatever fails here must be told to the run
            if limit.expired():
                return {"failed": f"the agent was not done within deadline_s={deadline_s:g}"}
            return {"failed": str(error) if isinstance(error, AgentFailed) else repr(error)}


async def call(agent: str) -> str:
    """Call the function ``agent`` in this process, which `run_command` has started; return its reward as JSON."""
    module, _, name = agent.rpartition(".")
    function = getattr(importlib.import_module(module), name)
    row = json.loads(Path(os.environ[ROW]).read_text())
    returned = await run_callable(function, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], row)
    return json.dumps(returned, default=float)


async def serve(address: str, command: str, passed: Sequence[str], at_once: int) -> int:
    """Serve the run at ``address`` until a signal ends this process; return the exit status."""
    headers = {"Authorization": f"Bearer {hosts_key()}"}
    async with httpx.AsyncClient(
        base_url=address, headers=headers, timeout=POLL_S + 10, limits=httpx.Limits()
    ) as client:
        serving = asyncio.create_task(Worker(client, command, passed).serve(at_once))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
        try:
            await serving
        except asyncio.CancelledError:
            return 0
        except ExceptionGroup as errors:
            logger.error("%s", errors.exceptions[0])
    return 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipe.agents.worker", description=__doc__)
    parser.add_argument("--connect", metavar="URL", help="http:// and the run's setting hosts=")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--agent", help="name of an `async def run(client, row)`")
    what.add_argument("--command", help="a command line")
    what.add_argument("--call", help=argparse.SUPPRESS)
    parser.add_argument("--passed", default="", help="variables of this environment that the agents get, by comma")
    parser.add_argument("--at-once", type=int, default=8)
    options = parser.parse_args(arguments)
    if options.call is not None:
        sys.stdout.write(f"\n{asyncio.run(call(options.call))}\n")
        return 0
    try:
        hosts_key()
    except AgentFailed as error:
        parser.error(str(error))
    if options.connect is None:
        parser.error("--connect is required")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    command = options.command or shlex.join([sys.executable, "-m", "recipe.agents.worker", "--call", options.agent])
    return asyncio.run(serve(options.connect, command, names_in(options.passed), options.at_once))


if __name__ == "__main__":
    sys.exit(main())

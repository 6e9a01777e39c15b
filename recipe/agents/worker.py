# SPDX-License-Identifier: Apache-2.0
"""``python -m recipe.agents.worker`` runs agents on a host of the user, for a run that is elsewhere.

Contract: it polls the run's desk (`recipe.agents.jobs`), and runs the agent that its own command line names, once for
each trajectory, as a process (`recipe.agents.runner`); the run decides only about the row, the address of the policy
and the deadline. Agents are ended when the run says so, when the desk has been unreachable for `SILENT_S`, and when
this program ends. It goes on polling, so that it serves the run again after a restart. It needs neither verl nor an
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
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx

from recipe.agents.errors import AgentFailed
from recipe.agents.jobs import POLL_S, SILENT_S
from recipe.agents.runner import ROW, hosts_key, run_callable, run_command

logger = logging.getLogger(__name__)


class Worker:
    """The agents that run on this host, and the results that the desk has not got yet."""

    def __init__(self, address: str, command: str, passed: Sequence[str], at_once: int) -> None:
        self._url = f"{address.rstrip('/')}/hosts/{socket.gethostname()}-{uuid4().hex[:8]}"
        self._command, self._passed, self._at_once = command, passed, at_once
        self._running: dict[str, asyncio.Task[None]] = {}
        self._done: dict[str, dict[str, Any]] = {}
        self._news = asyncio.Event()

    async def serve(self) -> None:
        """Poll the desk until this task is cancelled; raise AgentFailed if it refuses the key."""
        heard = time.monotonic()
        headers = {"Authorization": f"Bearer {hosts_key()}"}
        async with httpx.AsyncClient(headers=headers, timeout=POLL_S + 10) as client:
            try:
                while True:
                    try:
                        await self._poll(client)
                        heard = time.monotonic()
                    except httpx.TransportError as error:
                        logger.warning("no run answers at %s: %r", self._url, error)
                        if time.monotonic() > heard + SILENT_S:
                            await self._end(list(self._running))
                        await asyncio.sleep(1.0)
            finally:
                await self._end(list(self._running))
                with suppress(httpx.TransportError):
                    await client.post(self._url, json={"free": 0, "running": [], "done": self._done}, timeout=2.0)

    async def _poll(self, client: httpx.AsyncClient) -> None:
        """Tell the desk what runs here, and do what it answers; return early if an agent has ended meanwhile."""
        self._news.clear()
        told = dict(self._done)
        said = {"free": self._at_once - len(self._running), "running": list(self._running), "done": told}
        polling = asyncio.ensure_future(client.post(self._url, json=said))
        news = asyncio.create_task(self._news.wait())
        try:
            # What has been told must arrive. A poll without results can be given up, and sent again with them.
            await asyncio.wait({polling} if told else {polling, news}, return_when=asyncio.FIRST_COMPLETED)
            if not polling.done():
                return
        finally:
            polling.cancel()
            news.cancel()
        reply = polling.result()
        if reply.status_code == 401:
            raise AgentFailed(reply.json()["error"]["message"])
        if reply.status_code != 200:
            raise httpx.RemoteProtocolError(f"status {reply.status_code}: {reply.text[:200]}")
        for name in told:
            del self._done[name]
        answer = reply.json()
        await self._end(answer["end"])
        for name, work in answer["start"].items():
            self._running[name] = asyncio.create_task(self._run(name, work))

    async def _run(self, name: str, work: dict[str, Any]) -> None:
        deadline_s = work["deadline_s"]
        try:
            async with asyncio.timeout(deadline_s):
                returned = await run_command(self._command, work["address"], work["key"], work["row"], self._passed)
            self._done[name] = {"returned": returned}
        except TimeoutError:
            self._done[name] = {"failed": f"the agent was not done within deadline_s={deadline_s:g}"}
        except Exception as error:  # whatever fails here must be told to the run
            self._done[name] = {"failed": str(error) if isinstance(error, AgentFailed) else repr(error)}
        finally:
            self._running.pop(name, None)
            self._news.set()

    async def _end(self, names: Sequence[str]) -> None:
        ended = [self._running[name] for name in names if name in self._running]
        for task in ended:
            task.cancel()
        await asyncio.gather(*ended, return_exceptions=True)


async def call(agent: str) -> str:
    """Call the function ``agent`` in this process, which `run_command` has started; return its reward as JSON."""
    module, _, name = agent.rpartition(".")
    function = getattr(importlib.import_module(module), name)
    row = json.loads(Path(os.environ[ROW]).read_text())
    returned = await run_callable(function, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], row)
    return json.dumps(returned, default=float)


async def serve_until_ended(worker: Worker) -> int:
    serving = asyncio.create_task(worker.serve())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    try:
        await serving
    except asyncio.CancelledError:
        return 0
    except AgentFailed as error:
        logger.error("%s", error)
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
    if options.connect is None:
        parser.error("--connect is required")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    command = options.command or shlex.join([sys.executable, "-m", "recipe.agents.worker", "--call", options.agent])
    passed = [name.strip() for name in options.passed.split(",") if name.strip()]
    return asyncio.run(serve_until_ended(Worker(options.connect, command, passed, options.at_once)))


if __name__ == "__main__":
    sys.exit(main())

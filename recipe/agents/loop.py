# SPDX-License-Identifier: Apache-2.0
"""verl's agent loop for any agent that calls a model through OpenAI's API.

Contract: each trajectory's agent gets its own address at the gateway of this process, which answers until the agent has
ended. Every token of a recorded answer has mask 1 in exactly one output (`TokenTree`). There is one output if each
request continues the conversation of the one before, and otherwise a list. If the agent or an engine fails, or a
deadline passes, the trajectory fails (but see ``overlong_reward``). The settings are arguments in the file that
``agent_loop_config_path`` names, as for every agent loop. Shown by tests/integration/test_agents.py and
tests/e2e/test_agents.py.
"""

from __future__ import annotations

import asyncio
import inspect
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from contextvars import copy_context
from typing import Any

import hydra
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from recipe.agents.desk import run_on_hosts, source_address
from recipe.agents.errors import AgentFailed
from recipe.agents.gateway import Gateway
from recipe.agents.runner import names_in, reward_of, run_callable, run_command
from recipe.agents.session import Session
from recipe.agents.tree import Segment
from recipe.async_engine.core.columns import REPORTED, UNMATCHED_SHARE

MOST_THREADS = 4096
"""Largest number of threads for a worker's blocking calls: more than it has trajectories. They start when needed."""

_gateways: dict[tuple[asyncio.AbstractEventLoop, str], Gateway] = {}
_places: dict[tuple[asyncio.AbstractEventLoop, int], asyncio.Semaphore] = {}


class OpenAIAgentLoop(AgentLoopBase):
    """Runs a user's agent, which reaches the policy at an address of its own.

    Args:
        agent: name of an ``async def run(client, row) -> float | dict``, or None.
        command: a command line, or None.
        hosts: ``address:port`` at which workers on hosts of the user get the trajectories (`recipe.agents.worker`), or
            None. Exactly one of ``agent``, ``command`` and ``hosts`` has to be given.
        at_once: how many agents a worker runs at once; None means no limit. A trajectory's wait for its turn counts
            toward its own deadline, but not toward ``deadline_s``.
        deadline_s: seconds that an agent may take; None means that only the trajectory's own deadline holds.
        overlong_reward: reward of a trajectory whose agent failed after its conversation became too long for another
            answer. With None such a trajectory fails.
        passed: names of further environment variables that the command gets, separated by commas.
        reasoning: name of the engine's parser that splits answers into reasoning and text, or None.
        host: the address on which the gateway listens. None means loopback, or with ``hosts`` the address of this node
            in the network of ``hosts``.
    """

    def __init__(
        self,
        *args: Any,
        agent: str | None = None,
        command: str | None = None,
        hosts: str | None = None,
        at_once: int | None = None,
        deadline_s: float | None = None,
        overlong_reward: float | None = None,
        passed: str = "",
        reasoning: str | None = None,
        host: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if [agent, command, hosts].count(None) != 2:
            raise AgentFailed(
                "the agent loop needs agent= (a callable's name), command= (a command line) or hosts= (an address)"
            )
        self._agent = None if agent is None else hydra.utils.get_method(agent)
        if self._agent is not None and not inspect.iscoroutinefunction(self._agent):
            raise AgentFailed(f"{agent} is not an `async def`; run a program that blocks with command= instead")
        self._command, self._passed = command or "", names_in(passed)
        self._at_once, self._deadline_s, self._overlong_reward = at_once, deadline_s, overlong_reward
        self._hosts, self._reasoning = hosts, reasoning
        self._host = host or ("127.0.0.1" if hosts is None else source_address(hosts))
        self.session: Session | None = None

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """Run the agent for a data row, and return one `AgentLoopOutput` of verl, or a list of them.

        Raises:
            AgentFailed: the agent failed, took too long, or got no answer from the policy.
        """
        async with self._place():
            self.session = session = Session(self, sampling_params, copy_context(), self._reasoning)
            gateway = running_gateway(self._host)
            address, key = gateway.open(session)
            try:
                returned = await self._returned(session, address, key, kwargs)
            finally:
                await gateway.close(address)
        reward, report = reward_of(returned)
        segments = session.tree.segments()
        if not segments:
            raise AgentFailed("the agent ended without an answer from the policy")
        outputs = [self._output(session, segment, reward, report) for segment in segments]
        return outputs[0] if len(outputs) == 1 else outputs

    def _place(self) -> AbstractAsyncContextManager[Any]:
        if self._at_once is None:
            return nullcontext()
        here = (asyncio.get_running_loop(), self._at_once)
        return _places.setdefault(here, asyncio.Semaphore(self._at_once))

    async def _returned(self, session: Session, address: str, key: str, row: dict[str, Any]) -> Any:
        try:
            async with asyncio.timeout(None if self._hosts else self._deadline_s) as limit:
                if self._hosts is not None:
                    work = {"address": address, "key": key, "row": row, "deadline_s": self._deadline_s}
                    returned = await run_on_hosts(self._hosts, work)
                elif self._agent is not None:
                    returned = await run_callable(self._agent, address, key, row)
                else:
                    returned = await run_command(self._command, address, key, row, self._passed)
        except Exception as error:  # a user's agent may raise anything
            if session.failure is not None:
                raise session.failure from error
            if isinstance(error, TimeoutError) and limit.expired():
                raise AgentFailed(f"the agent was not done within deadline_s={self._deadline_s:g}") from error
            if session.overlong and self._overlong_reward is not None:
                return self._overlong_reward
            raise
        if session.failure is not None:
            raise session.failure
        return returned

    def _output(
        self, session: Session, segment: Segment, reward: float | None, report: dict[str, Any]
    ) -> AgentLoopOutput:
        sampled, pictures = session.outputs[segment.last], session.pictures[segment.last]
        sent = session.matched + session.unmatched
        return AgentLoopOutput(
            prompt_ids=segment.prompt,
            response_ids=segment.response,
            response_mask=segment.mask,
            response_logprobs=segment.log_probs if sampled.log_probs else None,
            routed_experts=sampled.routed_experts,
            multi_modal_data={"images": pictures} if pictures else {},
            reward_score=reward,
            num_turns=2 * segment.turns,
            metrics=AgentLoopMetrics(),
            extra_fields={
                **({REPORTED: report} if report else {}),
                UNMATCHED_SHARE: session.unmatched / sent if sent else 0.0,
            },
        )


def running_gateway(host: str) -> Gateway:
    """Return the gateway of the running event loop on ``host``; start it if there is none yet."""
    here = (asyncio.get_running_loop(), host)
    if here not in _gateways:
        # Libraries run blocking agents and tools in `asyncio.to_thread`. By default it has few threads. If all of them
        # waited for answers of the policy, verl's templates and parsers would never get a thread.
        here[0].set_default_executor(ThreadPoolExecutor(MOST_THREADS, "agents"))
        _gateways[here] = Gateway(host)
        _gateways[here].start()
    return _gateways[here]

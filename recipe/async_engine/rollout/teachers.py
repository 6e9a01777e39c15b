# SPDX-License-Identifier: Apache-2.0
"""The teachers of on-policy distillation: verl's servers of the teacher models, and the client that asks them.

Contract: verl starts the servers, on accelerators that were reserved for them (`start_teachers`), as replicas of this
package's engine. Each agent-loop worker asks them for the log-probs of an answer's tokens once the answer is sampled.
Each call goes to that server of the teacher which has the fewest open calls from this worker. A server that has died,
or that does not answer a ping after a call timed out, gets no more calls. A lost server is not replaced. If a teacher
has no server left, calls to this teacher fail. Shown by tests/integration/test_teachers.py and
tests/e2e/test_distillation.py.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from verl.experimental.teacher_loop import MultiTeacherModelManager
from verl.experimental.teacher_loop.teacher_manager import AsyncTeacherLLMServerManager
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import RolloutReplicaRegistry, TokenOutput

from recipe.async_engine.actors.worker_set import WorkerSet, as_handle
from recipe.async_engine.config.placement import TEACHER_POOL
from recipe.async_engine.config.verdicts import TEACHERS_ENGINE
from recipe.async_engine.core.deadlines import TEACHER_S
from recipe.async_engine.engines.protocol import engine_class
from recipe.async_engine.engines.reservation import Reservations
from recipe.async_engine.rollout.loop_output import RewardError


class TeacherError(RewardError):
    """A teacher returned no log-probs for a complete answer. This has the same consequences as a failed reward."""


class TeacherClient(LLMServerClient):
    """verl's client of one teacher's servers, without verl's load balancer, which would keep asking dead servers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._servers = WorkerSet("teacher", (), TEACHER_S)

    def use(self, servers: Sequence[Any]) -> None:
        """Send calls to these servers, given as actor handles, from now on."""
        self._servers = WorkerSet("teacher", servers, TEACHER_S * random.uniform(1.0, 1.5))

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        return "", as_handle("generate", self._generate)

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        """Do nothing, because `WorkerSet` counts the open calls."""

    async def _generate(self, **request: Any) -> TokenOutput:
        output: TokenOutput = await self._servers.ask(lambda server: server.generate.remote(**request))
        return output


def teacher_clients(config: Any) -> dict[str, LLMServerClient] | None:
    """Return a client for each of verl's teacher keys, or None without distillation. The clients have no servers before
    `TeacherClient.use` is called.
    """
    if not config.distillation.enabled:
        return None
    return {key: TeacherClient(config) for key in omega_conf_to_dataclass(config.distillation).teacher_models}


def start_teachers(config: Any, reservations: Reservations) -> MultiTeacherModelManager:
    """Start the servers of all teachers, ask each teacher once, and return verl's manager.

    The caller has to keep a reference to the manager, because the servers end when it is deleted.
    """
    replica = partial(engine_class(TEACHERS_ENGINE), reservations=reservations)
    RolloutReplicaRegistry.register(TEACHERS_ENGINE, lambda: replica)
    manager = MultiTeacherModelManager(config, reservations.pool(TEACHER_POOL))
    asyncio.run(_ask_each(config, manager.server_handles))
    return manager


async def _ask_each(config: Any, servers: Mapping[str, Sequence[Any]]) -> None:
    clients = {key: TeacherClient(config) for key in servers}
    for key, client in clients.items():
        client.use(servers[key])
    verls = AsyncTeacherLLMServerManager(config, clients)
    await asyncio.gather(*[verls.compute_teacher_logprobs_single([0, 1], routing_key=key) for key in servers])

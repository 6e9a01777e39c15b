# SPDX-License-Identifier: Apache-2.0
"""The teachers of on-policy distillation: verl's servers of the teacher models, and the client that asks them.

Contract: verl starts the servers, on accelerators that were reserved for them (`start_teachers`), as replicas of this
package's engine. Each agent-loop worker asks them for the log-probs of an answer's tokens once the answer is sampled.
Each call goes to that server of the teacher which has the fewest open calls from this worker. A server that has died,
or that does not answer a ping after a call timed out, gets no more calls. `Teachers` replaces it on the same
accelerators, within the run's budget of restarts. Calls to a teacher without a server wait for the replacement, up to
their own deadline. If there can be no replacement, the run ends with an error that names the teacher. Shown by
tests/integration/test_teachers.py and tests/e2e/test_distillation.py.
"""

import asyncio
import itertools
import logging
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError
from verl.experimental.teacher_loop import MultiTeacherModelManager
from verl.experimental.teacher_loop.teacher_manager import AsyncTeacherLLMServerManager
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from recipe.async_engine.actors.replacement import Replacements, Restarts, end_processes
from recipe.async_engine.actors.worker_set import WorkerSet, WorkersLost, as_handle
from recipe.async_engine.config.placement import TEACHER_POOL
from recipe.async_engine.config.verdicts import TEACHERS_ENGINE
from recipe.async_engine.core.deadlines import TEACHER_S, Silence
from recipe.async_engine.core.errors import CannotGoOn
from recipe.async_engine.engines.protocol import engine_class
from recipe.async_engine.engines.reservation import Reservations
from recipe.async_engine.rollout.loop_output import RewardError

logger = logging.getLogger(__name__)

Handles = dict[str, list[Any]]
"""The actor handles of each teacher's servers, by verl's key of the teacher."""
Fail = Callable[[BaseException], None]
LOOK_S = 1.0


class TeacherError(RewardError):
    """A teacher returned no log-probs for a complete answer. This has the same consequences as a failed reward."""


class TeacherClient(LLMServerClient):
    """verl's client of one teacher's servers, without verl's load balancer, which would keep asking dead servers."""

    def __init__(self, config: Any, key: str) -> None:
        super().__init__(config)
        self._kind = f"teacher {key}"
        self._servers, self._changed = WorkerSet(self._kind, (), TEACHER_S), asyncio.Event()

    def use(self, servers: Sequence[Any]) -> None:
        """From now on, send calls to ``servers`` (actor handles). If none is alive, calls wait for new ``servers``."""
        self._servers = WorkerSet(self._kind, servers, TEACHER_S * random.uniform(1.0, 1.5))
        self._changed.set()
        self._changed = asyncio.Event()

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        return "", as_handle("generate", self._generate)

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        """Do nothing, because `WorkerSet` counts the open calls."""

    async def _generate(self, **request: Any) -> TokenOutput:
        while True:
            changed = self._changed
            try:
                output: TokenOutput = await self._servers.ask(lambda server: server.generate.remote(**request))
                return output
            except WorkersLost:
                await changed.wait()


def teacher_clients(config: Any) -> dict[str, LLMServerClient] | None:
    """Return a client for each of verl's teacher keys, or None without distillation. The clients have no servers before
    `TeacherClient.use` is called.
    """
    if not config.distillation.enabled:
        return None
    return {key: TeacherClient(config, key) for key in omega_conf_to_dataclass(config.distillation).teacher_models}


def start_teachers(config: Any, reservations: Reservations) -> "Teachers":
    """Start the servers of all teachers, and send a test request to each."""
    replica = partial(engine_class(TEACHERS_ENGINE), reservations=reservations)
    RolloutReplicaRegistry.register(TEACHERS_ENGINE, lambda: replica)
    manager = MultiTeacherModelManager(config, reservations.pool(TEACHER_POOL))
    asyncio.run(_ask_each(config, manager.server_handles))
    return Teachers({key: list(each.rollout_replicas) for key, each in manager.teacher_model_managers.items()})


async def _ask_each(config: Any, servers: Mapping[str, Sequence[Any]]) -> None:
    """Ask each server about an answer of the greatest length, so that one without the memory for it fails now."""
    longest = [0] * (config.data.max_prompt_length + config.data.max_response_length)
    for number in range(max(map(len, servers.values()))):
        clients = {key: TeacherClient(config, key) for key in servers}
        for key, client in clients.items():
            client.use([servers[key][number % len(servers[key])]])
        verls = AsyncTeacherLLMServerManager(config, clients)
        await asyncio.gather(*[verls.compute_teacher_logprobs_single(longest, routing_key=key) for key in servers])


class Teachers:
    """The living replicas, by verl's key of their teacher. A thread replaces replicas that are lost (`watch`)."""

    def __init__(self, replicas: dict[str, list[RolloutReplica]]) -> None:
        self.replicas = replicas
        # The names of servers contain the replica's number, so no number is used twice.
        self._numbers = itertools.count(sum(len(replicas[key]) for key in replicas))
        self._over = threading.Event()

    @property
    def server_handles(self) -> Handles:
        return {key: [replica.server_handle for replica in replicas] for key, replicas in self.replicas.items()}

    def watch(self, restarts: Restarts, startup_s: float, tell: Callable[[Handles], None], fail: Fail) -> None:
        """From now on, replace lost replicas within the budget ``restarts``; each may take ``startup_s`` to start.

        Args:
            tell: passes the servers to the agent-loop workers, after each change.
            fail: ends the run with an error, if a teacher has no server left and can get none.
        """
        begun = {key: Replacements(restarts, startup_s, end_processes) for key in self.replicas}

        def watch() -> None:
            while not self._over.wait(LOOK_S):
                try:
                    if self._look(begun):
                        tell(self.server_handles)
                    for key in self.replicas:
                        if not self.replicas[key] and not begun[key].under_way:
                            limit = f"async_training.max_replica_restarts={restarts.most}"
                            fail(CannotGoOn(f"teacher {key} has no server left, and none can be started ({limit})"))
                except Exception:  # an error inside the watch must not end the watch
                    logger.exception("the watch over the teachers failed, and goes on")

        threading.Thread(target=watch, name="teachers", daemon=True).start()

    def stop(self) -> None:
        """Replace no more replicas, because the run ends."""
        self._over.set()

    def _look(self, begun: Mapping[str, Replacements]) -> bool:
        """Add replicas that have started, begin to replace lost ones, and return whether any started or was lost."""
        lost, changed = self._lost(), False
        for key, replicas in self.replicas.items():
            here = [replica for replica in replicas if replica in lost]
            started = begun[key].take()
            self.replicas[key] = [*(replica for replica in replicas if replica not in lost), *started]
            for replica in here:
                what = f"a server of teacher {key} in the place of number {replica.replica_rank}"
                logger.error("server %d of teacher %s is lost", replica.replica_rank, key)
                begun[key].begin(what, replica, partial(self._start_another, replica))
            changed |= bool(here or started)
        return changed

    def _lost(self) -> list[RolloutReplica]:
        """Return the replicas of which a server has died, has lost its engine, or does not answer for `TEACHER_S`."""
        replicas = [replica for each in self.replicas.values() for replica in each]
        asked = {server.check_engine.remote(): replica for replica in replicas for server in replica.servers}
        silence, late = Silence("a teacher's server does not answer", TEACHER_S), list(asked)
        while late and not silence.too_long() and not self._over.is_set():
            _, late = ray.wait(late, num_returns=len(late), timeout=LOOK_S)
        if self._over.is_set():
            return []
        return [asked[answer] for answer in asked if answer in late or _failed(answer)]

    def _start_another(self, lost: RolloutReplica) -> RolloutReplica:
        """Start a replica on the accelerators of ``lost``, whose processes have ended."""
        settings = lost.config, lost.model_config, lost.gpus_per_node
        named = {"is_teacher_model": True, "name_suffix": lost.name_suffix.removeprefix("_")}
        replica = engine_class(TEACHERS_ENGINE)(next(self._numbers), *settings, **named)
        try:
            asyncio.run(replica.init_colocated(lost.resource_pool))
        except BaseException:
            with suppress(TimeoutError):
                end_processes(replica)
            raise
        return replica


def _failed(answer: Any) -> bool:
    try:
        ray.get(answer)
    except ActorUnavailableError:
        return False
    except RayError:
        return True
    return False

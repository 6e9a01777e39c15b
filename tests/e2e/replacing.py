# SPDX-License-Identifier: Apache-2.0
"""A trainer that kills a rollout replica, the log-prob server and an agent-loop worker in step ``KILL_AT_STEP``.

After the last step it writes to ``REPLACED`` what the newest of each kind was asked. At step 10 it waits for pending
replacements, so that the run does not end before. It sends a request to a server over HTTP before its first weights and
at step 2, when it also drops a request that the engine is working on.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import ray
from recording import kill, pid_of

from recipe.async_engine.rollout.worker_pool import WorkerPool
from recipe.async_engine.trainer.base import AsyncPPOTrainer
from recipe.async_engine.weights.publisher import WeightPublisher
from recipe.async_engine.weights.replica_set import generates

START_S = 120.0


def asked_of(publisher: Any, replica: Any) -> int:
    """Return the number of conversations that the load balancer has sent to this replica."""

    def count(balancer: Any, server_id: str) -> int:
        return list(balancer._request_id_to_server.values()).count(server_id)

    return ray.get(publisher.known.load_balancer.__ray_call__.remote(count, replica.server_address), timeout=60)


def wait_for_replacements(publisher: WeightPublisher) -> None:
    """Wait until pending replacements are up."""
    deadline = time.monotonic() + START_S
    for attempt in publisher._replacements._attempts:
        attempt.result.result(max(0.0, deadline - time.monotonic()))


def wait_for_agents(pool: WorkerPool) -> None:
    """Wait until the first agent-loop worker is up again."""
    deadline = time.monotonic() + START_S
    while pool.lives.total() == 0 and time.monotonic() < deadline:
        time.sleep(0.1)


def drop_a_request(server: Any) -> bool:
    """Return whether dropping a request in the engine ends it and leaves nothing in the engine."""
    for attempt in range(20):
        name = f"unwanted-{attempt}"
        sampling = {"max_tokens": 20, "min_tokens": 20, "ignore_eos": True, "logprobs": True}
        answer = server.generate.remote(prompt_ids=[1, 2, 3], sampling_params=sampling, request_id=name)
        while name not in ray.get(server.sampled_since.remote({name: 0}), timeout=30):
            if ray.wait([answer], timeout=0)[0]:
                break
        server.drop_request.remote(name)
        ended = ray.get(answer, timeout=30)
        states = server.__ray_call__.remote(lambda server: list(server._engine_requests()))
        # The request may have completed before it was dropped; then another one is tried.
        if ended.stop_reason == "aborted" and not ended.token_ids:
            return not any(name in state for state in ray.get(states, timeout=30))
    return False


class ReplacingTrainer(AsyncPPOTrainer):
    def init_workers(self) -> None:
        super().init_workers()
        self.http_statuses = [self._complete_over_http()]

    def _train(self, groups: list[Any]) -> Any:
        if self.global_steps == int(os.environ["KILL_AT_STEP"]):
            kill(self.publisher.replicas[1])
            kill(self.publisher.servers[0])
            os.kill(pid_of(self.async_rollout_manager.agent_loop_workers[0]), signal.SIGKILL)
        if self.global_steps == 2:
            self.http_statuses.append(self._complete_over_http())
            self.dropped = drop_a_request(self.publisher.replicas[0].server_handle)
        if self.global_steps == 10:
            wait_for_replacements(self.publisher)
            wait_for_agents(self.scheduler._pool)
        batch = super()._train(groups)
        if self.is_last_step:
            self._write()
        return batch

    def _complete_over_http(self) -> int:
        replica = self.publisher.replicas[0]
        body = {"model": self.config.actor_rollout_ref.model.path, "prompt": [1, 2, 3], "max_tokens": 2}
        return httpx.post(f"http://{replica.server_address}/v1/completions", json=body, timeout=60).status_code

    def _write(self) -> None:
        replica = next(replica for replica in reversed(self.publisher.replicas) if generates(replica))
        server = self.publisher.servers[-1]
        answered = {
            "replica": replica.replica_rank,
            "asked": asked_of(self.publisher, replica),
            "http_statuses": self.http_statuses,
            "dropped": self.dropped,
            "server": server.replica_rank,
            "answered_tokens": ray.get(server.server_handle.account.remote(), timeout=10)["answered_tokens"],
        }
        Path(os.environ["REPLACED"]).write_text(json.dumps(answered))

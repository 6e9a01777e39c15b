# SPDX-License-Identifier: Apache-2.0
"""Real actors of every kind that holds calls open, at a limit of two such calls, answer what controls them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from recipe.async_engine.actors.control import Restartable, sign_of_life, with_control
from recipe.async_engine.core.scoring import ScoringSettings
from recipe.async_engine.engines.gated_server import HELD as HELD_ANSWERS
from recipe.async_engine.engines.load_balancer import HELD as HELD_ROUTES
from recipe.async_engine.engines.load_balancer import CountingBalancer
from recipe.async_engine.log_prob_servers.replica import CONTROLS
from recipe.async_engine.log_prob_servers.replica import HELD as HELD_SCORES
from recipe.async_engine.log_prob_servers.server import ModelEngineServer
from recipe.async_engine.rewards.scoring_worker import HELD as HELD_REWARDS
from recipe.async_engine.rollout.trajectory_manager import HELD as HELD_TRAJECTORIES

SOON = 60.0
LIMIT = 2
HELD_S = 3600.0


def get(answer: Any) -> Any:
    return ray.get(answer, timeout=SOON)


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# Classes are made in functions, so that Ray sends them by value: its processes cannot import test modules.


def agent_class() -> type:
    from recipe.async_engine.actors.control import EarlyCancellations
    from recipe.async_engine.record.activity import AwayActivity
    from recipe.async_engine.rollout.client import TurnGate
    from recipe.async_engine.rollout.kept_answers import AnswerBook
    from recipe.async_engine.rollout.rehearsal import Rehearsal
    from recipe.async_engine.rollout.trajectory_worker import TrajectoryWorker

    class Agent(TrajectoryWorker):
        """The worker as it is, without a model: its agent loops never end."""

        def __init__(self) -> None:
            self._scoring = self._reference = None
            self._is_prepared, self._score_parts = True, False
            self._answers, self._running = AnswerBook(), {}
            self._unwanted, self._away = EarlyCancellations(), AwayActivity(time.monotonic)
            self._trajectory_timeout_s = HELD_S

            class NoClient:
                gate = TurnGate(HELD_S)

                async def fetch(self, flights: Any, timeout_s: float) -> None:
                    pass

            self.llm_client = NoClient()

            self._default_loop, self._rehearsal = "none", Rehearsal(self._no_model)

        async def _no_model(self) -> None:
            raise NotImplementedError

        async def _run_row(self, *arguments: Any, **fields: Any) -> Any:
            await asyncio.sleep(HELD_S)

    return Agent


def test_agent_loop_worker_cancels_and_ends_turns_however_many_trajectories_it_has(cluster: None) -> None:
    worker = Restartable(agent_class(), 1, HELD_TRAJECTORIES, max_concurrency=LIMIT).options().remote()
    run = worker.run_trajectory.options(num_returns=2)
    calls = {key: run.remote(key, {}, 0, 0, 0) for key in ("0-0-0", "0-1-0", "1-0-0", "1-1-0")}

    def running() -> list[str]:
        named = get(worker.describe.remote())[0].removeprefix("trajectories: ")
        return [] if named == "none" else named.split(", ")

    wait_for(lambda: len(running()) == LIMIT)
    first, second = running()
    get(sign_of_life(worker).remote())
    assert get(worker.hold.remote()).cut == 0
    get(worker.go_on.remote())
    assert get(worker.export.remote(5.0))[0] == {first: None, second: None}
    # One that has not begun is cancelled as well, by a call that has overtaken it.
    waiting, other = sorted(calls.keys() - {first, second})
    get(worker.cancel.remote([first, second, waiting]))
    for key in (first, second, waiting):
        with pytest.raises(RayTaskError, match=f"trajectory {key} was ended on request"):
            get(calls[key])
    wait_for(lambda: running() == [other])


def server_class() -> type:
    from recipe.async_engine.actors.control import EarlyCancellations
    from recipe.async_engine.engines.vllm.server import GatedVLLMHttpServer
    from recipe.async_engine.engines.weights_gate import WeightsGate
    from recipe.async_engine.record.activity import EngineActivity

    class Server(GatedVLLMHttpServer):
        """The server as it is, without an engine: it waits for weights."""

        def __init__(self) -> None:
            self._gate, self._tasks, self._dropped, self._recomputed = WeightsGate(opened=False), {}, set(), {}
            self._unwanted, self._activity = EarlyCancellations(), EngineActivity(time.monotonic, LIMIT)
            self._versions = type("NoVersions", (), {"forget": lambda self, request: None})()
            self._first_weights_timeout_s, self.node_rank, self.global_steps = HELD_S, 1, None
            self._checksum, self._submission_paused, self._admitting = None, False, 0
            self._resume_event, self._rejecting = asyncio.Event(), False

        async def requests(self) -> list[str]:
            return list(self._tasks)

    return Server


def test_rollout_server_drops_loads_and_leaves_routing_however_many_requests_it_has(cluster: None) -> None:
    server = with_control(server_class(), HELD_ANSWERS).options(max_concurrency=LIMIT).remote()
    answers = {name: server.generate.remote([1], {}, name) for name in ("a", "b", "c", "d")}
    wait_for(lambda: len(get(server.requests.remote())) == LIMIT)
    begun = get(server.requests.remote())
    get(server.begin_load.remote(7))
    assert get(server.describe.remote())[0].startswith("weights closed, loading version 7")
    get(server.check_engine.remote())
    # One that has not begun is dropped as well, by a call that has overtaken it.
    waiting, other = sorted(answers.keys() - set(begun))
    for name in (waiting, *begun):
        get(server.drop_request.remote(name))
    assert [get(answers[name]).stop_reason for name in (waiting, *begun)] == ["aborted"] * 3
    wait_for(lambda: get(server.requests.remote()) == [other])
    get(server.leave_routing.remote())
    assert get(answers[other]).token_ids == []


def test_log_prob_server_takes_weights_however_many_sequences_wait_for_them(cluster: None) -> None:
    remote = with_control(ModelEngineServer, HELD_SCORES, CONTROLS)
    server = remote.options(max_concurrency=LIMIT).remote(ScoringSettings(), [], SOON)
    get(server.begin_load.remote(0, SOON))
    scores = [server.score.remote(None, 8, 0, 0) for _ in range(4)]
    wait_for(lambda: get(server.account.remote())["waiting"] == LIMIT)
    get(server.pause_serving.remote())
    get(server.resume_serving.remote())
    assert get(server.describe.remote())
    get(server.load_failed.remote("the trainer is gone"))
    for score in scores:
        with pytest.raises(RayTaskError, match=r"version 0 (did not come: the trainer is gone|is not here)"):
            get(score)


def reward_class() -> type:
    from recipe.async_engine.rewards.scoring_worker import ScoringWorker

    class Reward(ScoringWorker):
        """The worker as it is, with a reward function that never ends."""

        def __init__(self) -> None:
            self.pool = None
            self.calls = 0

        async def compute_score(self, data: Any) -> dict[str, Any]:
            self.calls += 1
            await asyncio.sleep(HELD_S)
            return {}

        async def begun(self) -> int:
            return self.calls

    return Reward


def test_reward_worker_gives_signs_of_life_however_many_answers_it_scores(cluster: None) -> None:
    worker = Restartable(reward_class(), 1, HELD_REWARDS, max_concurrency=LIMIT).options().remote()
    held = [worker.compute_score.remote(None) for _ in range(4)]
    wait_for(lambda: get(worker.begun.remote()) == LIMIT)
    get(sign_of_life(worker).remote())
    assert get(worker.pool_stats.remote())[1]["pending"] == 0
    assert get(worker.describe.remote())[0] == "no pool"
    assert ray.wait(held, timeout=0)[0] == []


def test_load_balancer_takes_servers_out_beside_the_requests_that_it_works_on(cluster: None) -> None:
    balancer = with_control(CountingBalancer, HELD_ROUTES).remote(servers={})
    get(balancer.add_servers.remote({"one": None, "two": None}))
    first = get(balancer.acquire_server.remote(request_id="r"))[0]
    assert get(balancer.acquire_server.remote(request_id="s", ended=[first]))[0] in ("one", "two")
    assert get(balancer.get_total_inflight.remote()) == 1
    # Ray's own call takes the one thread that requests have.
    held = balancer.__ray_call__.remote(lambda balancer: time.sleep(HELD_S))
    queued = [balancer.acquire_server.remote(request_id=str(number)) for number in range(100)]
    get(balancer.remove_servers.remote(["two"]))
    assert get(balancer.get_all_servers.remote()) == ["one"]
    get(sign_of_life(balancer).remote())
    assert ray.wait([held, *queued], timeout=0)[0] == []
    ray.kill(balancer)


def counting_class() -> type:
    import threading

    class Counting:
        """Tells on which thread each of its methods is run."""

        def __init__(self) -> None:
            self.threads = {threading.get_ident()}

        async def stream(self) -> AsyncGenerator:
            self.threads.add(threading.get_ident())
            yield None

        async def change(self) -> int:
            self.threads.add(threading.get_ident())
            await asyncio.sleep(0)
            self.threads.add(threading.get_ident())
            return await self.threads_so_far()

        async def threads_so_far(self) -> int:
            return len(self.threads)

        async def hold_the_loop(self) -> None:
            time.sleep(HELD_S)

        async def fails(self) -> None:
            raise ValueError("as it says")

        def of_its_own(self) -> str:
            return "no coroutine"

    return Counting


def test_all_that_an_actor_does_is_done_on_its_own_loop_and_a_loop_that_hangs_gives_no_sign_of_life(
    cluster: None,
) -> None:
    actor = with_control(counting_class(), ("stream", "hold_the_loop"), ("of_its_own",)).remote()
    assert get(actor.change.remote()) == 1, "a control call may be the first of all"
    get(next(actor.stream.options(num_returns="streaming").remote()))
    assert get(actor.change.remote()) == 1
    assert get(actor.of_its_own.remote()) == "no coroutine"
    with pytest.raises(RayTaskError, match="ValueError: as it says"):
        get(actor.fails.remote())
    hanging = actor.hold_the_loop.remote()
    with pytest.raises(GetTimeoutError):
        # Whichever of the two comes first: the loop may not have begun to hang.
        while True:
            ray.get(sign_of_life(actor).remote(), timeout=1.0)
    ray.kill(actor)
    del hanging


def test_method_that_the_actor_does_not_have_is_no_control_of_it() -> None:
    with pytest.raises(AssertionError, match="Counting has no"):
        with_control(counting_class(), ("stream", "strem"))

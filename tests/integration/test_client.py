# SPDX-License-Identifier: Apache-2.0
"""The client keeps, continues, relabels and re-routes answers; servers and load balancer are faked below the actors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from ray.exceptions import ActorDiedError, ActorUnavailableError
from remote_fakes import Handle, ScriptedServer, balancer_of, part
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from recipe.async_engine.core.errors import EngineDied, GenerationError, RequestFailed
from recipe.async_engine.core.versions import RequestVersions
from recipe.async_engine.engines.answers import RECOMPUTED, VERSION_RUNS, Sampled
from recipe.async_engine.engines.load_balancer import SAY_ENDED_S
from recipe.async_engine.engines.vllm.outputs import VLLMOutputs
from recipe.async_engine.record.activity import EngineActivity, Work
from recipe.async_engine.rollout import client as client_module
from recipe.async_engine.rollout.chosen_experts import ChosenExperts
from recipe.async_engine.rollout.client import MOST_FAILURES, ResumingClient
from recipe.async_engine.rollout.kept_answers import TrajectoryRecorder, start_recording

PROMPT = [1, 2, 3]
OF_A_TURN = dict.fromkeys(["batch_wait", "weight_sync", "checkpoint"], 20.0)


def make_client(
    balancer: GlobalRequestLoadBalancer,
    *,
    resume: bool = True,
    timeout_s: float = 20.0,
    every_s: float | None = None,
    policy: str = "fcfs",
    **more: Any,
) -> ResumingClient:
    rollout = {"name": "vllm", "prompt_length": 4, "response_length": 8, "scheduling_policy": policy, **more}
    config = OmegaConf.create(
        {
            "async_training": {
                "partial_rollout": resume,
                "timeouts": {"generation": timeout_s, **OF_A_TURN},
                "partial_tokens_interval": every_s,
            },
            "actor_rollout_ref": {"rollout": rollout},
        }
    )
    return ResumingClient(config, load_balancer_handle=Handle(balancer))


def client_of(*servers: ScriptedServer, **settings: Any) -> ResumingClient:
    return make_client(balancer_of(*servers), **settings)


async def ask(client: ResumingClient, request_id: str = "request", **sampling: Any) -> Any:
    return await client.generate(request_id, prompt_ids=list(PROMPT), sampling_params=sampling)


@pytest.fixture
def no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forbidden(seconds: float, *args: Any) -> None:
        raise AssertionError(f"slept {seconds} s")

    monkeypatch.setattr(asyncio, "sleep", forbidden)


async def test_aborted_answer_is_continued_at_once_with_its_tokens_and_the_parameters_of_the_whole(
    no_sleep: None,
) -> None:
    server = ScriptedServer(part([10, 11], 0, "aborted"), part([12], 1, "abort"), part([13, 14], 2))
    answer = await ask(client_of(server), max_tokens=6, temperature=1.0)
    assert answer.token_ids == [10, 11, 12, 13, 14]
    assert answer.log_probs == [-10.0, -11.0, -12.0, -13.0, -14.0]
    assert answer.stop_reason == "completed"
    assert [call["prompt_ids"] for call in server.calls] == [PROMPT, [*PROMPT, 10, 11], [*PROMPT, 10, 11, 12]]
    # The engine is asked for the rest of the whole answer: what counts, seeds and ends it goes by all of its tokens.
    assert [call["sampled"] for call in server.calls] == [0, 2, 3]
    assert [call["sampling_params"]["max_tokens"] for call in server.calls] == [6, 6, 6]
    assert {call["sampling_params"]["temperature"] for call in server.calls} == {1.0}
    assert (answer.extra_fields["min_global_steps"], answer.extra_fields["max_global_steps"]) == (0, 2)


@pytest.mark.parametrize("policy", ["priority", "fcfs"])
async def test_an_engine_that_goes_by_age_is_told_the_number_of_the_group_with_each_part(policy: str) -> None:
    server = ScriptedServer(part([10, 11], 0, "aborted"), part([12], 1))
    start_recording(TrajectoryRecorder(order=7))
    client = client_of(server, policy=policy)
    # As verl's agent loops ask.
    await client.generate("request", prompt_ids=PROMPT, sampling_params={"max_tokens": 6}, priority=0)
    assert [call.get("priority") for call in server.calls] == ([7, 7] if policy == "priority" else [None, None])


async def test_answer_aborted_at_the_end_of_its_budget_is_complete_and_not_asked_for_again() -> None:
    server = ScriptedServer(part([10, 11], 0, "aborted"))
    answer = await ask(client_of(server), max_tokens=2)
    assert (answer.token_ids, answer.stop_reason, len(server.calls)) == ([10, 11], "completed", 1)


@pytest.mark.parametrize(("prompt_length", "budget"), [(3, 8), (4, 8), (9, 3), (12, 1), (20, 1)])
async def test_budget_without_max_tokens_is_the_servers_own_default(prompt_length: int, budget: int) -> None:
    server = ScriptedServer(part([10], 0))
    await client_of(server).generate("request", prompt_ids=[1] * prompt_length, sampling_params={})
    assert server.calls[0]["sampling_params"]["max_tokens"] == budget


async def test_max_new_tokens_bounds_the_whole_answer_too() -> None:
    server = ScriptedServer(part([10, 11], 0, "aborted"), part([12], 1))
    await ask(client_of(server), max_new_tokens=5)
    assert [call["sampling_params"] for call in server.calls] == [{"max_tokens": 5}, {"max_tokens": 5}]


async def test_cut_answer_is_an_error_where_resuming_is_off() -> None:
    client = client_of(ScriptedServer(part([10, 11], 0, "aborted")), resume=False)
    with pytest.raises(GenerationError, match=r"interrupted after 2 tokens.*async_training\.partial_rollout=False"):
        await ask(client, max_tokens=6)


async def test_ended_requests_are_told_to_the_load_balancer_with_the_next_one_or_soon() -> None:
    balancer = balancer_of(ScriptedServer(part([10], 0), part([11], 0)))
    client = make_client(balancer)
    told: list[list[str]] = []
    count = balancer.release_servers
    balancer.release_servers = lambda ended: (told.append(list(ended)), count(ended))[1]
    await ask(client, "first", max_tokens=1)
    assert (told, balancer.get_total_inflight()) == ([[]], 1)
    await ask(client, "second", max_tokens=1)
    assert (told, balancer.get_total_inflight()) == ([[], ["server-0"]], 1)
    await asyncio.wait_for(until(lambda: balancer.get_total_inflight() == 0), 20)
    assert told == [[], ["server-0"], ["server-0"]]
    # The clock of the first request's end finds it told.
    await asyncio.sleep(2 * SAY_ENDED_S)
    assert len(told) == 3


async def test_load_balancer_of_the_users_own_is_told_of_each_end_at_once() -> None:
    balancer = GlobalRequestLoadBalancer({"server-0": Handle(ScriptedServer(part([10], 0)))})
    await ask(make_client(balancer), max_tokens=1)
    assert balancer.get_total_inflight() == 0


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


async def test_refused_request_goes_on_where_resuming_is_off_since_nothing_was_cut() -> None:
    server = ScriptedServer(part([], 0, "aborted"), part([10], 1))
    answer = await ask(client_of(server, resume=False), max_tokens=6)
    assert (answer.token_ids, answer.extra_fields["min_global_steps"]) == ([10], 1)


async def test_refused_request_goes_to_another_server_when_the_refusing_one_has_left_routing() -> None:
    refusing, other = ScriptedServer(), ScriptedServer(part([10], 4))
    balancer = balancer_of(refusing)

    def leave(**kwargs: Any) -> Any:
        balancer.add_servers({"other": Handle(other)})
        balancer.remove_servers(["server-0"])
        return part([], 3, "aborted")

    refusing.script.append(leave)
    answer = await ask(make_client(balancer), max_tokens=6)
    assert answer.token_ids == [10]
    assert (len(refusing.calls), len(other.calls)) == (1, 1)


@pytest.mark.parametrize("death", [ActorDiedError(), EngineDied("the engine of rollout replica 0 died")])
async def test_dead_server_leaves_routing_and_the_answer_continues_elsewhere_from_its_tokens(death: Exception) -> None:
    dying, other = ScriptedServer(part([10, 11], 0, "aborted")), ScriptedServer(part([12, 13], 1))
    balancer = balancer_of(dying)

    def die(**kwargs: Any) -> Any:
        balancer.add_servers({"other": Handle(other)})
        raise death

    dying.script.append(die)
    answer = await ask(make_client(balancer), max_tokens=6)
    assert answer.token_ids == [10, 11, 12, 13]
    assert other.calls[0]["prompt_ids"] == [*PROMPT, 10, 11]
    assert (other.calls[0]["sampling_params"]["max_tokens"], other.calls[0]["sampled"]) == (6, 2)
    assert balancer.get_all_servers() == ["other"]


FAILED = RequestFailed("the engine ended a request with the finish reason 'error'")


async def test_server_that_one_process_cannot_reach_stays_in_routing() -> None:
    lost = ActorUnavailableError("RPC error: Too many open files", None)
    server = ScriptedServer(*[lost] * MOST_FAILURES, part([10, 11], 0))
    balancer = balancer_of(server)
    with pytest.raises(ActorUnavailableError):
        await ask(make_client(balancer), max_tokens=6)
    assert balancer.get_all_servers() == ["server-0"]
    answer = await ask(make_client(balancer), max_tokens=6)
    assert answer.token_ids == [10, 11]


async def test_failed_request_is_asked_of_another_server_with_the_tokens_of_the_parts_before() -> None:
    failing, other = ScriptedServer(part([10, 11], 0, "aborted"), FAILED), ScriptedServer(part([12, 13], 1))
    balancer = balancer_of(failing, other)
    # The other one has more to do.
    for taken in range(3):
        balancer._request_id_to_server[f"{taken}"] = "server-1"
        balancer.acquire_server(f"{taken}")
    answer = await ask(make_client(balancer), max_tokens=6)
    assert (answer.token_ids, answer.stop_reason) == ([10, 11, 12, 13], "completed")
    assert other.calls[0]["prompt_ids"] == [*PROMPT, 10, 11] == failing.calls[1]["prompt_ids"]
    assert (other.calls[0]["sampling_params"]["max_tokens"], other.calls[0]["sampled"]) == (6, 2)
    assert sorted(balancer.get_all_servers()) == ["server-0", "server-1"]
    # The conversation stays where it was answered.
    assert balancer.acquire_server("request")[0] == "server-1"


async def test_request_that_its_only_server_failed_is_asked_there_again() -> None:
    server = ScriptedServer(FAILED, FAILED, part([10], 0, "aborted"), FAILED, FAILED, part([11], 0))
    answer = await ask(client_of(server), max_tokens=6)
    assert (answer.token_ids, len(server.calls)) == ([10, 11], 6)


async def test_request_that_fails_again_and_again_is_an_error_with_its_reason_long_before_its_deadline() -> None:
    server = ScriptedServer(*[FAILED] * 4)
    with pytest.raises(RequestFailed, match="finish reason 'error'"):
        await ask(client_of(server), max_tokens=6)
    assert len(server.calls) == MOST_FAILURES


def rows(numbers: Iterable[int]) -> np.ndarray:
    """Return one expert of one layer for each token."""
    return np.array(list(numbers)).reshape(-1, 1, 1)


class SamplingServer:
    """Samples tokens 10, 11, ... for its one request, of which it tells, until it is told to die.

    By version 7; from the token ``swap_after`` on by version 8, if it is given.
    """

    def __init__(self, tokens: int, with_log_probs: bool = True, swap_after: int | None = None) -> None:
        self.outputs = VLLMOutputs(EngineActivity(time.monotonic, 4))
        self.versions = RequestVersions()
        # vLLM's output processor, and a request's experts in it.
        self.chunks: list[np.ndarray] = []
        self.processor = self.outputs.processor = SimpleNamespace(external_req_ids={}, request_states={})
        self.swap_after = swap_after
        self.tokens = tokens
        self.with_log_probs = with_log_probs
        self.told: list[int] = []
        self.dies = asyncio.Event()

    async def generate(self, request_id: str, **request: Any) -> Any:
        self.versions.submit(request_id, 7)
        self.processor.external_req_ids[request_id] = ["in the engine"]
        self.processor.request_states["in the engine"] = SimpleNamespace(routed_experts_chunks=self.chunks)
        if self.swap_after is not None:
            self.versions.swap({request_id: self.swap_after}, 8)
        async for _ in self.outputs.watching(self._sample)(prompt=[], sampling_params={}, request_id=request_id):
            pass

    async def _sample(self, prompt: Any, sampling_params: Any, request_id: str) -> Any:
        for count in range(1, self.tokens + 1):
            tokens = list(range(10, 10 + count))
            log_probs = [{token: SimpleNamespace(logprob=-float(token))} for token in tokens]
            answer = SimpleNamespace(token_ids=tokens, logprobs=log_probs if self.with_log_probs else None)
            yield SimpleNamespace(finished=False, outputs=[answer], prompt_token_ids=PROMPT)
        await self.dies.wait()
        raise ActorDiedError

    async def sampled_since(self, known: dict[str, int]) -> dict[str, Any]:
        news = {request_id: self._since(request_id, count) for request_id, count in known.items()}
        self.told += [len(sampled.token_ids) for sampled in news.values() if sampled.token_ids]
        if self.told:
            self.dies.set()
        return news

    def _since(self, request_id: str, known: int) -> Sampled | None:
        return self.outputs.since(request_id, known, self.versions)


@pytest.mark.parametrize("with_log_probs", [True, False])
async def test_tokens_that_were_fetched_outlive_their_server(with_log_probs: bool) -> None:
    dying, other = SamplingServer(3, with_log_probs), ScriptedServer(part([20, 21], 8))
    balancer = balancer_of(dying)
    recorder = start_recording()
    asked = asyncio.create_task(ask(make_client(balancer, every_s=0.02), max_tokens=6))
    await dying.dies.wait()
    balancer.add_servers({"other": Handle(other)})
    answer = await asked
    assert answer.token_ids == [10, 11, 12, 20, 21]
    assert answer.log_probs == ([-10.0, -11.0, -12.0] if with_log_probs else []) + [-20.0, -21.0]
    assert other.calls[0]["prompt_ids"] == [*PROMPT, 10, 11, 12]
    assert (other.calls[0]["sampling_params"]["max_tokens"], other.calls[0]["sampled"]) == (6, 3)
    assert recorder.segments == [(7, (10, 11, 12)), (8, (20, 21))]
    assert (recorder.recovered_tokens, recorder.cut_tokens, recorder.interruptions) == (3, 3, 1)
    assert (dying.told, balancer.get_all_servers()) == ([3], ["other"])


@pytest.mark.parametrize("reads_all", [True, False])
async def test_fetched_tokens_keep_the_experts_that_were_chosen_for_them(reads_all: bool) -> None:
    """Whether the engine that goes on returns the experts of all tokens, or only of those that it samples."""
    first = len(PROMPT) + 2
    dying, more = SamplingServer(3), part([20, 21], 8)
    # The output processor may have more than the newest output.
    dying.chunks += [rows(range(len(PROMPT))), *(rows([place]) for place in range(len(PROMPT), first + 1))]
    more.routed_experts = rows([-1] * (first if reads_all else 0) + [100, 101])
    balancer = balancer_of(dying)
    asked = asyncio.create_task(
        ask(make_client(balancer, every_s=0.02, enable_rollout_routing_replay=True), max_tokens=6)
    )
    await dying.dies.wait()
    balancer.add_servers({"other": Handle(ScriptedServer(more))})
    assert (await asked).routed_experts.ravel().tolist() == [*range(first), 100, 101]


async def test_later_turns_keep_the_experts_of_the_turns_before_them() -> None:
    tokens, chosen = list(range(8)), ChosenExperts()
    assert chosen.first_chosen(tokens, None) is None
    assert chosen.first_chosen(tokens[:4], rows([1, 2, 3])).ravel().tolist() == [1, 2, 3]
    assert chosen.first_chosen(tokens, rows([-1] * 7)).ravel().tolist() == [1, 2, 3, -1, -1, -1, -1]
    # Another conversation, which began like the first one.
    assert chosen.first_chosen([0, 1, 9, 9], rows([-2] * 3)).ravel().tolist() == [1, 2, -2]
    assert chosen.first_chosen([*tokens, 8], rows([-3] * 8)).ravel().tolist() == [1, 2, 3, -1, -1, -1, -1, -3]
    assert chosen.first_chosen([0, 1, 9, 8], rows([-4] * 3)).ravel().tolist() == [1, 2, -2]


@pytest.mark.parametrize("version", [7, 8])
async def test_answer_of_one_version_goes_on_elsewhere_under_that_version_only(version: int) -> None:
    dying, other = SamplingServer(3), ScriptedServer(part([20], version))
    balancer = balancer_of(dying)
    asked = asyncio.create_task(ask(make_client(balancer, resume=False, every_s=0.02), max_tokens=6))
    await dying.dies.wait()
    balancer.add_servers({"other": Handle(other)})
    if version == 7:
        answer = await asked
        assert (answer.token_ids, answer.stop_reason) == ([10, 11, 12, 20], "completed")
        assert answer.extra_fields.keys() <= {
            "global_steps",
            "submitted_version",
            "min_global_steps",
            "max_global_steps",
        }
    else:
        with pytest.raises(GenerationError, match="under version 7 and could continue only under version 8"):
            await asked


async def test_answer_begins_anew_where_no_tokens_are_fetched() -> None:
    dying, other = SamplingServer(3), ScriptedServer(part([20], 8))
    balancer = balancer_of(dying)
    asked = asyncio.create_task(ask(make_client(balancer, every_s=None), max_tokens=6))
    await asyncio.sleep(0.1)
    balancer.add_servers({"other": Handle(other)})
    dying.dies.set()
    assert (await asked).token_ids == [20]
    assert dying.told == []


async def test_fetched_tokens_keep_the_versions_on_both_sides_of_a_swap() -> None:
    dying, other = SamplingServer(3, swap_after=2), ScriptedServer(part([20], 9))
    balancer = balancer_of(dying)
    recorder = start_recording()
    asked = asyncio.create_task(ask(make_client(balancer, every_s=0.02), max_tokens=6))
    await dying.dies.wait()
    balancer.add_servers({"other": Handle(other)})
    assert (await asked).token_ids == [10, 11, 12, 20]
    assert recorder.segments == [(7, (10, 11)), (8, (12,)), (9, (20,))]


async def test_answer_that_a_swap_found_under_way_has_the_versions_that_its_server_gives() -> None:
    answer = part([10, 11, 12], 8, submitted=7)
    answer.extra_fields |= {VERSION_RUNS: [(7, 2), (8, 1)], RECOMPUTED: 5}
    recorder = start_recording()
    merged = await ask(client_of(ScriptedServer(answer)), max_tokens=6)
    assert recorder.segments == [(7, (10, 11)), (8, (12,))]
    assert (recorder.reprefilled_tokens, recorder.interruptions) == (5, 0)
    extra = merged.extra_fields
    assert (extra["min_global_steps"], extra["max_global_steps"]) == (7, 8)
    assert not extra.keys() & {VERSION_RUNS, RECOMPUTED}
    answer.extra_fields[VERSION_RUNS] = [(7, 2)]
    with pytest.raises(GenerationError, match="3 tokens, but its token counts by version have another sum"):
        await ask(client_of(ScriptedServer(answer)), max_tokens=6)


async def test_complete_answer_on_its_way_is_not_taken_for_a_part() -> None:
    async def sample(prompt: Any, sampling_params: Any, request_id: str) -> Any:
        for finished in (False, True):
            answer = SimpleNamespace(token_ids=[10, 11], logprobs=None)
            yield SimpleNamespace(finished=finished, outputs=[answer], prompt_token_ids=[1])

    watch, versions = VLLMOutputs(EngineActivity(time.monotonic, 4)), RequestVersions()
    versions.submit("one", 4)
    watch.processor = SimpleNamespace(external_req_ids={}, request_states={})
    told = []
    async for _ in watch.watching(sample)([], {}, "one"):
        told.append([watch.since("one", known, versions) for known in (0, 1, 2)])
    nothing = Sampled([], [], None)
    assert told == [[Sampled([10, 11], [(4, 2)], None), Sampled([11], [(4, 1)], None), nothing], [None, None, None]]
    assert watch.since("one", 0, versions) == nothing


async def test_death_of_the_last_server_is_said_in_words() -> None:
    with pytest.raises(GenerationError, match="no rollout server can take requests"):
        await ask(client_of(ScriptedServer(ActorDiedError())), max_tokens=6)


async def test_deadline_error_names_its_setting_and_the_server_and_releases_its_place() -> None:
    balancer = balancer_of(ScriptedServer("hang"))
    with pytest.raises(GenerationError, match=r"server-0.*within 0\.05 s.*async_training\.timeouts\.generation"):
        await ask(make_client(balancer, timeout_s=0.05), max_tokens=6)
    await asyncio.wait_for(until(lambda: balancer.get_total_inflight() == 0), 20)


async def test_request_whose_time_is_over_is_dropped_at_its_server() -> None:
    server = ScriptedServer("hang")
    with pytest.raises(GenerationError, match="did not answer"):
        await ask(client_of(server, timeout_s=0.05), max_tokens=6)
    await asyncio.sleep(0)
    assert server.dropped == [server.calls[0]["request_id"]]


async def test_request_whose_trajectory_is_cancelled_is_dropped_and_an_answered_one_is_not() -> None:
    server = ScriptedServer(part([10], 0), "hang")
    client = client_of(server)
    await ask(client, max_tokens=6)
    cancelled = asyncio.create_task(ask(client, max_tokens=6))
    while len(server.calls) < 2:
        await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await asyncio.sleep(0)
    assert server.dropped == [server.calls[1]["request_id"]]


class SlowServer(ScriptedServer):
    """Cuts its first answer; each takes some turns of the event loop."""

    def __init__(self) -> None:
        super().__init__()
        self.answered: list[str] = []

    async def generate(self, **request: Any) -> Any:
        self.calls.append(request)
        for _ in range(3):
            await asyncio.sleep(0)
        self.answered.append(request["request_id"])
        return part([10], 0, "aborted") if len(self.calls) == 1 else part([11], 1)


async def test_cancellation_ends_a_request_at_whichever_moment_it_comes() -> None:
    """Also together with the load balancer's answer, or a server's: none is swallowed, none leaves work behind."""
    moment, cancelled = 0, True
    while cancelled:
        server = SlowServer()
        balancer = balancer_of(server)
        client = make_client(balancer)
        asked = asyncio.create_task(ask(client, max_tokens=6))
        for _ in range(moment):
            await asyncio.sleep(0)
        cancelled = asked.cancel()
        if cancelled:
            with pytest.raises(asyncio.CancelledError):
                await asked
        await asyncio.wait_for(until(lambda balancer=balancer: balancer.get_total_inflight() == 0), 20)
        assert not client._flights
        assert {call["request_id"] for call in server.calls} <= {*server.dropped, *server.answered}
        moment += 1
    assert moment > 10, "otherwise this would show little"


@pytest.mark.parametrize("parameters", [{"n": 2}, {"output_kind": 1}])
async def test_parameters_that_no_answer_can_be_asked_for_with_are_refused_by_name(parameters: dict[str, Any]) -> None:
    server = ScriptedServer()
    with pytest.raises(GenerationError, match=next(iter(parameters))):
        await ask(client_of(server), **parameters)
    assert not server.calls


class Refusing(ScriptedServer):
    """Answers every request as aborted without a token."""

    async def generate(self, **request: Any) -> Any:
        self.calls.append(request)
        await asyncio.sleep(0)
        return part([], 0, "aborted")


async def test_server_that_gives_no_token_back_is_asked_ever_less_often_and_within_the_deadline() -> None:
    server = Refusing()
    said = r"\d answers without a token, and did not answer within 1 s.*timeouts\.generation"
    with pytest.raises(GenerationError, match=said):
        await asyncio.wait_for(ask(client_of(server, timeout_s=1.0), max_tokens=6), 10)
    # At once, and then after 0.05, 0.1, 0.2, 0.4 and 0.8 s.
    assert 3 <= len(server.calls) <= 7


async def test_deadline_begins_anew_with_each_token() -> None:
    async def slowly(**request: Any) -> Any:
        await asyncio.sleep(0.3)
        return part([10], 0, "aborted" if len(server.calls) < 4 else "completed")

    server = ScriptedServer()
    server.generate = lambda **request: (server.calls.append(request), slowly(**request))[1]
    answer = await ask(client_of(server, timeout_s=0.9), max_tokens=6)
    assert answer.token_ids == [10] * 4


class Slow(SamplingServer):
    """Samples a token every 0.1 s, and then nothing more."""

    async def _sample(self, prompt: Any, sampling_params: Any, request_id: str) -> Any:
        for count in range(1, self.tokens + 1):
            await asyncio.sleep(0.1)
            answer = SimpleNamespace(token_ids=[10] * count, logprobs=None)
            yield SimpleNamespace(finished=False, outputs=[answer], prompt_token_ids=PROMPT)
        await asyncio.Event().wait()

    async def drop_request(self, request_id: str) -> None:
        """The test does not need to know that the request is dropped."""


async def test_answer_that_grows_is_waited_for_and_one_that_stopped_growing_is_given_up() -> None:
    server = Slow(12)
    with pytest.raises(GenerationError, match=r"did not answer within 0\.5 s.*timeouts\.generation"):
        await asyncio.wait_for(ask(make_client(balancer_of(server), timeout_s=0.5, every_s=0.05), max_tokens=20), 30)
    assert sum(server.told) == 12, "it was waited for over twice as long a time"


class LostBalancer:
    """A load balancer that died, or hangs."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    async def require_acquire_fields(self) -> Any:
        if self.error is None:
            await asyncio.get_running_loop().create_future()
        raise self.error

    require_release_fields = remove_servers = require_acquire_fields


@pytest.mark.parametrize(("error", "said"), [(ActorDiedError(), "died"), (None, r"has not answered for 0\.05 s")])
async def test_loss_of_the_load_balancer_is_named(
    error: Exception | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "ROUTING_S", 0.05)
    with pytest.raises(GenerationError, match=f"load balancer of the rollout servers {said}"):
        await ask(make_client(LostBalancer(error)), max_tokens=6)


async def test_uninterrupted_answer_whose_weights_changed_is_refused() -> None:
    with pytest.raises(GenerationError, match="from version 3 to 4"):
        await ask(client_of(ScriptedServer(part([10], 4, submitted=3))), max_tokens=6)


async def test_interrupted_answer_has_the_version_of_its_submission() -> None:
    recorder = start_recording()
    await ask(client_of(ScriptedServer(part([10], 4, "aborted", submitted=3), part([11], 4))), max_tokens=6)
    assert recorder.segments == [(3, (10,)), (4, (11,))]


async def test_answer_without_a_version_is_refused() -> None:
    with pytest.raises(GenerationError, match="without a weight version"):
        await ask(client_of(ScriptedServer(part([10], None))), max_tokens=6)


async def test_request_outside_a_trajectory_is_a_validations() -> None:
    server = ScriptedServer(part([11], 0))
    await ask(client_of(server))
    assert server.calls[0]["work"] is Work.VALIDATION


async def test_callers_sampling_parameters_and_prompt_stay_as_they_are() -> None:
    sampling, prompt = {"max_tokens": 5, "temperature": 0.5}, list(PROMPT)
    server = ScriptedServer(part([10], 0, "aborted"), part([11], 0))
    await client_of(server).generate("request", prompt_ids=prompt, sampling_params=sampling)
    assert sampling == {"max_tokens": 5, "temperature": 0.5}
    assert prompt == PROMPT


async def test_turns_that_an_agent_loop_runs_in_tasks_of_its_own_are_recorded_in_order() -> None:
    server = ScriptedServer(part([10], 0, "aborted"), part([11], 1), part([20], 1), part([30], 2))
    client = client_of(server)

    async def trajectory() -> TrajectoryRecorder:
        recorder = start_recording()
        for _ in range(3):
            await asyncio.create_task(ask(client, max_tokens=6))
        return recorder

    recorder = await asyncio.create_task(trajectory())
    assert recorder.segments == [(0, (10,)), (1, (11,)), (1, (20,)), (2, (30,))]
    assert (recorder.interruptions, recorder.reprefilled_tokens) == (1, len(PROMPT) + 1)


class Scorer:
    """Keeps what a trajectory has scored."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, list[int], list[int]]] = []
        self.cancelled = False

    def add(self, version: int, context: list[int], tokens: list[int]) -> None:
        self.parts.append((version, context, tokens))

    def cancel(self) -> None:
        self.cancelled = True


@pytest.mark.parametrize("images", [None, ["an image"]])
async def test_log_prob_servers_are_sent_nothing_that_came_with_an_image(images: list[str] | None) -> None:
    scorer = Scorer()
    recorder = start_recording(TrajectoryRecorder(scorer=scorer))
    client = client_of(ScriptedServer(part([10], 3)))
    await client.generate("request", prompt_ids=list(PROMPT), sampling_params={"max_tokens": 6}, image_data=images)
    assert recorder.segments == [(3, (10,))]
    assert (recorder.text_only, recorder.scorer) == ((True, scorer) if images is None else (False, None))
    assert scorer.parts == ([(3, PROMPT, [10])] if images is None else [])
    assert scorer.cancelled == (images is not None)


async def test_trajectories_side_by_side_record_apart() -> None:
    clients = [client_of(ScriptedServer(part([token], version))) for version, token in enumerate([10, 20, 30])]

    async def trajectory(client: ResumingClient) -> TrajectoryRecorder:
        recorder = start_recording()
        await ask(client, max_tokens=6)
        return recorder

    recorders = await asyncio.gather(*[asyncio.create_task(trajectory(client)) for client in clients])
    assert [recorder.segments for recorder in recorders] == [[(0, (10,))], [(1, (20,))], [(2, (30,))]]

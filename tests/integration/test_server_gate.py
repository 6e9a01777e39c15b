# SPDX-License-Identifier: Apache-2.0
"""Which weights a rollout server answers with. The server is verl's, without its engine, which is faked below it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import RolloutMode, vLLMHttpServer
from vllm.utils.argparse_utils import FlexibleArgumentParser

from recipe.async_engine.core.cuts import SAMPLED
from recipe.async_engine.core.errors import EngineDied, RequestFailed
from recipe.async_engine.engines.answers import RECOMPUTED, VERSION_RUNS, Sampled
from recipe.async_engine.engines.vllm.engine_settings import RUNNER_CHOICE, RolloutServerError
from recipe.async_engine.engines.vllm.server import GatedVLLMHttpServer
from recipe.async_engine.engines.weights_gate import WeightsGate

SOON = 5.0


class Config(SimpleNamespace):
    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


class Engine:
    """vLLM's engine: a request yields its first token, then waits to be finished or aborted.

    While it is ``prefilling`` there is no first token.
    """

    def __init__(self) -> None:
        self.prefilling = False
        self.output_processor = SimpleNamespace(request_states={}, external_req_ids={})
        self.submitted = asyncio.Event()
        self.errored = False
        self.error: Exception | None = None
        self.held = False
        self.swap_error: Exception | None = None
        self.cleared: list[str] = []
        self.engine_core, self.core_engines = self, (self,)

    async def generate(self, *, request_id: str, **request: Any) -> AsyncIterator[Any]:
        if self.error is not None:
            raise self.error
        ended = asyncio.get_running_loop().create_future()
        self.output_processor.request_states[request_id] = ended
        ended.external_req_id = request_id
        self.submitted.set()
        if not self.prefilling:
            yield self._output([7], None)
        try:
            reason = await ended
        finally:
            del self.output_processor.request_states[request_id]
        yield self._output([7, 8], reason)

    @staticmethod
    def _output(tokens: list[int], reason: str | None) -> Any:
        completion = SimpleNamespace(token_ids=tokens, logprobs=None, finish_reason=reason)
        return SimpleNamespace(
            outputs=[completion],
            num_cached_tokens=0,
            prompt_logprobs=None,
            prompt_token_ids=[1, 2],
            finished=reason is not None,
        )

    def finish_all(self, reason: str | None = "stop") -> None:
        for ended in self.output_processor.request_states.values():
            ended.set_result(reason)
        self.submitted.clear()

    async def _call_utility_async(self, method: str, *args: Any, engine: Engine) -> Any:
        return await getattr(engine, method)(*args)

    async def pause_scheduler(self, mode: str, clear_cache: bool) -> None:
        # It would clear the cores' inputs of requests that are on their way.
        assert not clear_cache
        if mode == "keep":
            self.held = True
        else:
            self.finish_all("abort")

    async def collective_rpc(self, method: str, *arguments: Any) -> list[Any]:
        """A swap: each request but one that prefills has one token."""
        assert method == "swap_staged" and self.held
        if self.swap_error is not None:
            raise self.swap_error
        return [{} if self.prefilling else dict.fromkeys(self.output_processor.request_states, 1)]

    async def resume_generation(self) -> None: ...

    async def wake_up(self, tags: list[str] | None = None) -> None: ...

    async def reset_prefix_cache(self, *settings: Any, **by_name: Any) -> bool:
        self.cleared.append("keys and values")
        return True

    async def reset_encoder_cache(self) -> None:
        self.cleared.append("encoders' outputs")


@pytest.fixture
def make_server(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(vLLMHttpServer, "_post_init", lambda self, devices: None)
    # Without Ray there is no run to name.
    monkeypatch.setattr("recipe.async_engine.engines.vllm.server.part_id", lambda node_rank: "run")
    monkeypatch.setenv("VERL_RAY_JOB_ID", "")
    # vLLM's own choice, which a server makes for its engine.
    monkeypatch.delenv(RUNNER_CHOICE, raising=False)

    def make(
        load_format: str = "dummy", first_weights_s: float = SOON, pause_s: float = SOON, has_trainer: bool = True
    ) -> GatedVLLMHttpServer:
        server = object.__new__(GatedVLLMHttpServer)
        settings = {
            "has_trainer": has_trainer,
            "first_weights_timeout_s": first_weights_s,
            "pause_timeout_s": pause_s,
        }
        server.config = Config(
            load_format=load_format,
            custom={"recipe": settings},
            max_model_len=16,
            response_length=8,
            prompt_length=8,
            full_determinism=False,
            enable_rollout_routing_replay=False,
            mtp=None,
            free_cache_engine=True,
        )
        server.model_config = SimpleNamespace(processor=None, lora_rank=0, lora={})
        server.engine = Engine()
        server.rollout_mode = RolloutMode.HYBRID
        server.global_steps = None
        server.node_rank = server.replica_rank = server._admitting = 0
        server._submission_paused = server._rejecting = False
        server._resume_event = asyncio.Event()
        server._resume_event.set()
        server._disaggregation_role, server._pd_decode_peers = None, []
        server._post_init("")
        server._outputs.processor = server.engine.output_processor
        return server

    return make


def request(server: GatedVLLMHttpServer, request_id: str = "r") -> asyncio.Task[TokenOutput]:
    return asyncio.create_task(server.generate([1, 2], {}, request_id))


async def load(server: GatedVLLMHttpServer, version: int) -> None:
    await server.begin_load(version)
    await server.set_global_steps(version)


async def settle() -> None:
    """Let every task that can go on do so."""
    for _ in range(20):
        await asyncio.sleep(0)


async def submitted(server: GatedVLLMHttpServer) -> None:
    await asyncio.wait_for(server.engine.submitted.wait(), SOON)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--disable_mm_preprocessor_cache"], "unrecognized arguments: --disable-mm-preprocessor-cache"),
        (["--seed", "x"], "'x'"),
    ],
)
def test_arguments_that_vllm_does_not_take_are_said(
    make_server: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    """Its parser would end the process, and print to a log of Ray's alone."""
    parser = FlexibleArgumentParser()
    parser.add_argument("--seed", type=int)

    async def launch_server(self: Any) -> None:
        parser.parse_args(arguments)

    monkeypatch.setattr(vLLMHttpServer, "launch_server", launch_server)
    with pytest.raises(RolloutServerError, match="engine_kwargs") as raised:
        asyncio.run(make_server().launch_server())
    assert words in str(raised.value)


async def test_gate_is_opened_by_a_commit_and_closed_by_the_next_load() -> None:
    gate = WeightsGate(opened=False)
    seen = [gate.is_open]
    gate.begin_load(0)
    seen.append(gate.is_open)
    gate.commit()
    seen.append(gate.is_open)
    gate.begin_load(1)
    seen.append(gate.is_open)
    assert seen == [False, False, True, False]


async def test_refusing_gate_sends_waiting_and_later_requests_away_until_the_next_load() -> None:
    gate = WeightsGate(opened=False)
    waiting = asyncio.create_task(gate.wait_open(SOON))
    await settle()
    gate.refuse()
    assert await waiting is False
    assert await gate.wait_open(SOON) is False
    assert not gate.is_open
    gate.begin_load(3)
    gate.commit()
    assert await gate.wait_open(SOON) is True


async def test_refusal_holds_at_an_open_gate_too() -> None:
    gate = WeightsGate(opened=True)
    gate.refuse()
    assert await gate.wait_open(SOON) is False


@pytest.mark.parametrize(("loading", "cause"), [(False, "no weights were ever published"), (True, "version 5 never")])
async def test_gate_says_what_it_waited_for(loading: bool, cause: str) -> None:
    gate = WeightsGate(opened=False)
    if loading:
        gate.begin_load(5)
    with pytest.raises(RolloutServerError, match=rf"0\.02 s.*{cause}.*async_training\.timeouts\.first_weights"):
        await gate.wait_open(0.02)


async def test_server_with_dummy_weights_holds_requests_until_version_0_is_committed(make_server: Any) -> None:
    server = make_server()
    waiting = request(server)
    await server.begin_load(0)
    await settle()
    assert not server.engine.submitted.is_set()
    assert "weights closed, loading version 0" in (await server.describe())[0]
    await server.set_global_steps(0)
    await submitted(server)
    server.engine.finish_all()
    answer = await asyncio.wait_for(waiting, SOON)
    assert answer.token_ids == [7, 8]
    assert (answer.extra_fields["submitted_version"], answer.extra_fields["global_steps"]) == (0, 0)
    assert "weights open; version 0" in (await server.describe())[0]


async def test_request_before_version_0_fails_in_time_and_says_why(make_server: Any) -> None:
    server = make_server(first_weights_s=0.02)
    with pytest.raises(RolloutServerError, match="no weights were ever published"):
        await request(server)


async def test_server_that_loads_a_real_checkpoint_answers_at_once(make_server: Any) -> None:
    server = make_server(load_format="auto")
    answering = request(server)
    await submitted(server)
    server.engine.finish_all()
    assert (await asyncio.wait_for(answering, SOON)).stop_reason == "completed"


KNOWN_REASONS = {"stop": "completed", "length": "completed", "repetition": "completed", "abort": "aborted"}


@pytest.mark.parametrize("reason", [*KNOWN_REASONS, "error", "of a later vLLM", None])
async def test_answer_is_given_only_with_a_finish_reason_that_is_known(make_server: Any, reason: str | None) -> None:
    server = make_server(load_format="auto")
    answering = request(server)
    await submitted(server)
    server.engine.finish_all(reason)
    if reason in KNOWN_REASONS:
        assert (await answering).stop_reason == KNOWN_REASONS[reason]
    else:
        with pytest.raises(RequestFailed, match=f"replica 0 .*finish reason {reason!r} after 2 tokens"):
            await answering
    assert not server._tasks and server._admitting == 0


async def test_server_on_its_own_has_real_weights_and_no_gate_and_is_refused_dummy_ones(make_server: Any) -> None:
    server = make_server("auto", has_trainer=False)
    answering = request(server)
    await submitted(server)
    server.engine.finish_all()
    assert (await answering).stop_reason == "completed"
    with pytest.raises(RolloutServerError, match="load_format=auto"):
        make_server("dummy", has_trainer=False)


async def test_abort_resume_and_wake_up_open_nothing(make_server: Any) -> None:
    server = make_server(first_weights_s=0.05)
    waiting = request(server)
    await server.abort_all_requests()
    await server.resume_generation()
    await server.wake_up(tags=["weights"])
    await server.resume_kv_cache()
    with pytest.raises(RolloutServerError):
        await waiting
    assert not server.engine.submitted.is_set()


async def test_request_parked_at_a_pause_is_not_answered_with_torn_weights(make_server: Any) -> None:
    server = make_server(first_weights_s=SOON)
    await load(server, 0)
    await server.abort_all_requests()
    parked = request(server)
    await settle()
    await server.begin_load(1)
    await server.resume_generation()
    await settle()
    assert not server.engine.submitted.is_set(), "version 1 is half loaded"
    assert server._admitting == 0, "the next abort would wait for an admission that never lands"
    await server.set_global_steps(1)
    await submitted(server)
    server.engine.finish_all()
    assert (await asyncio.wait_for(parked, SOON)).extra_fields["submitted_version"] == 1


async def test_answer_keeps_the_version_of_its_submission_when_weights_change_under_it(make_server: Any) -> None:
    server = make_server()
    await load(server, 3)
    answering = request(server)
    await submitted(server)
    await server.set_global_steps(4)
    server.engine.finish_all()
    extra = (await asyncio.wait_for(answering, SOON)).extra_fields
    assert (extra["submitted_version"], extra["global_steps"]) == (3, 4)


async def test_abort_gives_back_the_tokens_so_far_and_later_requests_wait_for_the_resume(make_server: Any) -> None:
    server = make_server()
    await load(server, 0)
    first = request(server, "first")
    await submitted(server)
    await server.abort_all_requests()
    aborted = await asyncio.wait_for(first, SOON)
    assert (aborted.token_ids, aborted.stop_reason) == ([7, 8], "aborted")
    second = request(server, "second")
    await settle()
    assert not server.engine.submitted.is_set()
    await load(server, 1)
    await server.resume_generation()
    await submitted(server)
    server.engine.finish_all()
    assert (await asyncio.wait_for(second, SOON)).extra_fields["submitted_version"] == 1


async def test_server_tells_of_the_requests_that_it_works_on_and_of_no_other(make_server: Any) -> None:
    server = make_server("auto")
    server.engine.generate = server._outputs.watching(
        lambda prompt, sampling_params, request_id, **rest: Engine.generate(server.engine, request_id=request_id)
    )
    server.global_steps = 3
    asked = {"sampled": 0, "parked": 0, "elsewhere": 0}
    sampled = request(server, "sampled")
    await submitted(server)
    await settle()
    server._submission_paused = True
    server._resume_event.clear()
    parked = request(server, "parked")
    await settle()
    # One that waits here has no tokens, and is told of all the same: its caller need not ask again.
    assert await server.sampled_since(asked) == {
        "sampled": Sampled([7], [(3, 1)], None),
        "parked": Sampled([], [], None),
    }
    server.engine.finish_all()
    await sampled
    assert (await server.sampled_since(asked)).keys() == {"parked"}
    parked.cancel()
    await settle()
    assert await server.sampled_since(asked) == {}


@pytest.mark.parametrize("rejects", [False, True])
async def test_an_interruption_waits_for_no_first_token_and_stops_what_was_admitted(
    make_server: Any, rejects: bool
) -> None:
    server = make_server()
    await load(server, 0)
    server.engine.prefilling = True
    first = request(server, "first")
    await submitted(server)
    # Admitted, and not yet at the engine when that stops.
    server._admitting += 1
    ending = asyncio.create_task(server.abort_all_requests(reject_request=rejects))
    assert (await asyncio.wait_for(first, SOON)).stop_reason == "aborted"
    assert not ending.done()
    await settle()
    # What comes to the engine after the caches were cleared could fill them again.
    assert server.engine.cleared == []
    server._admitting -= 1
    assert (await asyncio.wait_for(ending, SOON))["request_ids"] == ["first"]
    assert server.engine.cleared == ["keys and values", "encoders' outputs"]
    late = request(server, "late")
    await settle()
    assert late.done() == rejects
    if rejects:
        assert late.result().token_ids == []
        return
    server.engine.submitted.clear()
    await server.resume_generation()
    await submitted(server)
    server.engine.finish_all()
    assert (await asyncio.wait_for(late, SOON)).token_ids == [7, 8]


async def test_turn_that_a_request_does_not_leave_fails(make_server: Any) -> None:
    server = make_server(pause_s=0.02)
    await load(server, 0)
    server._admitting = 1
    with pytest.raises(RolloutServerError, match="1 requests did not come back"):
        await server.abort_all_requests(reject_request=True)


async def test_request_at_a_server_that_stays_paused_fails_with_the_settings_name(make_server: Any) -> None:
    server = make_server(pause_s=0.02)
    await load(server, 0)
    await server.abort_all_requests()
    with pytest.raises(RolloutServerError, match=r"0\.02 s.*async_training\.timeouts\.weight_sync"):
        await request(server)


@pytest.mark.parametrize("torn", [False, True])
async def test_server_that_leaves_routing_sends_every_request_away(make_server: Any, torn: bool) -> None:
    server = make_server()
    await load(server, 0)
    await server.abort_all_requests()
    parked = request(server, "parked")
    await settle()
    if torn:
        await server.begin_load(1)
    waiting = request(server, "waiting")
    await settle()
    await server.leave_routing()
    later = request(server, "later")
    answers = await asyncio.wait_for(asyncio.gather(parked, waiting, later), SOON)
    assert [(answer.token_ids, answer.stop_reason) for answer in answers] == [([], "aborted")] * 3
    assert not server.engine.submitted.is_set()


async def test_server_that_left_routing_answers_again_after_a_full_load(make_server: Any) -> None:
    server = make_server()
    await server.begin_load(0)
    await server.leave_routing()
    await server.abort_all_requests()
    await load(server, 1)
    await server.resume_generation()
    answering = request(server)
    await submitted(server)
    server.engine.finish_all()
    assert (await asyncio.wait_for(answering, SOON)).extra_fields["submitted_version"] == 1


@pytest.mark.parametrize(("engine_is_dead", "error"), [(True, EngineDied), (False, ValueError)])
async def test_death_of_the_engine_is_told_from_a_failed_request(
    make_server: Any, engine_is_dead: bool, error: type[Exception]
) -> None:
    server = make_server()
    await load(server, 0)
    server.engine.errored, server.engine.error = engine_is_dead, ValueError("bad request")
    with pytest.raises(error, match="bad request"):
        await request(server)
    assert server._admitting == 0


async def test_dropped_request_leaves_the_engine_and_its_neighbour_stays(make_server: Any) -> None:
    server = make_server()
    await load(server, 0)
    dropped, kept = request(server, "dropped"), request(server, "kept")
    await submitted(server)
    await settle()
    assert set(server.engine.output_processor.request_states) == {"dropped", "kept"}
    await server.drop_request("dropped")
    answer = await asyncio.wait_for(dropped, SOON)
    assert (answer.token_ids, answer.stop_reason, dropped.cancelling()) == ([], "aborted", 0)
    assert set(server.engine.output_processor.request_states) == {"kept"}
    assert server._admitting == 0
    server.engine.finish_all()
    assert (await asyncio.wait_for(kept, SOON)).token_ids == [7, 8]


@pytest.mark.parametrize("paused", [False, True])
async def test_request_that_is_dropped_before_it_reaches_the_engine_never_does(make_server: Any, paused: bool) -> None:
    server = make_server()
    if paused:
        await load(server, 0)
        await server.abort_all_requests()
    waiting = request(server)
    await settle()
    await server.drop_request("r")
    assert (await asyncio.wait_for(waiting, SOON)).stop_reason == "aborted"
    assert server._admitting == 0
    await load(server, 1)
    await server.resume_generation()
    await settle()
    assert not server.engine.submitted.is_set()


async def test_drop_of_a_request_that_is_over_or_unknown_costs_no_other_and_the_next_of_its_name_one_refusal(
    make_server: Any,
) -> None:
    server = make_server()
    await load(server, 0)
    answering = request(server)
    await submitted(server)
    server.engine.finish_all()
    await asyncio.wait_for(answering, SOON)
    await server.drop_request("r")
    await server.drop_request("nobody")
    # It may have been about one that is on its way: that is sent back without a token, and its client asks again.
    assert (await asyncio.wait_for(request(server), SOON)).stop_reason == "aborted"
    again = request(server)
    await submitted(server)
    server.engine.finish_all()
    assert (await asyncio.wait_for(again, SOON)).token_ids == [7, 8]


def watched(server: GatedVLLMHttpServer) -> list[Any]:
    """Put the server between its requests and its engine, as it does when it starts; returns the prompts that pass."""
    prompts: list[Any] = []

    def generate(prompt: Any, sampling_params: Any, request_id: str, **rest: Any) -> AsyncIterator[Any]:
        prompts.append(prompt)
        return Engine.generate(server.engine, request_id=request_id)

    server.engine.generate = server._outputs.watching(server._salted(generate))
    return prompts


async def test_held_request_goes_on_with_its_tokens_labelled_on_both_sides_of_the_swap(make_server: Any) -> None:
    server = make_server()
    prompts = watched(server)
    await load(server, 3)
    held = request(server, "held")
    await submitted(server)
    await settle()
    await server.hold_requests()
    assert server.engine.cleared == ["keys and values", "encoders' outputs"]
    late = request(server, "late")
    await server.swap(4, "checksum")
    assert await server.sampled_since({"held": 0}) == {"held": Sampled([7], [(3, 1)], None)}
    await server.resume_generation()
    await settle()
    server.engine.finish_all()
    first, second = await asyncio.wait_for(asyncio.gather(held, late), SOON)
    assert (first.token_ids, first.stop_reason) == ([7, 8], "completed")
    assert first.extra_fields[VERSION_RUNS] == [(3, 1), (4, 1)]
    assert first.extra_fields[RECOMPUTED] == 3
    assert second.extra_fields["submitted_version"] == 4 and VERSION_RUNS not in second.extra_fields
    assert [prompt["cache_salt"] for prompt in prompts] == ["version 3", "version 4"]


async def test_held_request_without_a_token_is_of_the_new_version_alone(make_server: Any) -> None:
    server = make_server()
    watched(server)
    server.engine.prefilling = True
    await load(server, 3)
    waiting = request(server, "waiting")
    await submitted(server)
    await server.hold_requests()
    await server.swap(4, "checksum")
    await server.resume_generation()
    server.engine.finish_all()
    answer = await asyncio.wait_for(waiting, SOON)
    assert answer.extra_fields[VERSION_RUNS] == [(4, 2)]


async def test_swap_that_fails_closes_the_server_and_sends_what_it_holds_away(make_server: Any) -> None:
    server = make_server()
    watched(server)
    await load(server, 3)
    held = request(server, "held")
    await submitted(server)
    await server.hold_requests()
    server.engine.swap_error = RuntimeError("torn")
    with pytest.raises(RuntimeError, match="torn"):
        await server.swap(4, "checksum")
    assert (await asyncio.wait_for(held, SOON)).stop_reason == "aborted"
    await server.resume_generation()
    later = request(server, "later")
    await settle()
    assert not later.done()
    later.cancel()


def test_server_has_vllm_run_the_model_by_the_runner_that_knows_its_requests_tokens(
    make_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default vLLM takes the other one on an accelerator, with which the first swap would fail."""
    make_server()
    assert os.environ[RUNNER_CHOICE] == "0"
    monkeypatch.setenv(RUNNER_CHOICE, "1")
    with pytest.raises(RolloutServerError, match=f"{RUNNER_CHOICE}=1.*unset the variable"):
        make_server()


async def test_the_engine_is_given_the_tokens_before_a_cut_beside_the_prompt(make_server: Any) -> None:
    server = make_server(load_format="auto")
    asked: list[dict[str, Any]] = []
    generate = server.engine.generate

    def noting(**request: Any) -> Any:
        asked.append(request)
        return generate(**request)

    server.engine.generate = noting
    given = {"max_tokens": 6, "seed": 7, "extra_args": {"a_users": 1}, "flat_logprobs": True}
    task = asyncio.create_task(server.generate([1, 2, 3, 4], given, "r", sampled=2))
    await submitted(server)
    server.engine.finish_all("repetition")
    # An answer that vLLM's detection of repetitions ends is whole.
    assert (await task).stop_reason == "completed"
    parameters = asked[0]["sampling_params"]
    assert asked[0]["prompt"]["prompt_token_ids"] == [1, 2]
    assert parameters.extra_args == {"a_users": 1, SAMPLED: [3, 4]}
    assert (parameters.max_tokens, parameters.seed, parameters.flat_logprobs) == (6, 7, False)
    assert given["extra_args"] == {"a_users": 1}


@pytest.mark.parametrize("staging", ["none", "device"])
def test_workers_that_could_not_take_up_a_cut_answer_are_refused(
    make_server: Any, monkeypatch: pytest.MonkeyPatch, staging: str
) -> None:
    monkeypatch.setattr(vLLMHttpServer, "_preprocess_engine_kwargs", lambda self, engine_kwargs: None)
    server = make_server()
    server.config.custom["recipe"]["staging"] = staging
    server._post_init("")
    ours = {"worker_extension_cls": "recipe.laptop.engines.engine_extension.CPUStagingExtension"}
    server._preprocess_engine_kwargs(ours)
    assert ours["scheduler_cls"].endswith("continued_answers.scheduler")
    foreign = {"worker_extension_cls": "recipe.laptop.engines.vllm_cpu.CPUWorkerExtension"}
    with pytest.raises(RolloutServerError, match="StagingExtension") if staging == "none" else nullcontext():
        server._preprocess_engine_kwargs(foreign)

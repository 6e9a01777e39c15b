# SPDX-License-Identifier: Apache-2.0
"""Turns at an agent-loop worker's client: what waits and what goes on."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from omegaconf import OmegaConf
from remote_fakes import Handle, ScriptedServer, balancer_of, part

from recipe.async_engine.core.errors import GenerationError
from recipe.async_engine.record.activity import Work
from recipe.async_engine.rollout.client import ResumingClient, TurnGate
from recipe.async_engine.rollout.kept_answers import AnswerBook, TrajectoryRecorder, start_recording

PROMPT = [1, 2, 3]
TOOL = [50, 51]
SOON = 5.0


def client_of(*servers: ScriptedServer) -> ResumingClient:
    timeouts = dict.fromkeys(["generation", "batch_wait", "weight_sync", "checkpoint", "validation"], SOON)
    config = OmegaConf.create(
        {
            "async_training": {"partial_rollout": True, "timeouts": timeouts, "partial_tokens_interval": None},
            "actor_rollout_ref": {"rollout": {"name": "vllm", "prompt_length": 4, "response_length": 16}},
        }
    )
    return ResumingClient(config, load_balancer_handle=Handle(balancer_of(*servers)))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def answer(
    client: ResumingClient, work: Any = None, recorder: TrajectoryRecorder | None = None
) -> tuple[Any, TrajectoryRecorder]:
    """One trajectory: ``work`` of the client, by default one request."""
    recorder = start_recording(recorder)
    if work is not None:
        return await work(client), recorder
    return await client.generate("request", prompt_ids=list(PROMPT), sampling_params={"max_tokens": 8}), recorder


async def test_an_interrupted_answer_waits_for_the_next_turn_and_keeps_its_tokens() -> None:
    server = ScriptedServer(part([10, 11], 0, "aborted"), part([12], 1))
    client = client_of(server)
    generate = server.generate

    async def cut(**request: Any) -> Any:
        client.gate.hold()
        return await generate(**request)

    server.generate = cut
    running = asyncio.create_task(answer(client))
    await settle()
    assert len(server.calls) == 1
    server.generate = generate
    client.gate.go_on()
    result, recorder = await running
    assert result.token_ids == [10, 11, 12]
    assert [call["prompt_ids"] for call in server.calls] == [PROMPT, [*PROMPT, 10, 11]]
    assert recorder.segments == [(0, (10, 11)), (1, (12,))]
    assert (recorder.interruptions, recorder.cut_tokens, recorder.reprefilled_tokens) == (1, 2, 5)
    assert recorder.account.cut == 2


async def test_a_refused_request_is_no_interruption() -> None:
    server = ScriptedServer(part([], 0, "aborted"), part([10], 1))
    result, recorder = await answer(client_of(server))
    assert (result.token_ids, recorder.interruptions, recorder.account.cut) == ([10], 0, 0)


async def test_a_trajectory_in_a_tool_call_waits_at_its_next_request() -> None:
    server = ScriptedServer(part([10, 11], 0), part([12], 1))
    client, called = client_of(server), asyncio.Event()

    async def two_turns(client: ResumingClient) -> list[int]:
        """An agent loop with a tool between two requests; it knows nothing of turns."""
        first = await client.generate("request", prompt_ids=list(PROMPT), sampling_params={"max_tokens": 8})
        await called.wait()
        second = await client.generate(
            "request", prompt_ids=[*PROMPT, *first.token_ids, *TOOL], sampling_params={"max_tokens": 8}
        )
        return [*first.token_ids, *TOOL, *second.token_ids]

    running = asyncio.create_task(answer(client, two_turns))
    await settle()
    client.gate.hold()
    called.set()
    await settle()
    assert len(server.calls) == 1, "the tool has answered, and its turn is over"
    client.gate.go_on()
    assert (await running)[0] == [10, 11, *TOOL, 12]


async def test_time_between_turns_is_known_also_while_it_lasts() -> None:
    gate = TurnGate(SOON)
    gate.go_on()
    assert gate.held_s == 0
    gate.hold()
    time.sleep(0.05)  # an event loop's sleep may end a little early
    gate.hold()  # told once more: it goes on as it began
    waited = gate.held_s
    assert waited >= 0.05
    gate.go_on()
    held = gate.held_s
    await asyncio.sleep(0.05)
    assert gate.held_s == held >= waited


async def test_validation_passes_while_trajectories_wait() -> None:
    client = client_of(ScriptedServer(part([10], 0)))
    client.gate.hold()
    held = asyncio.create_task(answer(client))
    assert (await answer(client, recorder=TrajectoryRecorder(work=Work.VALIDATION)))[0].token_ids == [10]
    assert not held.done()
    held.cancel()


async def test_waiting_ends_with_an_error_that_names_its_settings() -> None:
    gate = TurnGate(timeout_s=0.05)
    gate.hold()
    with pytest.raises(GenerationError, match=r"async_training\.timeouts"):
        await gate.enter()


async def test_a_checkpoint_between_two_turns_waits_for_the_requests_that_servers_give_back() -> None:
    back = asyncio.Event()

    class Slow(ScriptedServer):
        async def generate(self, **request: Any) -> Any:
            await back.wait()
            return await super().generate(**request)

        async def sampled_since(self, known: dict[str, int]) -> dict[str, Any]:
            return {}

    book = AnswerBook()
    client = client_of(Slow(part([10, 11], 0, "aborted")))
    work = asyncio.create_task(answer(client, recorder=book.begin("0-0-0")))
    await settle()
    client.gate.hold()
    fetched = asyncio.create_task(client.fetch(book.flights(), SOON))
    await asyncio.sleep(0.1)
    assert not fetched.done()
    back.set()
    await fetched
    assert book.export()["0-0-0"].cut_tokens == 2
    work.cancel()


async def test_a_record_answers_a_trajectory_between_two_turns() -> None:
    book = AnswerBook()
    first = client_of(ScriptedServer(part([10], 0, "aborted")))
    work = asyncio.create_task(answer(first, recorder=book.begin("0-0-0")))
    await settle()
    record = book.export()["0-0-0"]
    work.cancel()
    server, answers = ScriptedServer(part([11], 0)), AnswerBook().begin("0-0-0", record)
    client = client_of(server)
    client.gate.hold()
    held = asyncio.create_task(answer(client, recorder=answers))
    await settle()
    assert (answers.restored_tokens, server.calls) == (1, [])
    client.gate.go_on()
    assert (await held)[0].token_ids == [10, 11]

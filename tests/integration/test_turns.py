# SPDX-License-Identifier: Apache-2.0
"""Turns at an agent-loop worker: who waits and who goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from omegaconf import OmegaConf
from remote_fakes import Handle, ScriptedServer, balancer_of, part

from recipe.async_engine.rollout.client import ResumingClient
from recipe.async_engine.rollout.kept_answers import AnswerBook, TrajectoryAnswers
from recipe.async_engine.rollout.recorder import TrajectoryRecorder, start_recording
from recipe.async_engine.rollout.turns import HeldTooLong, Ticket, TurnGate

PROMPT = [1, 2, 3]
TOOL = [50, 51]
SOON = 5.0


def client_of(*servers: ScriptedServer) -> ResumingClient:
    timeouts = {"generation": SOON}
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
    client: ResumingClient, ticket: Ticket | None, work: Any = None, answers: TrajectoryAnswers | None = None
) -> tuple[Any, TrajectoryRecorder]:
    """One trajectory: ``work`` of the client, by default one request."""
    recorder = start_recording(None, answers, ticket)
    if ticket is not None:
        ticket.answers = recorder.answers
    if work is not None:
        return await work(client), recorder
    return await client.generate("request", prompt_ids=list(PROMPT), sampling_params={"max_tokens": 8}), recorder


async def two_turns(client: ResumingClient, tool: Any = None) -> list[int]:
    """An agent loop with a tool between two requests; it knows nothing of turns."""
    first = await client.generate("request", prompt_ids=list(PROMPT), sampling_params={"max_tokens": 8})
    observed = TOOL if tool is None else await tool()
    second = await client.generate(
        "request", prompt_ids=[*PROMPT, *first.token_ids, *observed], sampling_params={"max_tokens": 8}
    )
    return [*first.token_ids, *observed, *second.token_ids]


async def test_an_interrupted_answer_waits_for_its_next_turn_and_keeps_its_tokens() -> None:
    server = ScriptedServer(part([10, 11], 0, "aborted"), part([12], 1))
    gate = TurnGate(SOON)
    ticket = gate.begin("0-0-0", turn=1)
    running = asyncio.create_task(answer(client_of(server), ticket))
    await settle()
    # The server stopped before the worker was told.
    assert len(server.calls) == 1
    gate.close(1)
    await settle()
    assert len(server.calls) == 1
    gate.admit(["0-0-0"], turn=2)
    result, recorder = await running
    assert result.token_ids == [10, 11, 12]
    assert [call["prompt_ids"] for call in server.calls] == [PROMPT, [*PROMPT, 10, 11]]
    assert recorder.segments == [(0, (10, 11)), (1, (12,))]
    assert (recorder.interruptions, recorder.cut_tokens, recorder.reprefilled_tokens) == (1, 2, 5)
    assert recorder.answers.account.cut == 2


async def test_a_refused_request_waits_and_is_no_interruption() -> None:
    server = ScriptedServer(part([], 0, "aborted"), part([10], 1))
    gate = TurnGate(SOON)
    running = asyncio.create_task(answer(client_of(server), gate.begin("0-0-0", turn=1)))
    await settle()
    assert len(server.calls) == 1
    gate.admit(["0-0-0"], turn=2)
    result, recorder = await running
    assert (result.token_ids, recorder.interruptions, recorder.answers.account.cut) == ([10], 0, 0)


async def test_a_trajectory_in_a_tool_call_waits_at_its_next_request() -> None:
    server = ScriptedServer(part([10, 11], 0), part([12], 1))
    gate, called = TurnGate(SOON), asyncio.Event()

    async def tool() -> list[int]:
        await called.wait()
        return TOOL

    ticket = gate.begin("0-0-0", turn=1)
    running = asyncio.create_task(answer(client_of(server), ticket, lambda client: two_turns(client, tool)))
    await settle()
    assert gate.close(1) == 1
    called.set()
    await settle()
    assert len(server.calls) == 1, "the tool has answered, and its turn is over"
    gate.admit(["0-0-0"], turn=2)
    assert (await running)[0] == [10, 11, *TOOL, 12]


async def test_time_that_a_trajectory_waits_for_its_turn_is_known_also_while_it_waits() -> None:
    gate = TurnGate(SOON)
    ticket = gate.begin("0-0-0", turn=1)
    assert gate.held_s("0-0-0") == 0
    gate.close(1)
    running = asyncio.create_task(answer(client_of(ScriptedServer(part([10], 0))), ticket))
    await asyncio.sleep(0.05)
    waited = gate.held_s("0-0-0")
    assert waited > 0
    gate.admit(["0-0-0"], turn=2)
    await running
    held = gate.held_s("0-0-0")
    await asyncio.sleep(0.05)
    assert gate.held_s("0-0-0") == held >= waited


async def test_validation_passes_while_trajectories_wait() -> None:
    server = ScriptedServer(part([10], 0))
    gate = TurnGate(SOON)
    gate.close(1)
    held = asyncio.create_task(answer(client_of(server), gate.begin("0-0-0", turn=1)))
    assert (await answer(client_of(server), None))[0].token_ids == [10]
    held.cancel()


async def test_waiting_ends_with_an_error_that_names_its_settings() -> None:
    gate = TurnGate(timeout_s=0.05)
    gate.close(1)
    with pytest.raises(HeldTooLong, match=r"async_training\.timeouts"):
        await answer(client_of(ScriptedServer()), gate.begin("0-0-0", turn=1))


async def test_a_checkpoint_between_two_turns_waits_for_the_requests_that_servers_give_back() -> None:
    back = asyncio.Event()

    class Slow(ScriptedServer):
        async def generate(self, **request: Any) -> Any:
            await back.wait()
            return await super().generate(**request)

        async def sampled_since(self, known: dict[str, int]) -> dict[str, Any]:
            return {}

    gate, book = TurnGate(SOON), AnswerBook()
    client = client_of(Slow(part([10, 11], 0, "aborted")))
    ticket = gate.begin("0-0-0", turn=1)
    work = asyncio.create_task(answer(client, ticket, answers=book.begin("0-0-0")))
    await settle()
    gate.close(1)
    fetched = asyncio.create_task(client.fetch(book.flights(), SOON))
    await asyncio.sleep(0.1)
    assert not fetched.done()
    back.set()
    await fetched
    assert book.export()["0-0-0"].cut_tokens == 2
    work.cancel()


async def test_a_record_answers_a_trajectory_whose_turn_has_not_come() -> None:
    book, gate = AnswerBook(), TurnGate(SOON)
    ticket = gate.begin("0-0-0", turn=1)
    work = asyncio.create_task(
        answer(client_of(ScriptedServer(part([10], 0, "aborted"))), ticket, answers=book.begin("0-0-0"))
    )
    await settle()
    record = book.export()["0-0-0"]
    work.cancel()
    gate.close(1)
    server, answers = ScriptedServer(part([11], 0)), AnswerBook().begin("0-0-0", record)
    held = asyncio.create_task(answer(client_of(server), gate.begin("0-0-0", turn=1), answers=answers))
    await settle()
    assert (answers.restored_tokens, server.calls) == (1, [])
    gate.admit(["0-0-0"], turn=2)
    assert (await held)[0].token_ids == [10, 11]


async def test_trajectory_that_begins_after_it_was_told_to_go_on_goes_on() -> None:
    gate = TurnGate(SOON)
    gate.close(1)
    gate.admit(["late"], 2)  # control calls overtake the call of a trajectory
    ticket = gate.begin("late", 1)
    await asyncio.wait_for(ticket.enter(), SOON)
    assert gate.begin("other", 1).turn == 1

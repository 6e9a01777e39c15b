# SPDX-License-Identifier: Apache-2.0
"""Agents with random histories whose answers are cut, and whose run is killed at a random token and resumed.

They go on from an answer, rewrite it, branch, ask for several answers, and begin again with a summary. Every token that
the servers of both lives have sampled is trained once, after the tokens that it was sampled after, by its version.
"""

from __future__ import annotations

import asyncio
import random
import string
from collections import Counter
from typing import Any

import pytest
from openai import AsyncOpenAI
from remote_fakes import part
from scripted_policy import agent_loop, tokenizer
from test_kept_answers import SOON, client_of
from verl.workers.rollout.replica import TokenOutput

from recipe.async_engine.core.versions import NOT_SAMPLED, align, align_in
from recipe.async_engine.engines.answers import Sampled
from recipe.async_engine.rollout.kept_answers import AnswerBook, TrajectoryRecorder, start_recording

PIECE, ENDS, SWAPS = 7, 0.3, 0.5
Tokens = Counter[tuple[tuple[int, ...], int]]
"""Tokens, each with all tokens before it, and its version."""


class RandomServer:
    """Samples random letters, cuts answers at random, and has given ``left`` tokens when the run is killed."""

    def __init__(self, rng: random.Random, version: int, left: int) -> None:
        self.rng, self.version, self.left = rng, version, left
        self.sampled: Tokens = Counter()
        self.open: dict[str, Sampled] = {}
        self.is_done = asyncio.Event()

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], sampled: int, **more: Any
    ) -> TokenOutput:
        await asyncio.sleep(self.rng.random() / 100)
        room = sampling_params["max_tokens"] - sampled
        count = min(self.rng.randint(1, PIECE), room, self.left)
        tokens = tokenizer().encode("".join(self.rng.choices(string.ascii_letters, k=count)))
        ends = bool(tokens) and self.rng.random() < ENDS
        if ends:
            tokens[-1] = tokenizer().eos_token_id
        version = self.version
        self.version += self.rng.random() < SWAPS
        self.left -= count
        for end in range(1, count + 1):
            self.sampled[(*prompt_ids, *tokens[:end]), version] += 1
        if not self.left:
            self.open[request_id] = Sampled(tokens, [(version, count)] if count else [], [-1.0] * count)
            self.is_done.set()
            await asyncio.get_running_loop().create_future()
        return part(tokens, version, "completed" if ends or count == room else "aborted")

    async def sampled_since(self, known: dict[str, int]) -> dict[str, Sampled]:
        return {name: self.open.get(name, Sampled([], [], [])) for name in known}

    async def drop_request(self, request_id: str) -> None:
        pass


async def explore(policy: AsyncOpenAI, rng: random.Random, history: list[Any], depth: int) -> None:
    reply = await policy.chat.completions.create(
        model="any", messages=history, max_completion_tokens=rng.randint(3, 30), n=rng.choice([1, 1, 2])
    )
    # The order of answers to one prompt may be another after a resume.
    said = min(choice.message.content for choice in reply.choices)
    if not depth:
        return
    kept = said[: rng.randint(1, 5)] if rng.random() < 0.4 else said
    going_on = [*history, {"role": "assistant", "content": kept}]
    histories = [[*going_on, {"role": "user", "content": digit}] for digit in "12"[: rng.randint(1, 2)]]
    if rng.random() < 0.2:
        histories = [[{"role": "user", "content": f"In short: {said[:4]}"}]]
    async with asyncio.TaskGroup() as tasks:
        for each in histories:
            tasks.create_task(explore(policy, random.Random(rng.random()), each, depth - 1))


async def life(seed: int, server: RandomServer, recorder: TrajectoryRecorder, client: Any) -> list[Any]:
    async def run(policy: AsyncOpenAI, row: dict[str, Any]) -> float:
        await explore(policy, random.Random(seed), [{"role": "user", "content": "Go."}], depth=3)
        return 0.0

    start_recording(recorder)
    loop = agent_loop(client, agent="asyncio.sleep")
    loop._agent = run
    returned = await loop.run({"temperature": 1.0}, raw_prompt=[])
    return returned if isinstance(returned, list) else [returned]


def trained_tokens(outputs: list[Any], recorder: TrajectoryRecorder) -> Tokens:
    """Return the trained tokens of outputs, labelled as the worker labels them; the labels have to be exact."""
    found: Tokens = Counter()
    for output in outputs:
        answered = output.response_ids, output.response_mask
        if len(outputs) > 1:
            labels = align_in(recorder.segments, recorder.contexts, output.prompt_ids, *answered)
        else:
            labels = align(recorder.segments, *answered)
        assert labels.exact
        sequence, place = [*output.prompt_ids, *output.response_ids], len(output.prompt_ids)
        for version, count in labels.runs:
            if version != NOT_SAMPLED:
                found.update((tuple(sequence[:end]), version) for end in range(place + 1, place + count + 1))
            place += count
    return found


@pytest.mark.parametrize("seed", range(20))
async def test_an_agent_that_is_cut_killed_and_resumed_is_trained_once_on_all_that_was_sampled(seed: int) -> None:
    rng, book = random.Random(seed), AnswerBook()
    first = RandomServer(rng, version=0, left=rng.randint(1, 80))
    client = client_of(first)
    killed = asyncio.create_task(life(seed, first, book.begin("0-0-0"), client))
    waits = asyncio.create_task(first.is_done.wait())
    await asyncio.wait([killed, waits], return_when=asyncio.FIRST_COMPLETED)
    if not killed.done():
        await client.fetch(book.flights(), SOON)
    kept = book.export()["0-0-0"]
    waits.cancel()
    killed.cancel()
    await asyncio.wait([killed])

    book, second = AnswerBook(), RandomServer(rng, version=first.version, left=10**6)
    recorder = book.begin("0-0-0", kept)
    outputs = await life(seed, second, recorder, client_of(second))
    book.end("0-0-0", complete=True)
    assert (book.account().lost, recorder.restored_tokens) == (0, first.sampled.total())
    assert trained_tokens(outputs, recorder) == first.sampled + second.sampled

# SPDX-License-Identifier: Apache-2.0
"""What a trajectory has been answered is kept, exported while requests are under way, and not asked for again."""

from __future__ import annotations

import asyncio
import pickle
import random
from typing import Any

import pytest
from omegaconf import OmegaConf
from PIL import Image
from remote_fakes import Handle, ScriptedServer, balancer_of, part

from recipe.async_engine.core.errors import GenerationError
from recipe.async_engine.engines.answers import Sampled
from recipe.async_engine.rollout.client import ResumingClient
from recipe.async_engine.rollout.kept_answers import (
    AnswerBook,
    TokenAccount,
    TrajectoryRecord,
    TrajectoryRecorder,
    start_recording,
)

PROMPT = [1, 2, 3]
TOOL = [50, 51]
SOON = 5.0


def client_of(*servers: Any, resume: bool = True, **rollout: Any) -> ResumingClient:
    config = OmegaConf.create(
        {
            "async_training": {
                "partial_rollout": resume,
                "timeouts": dict.fromkeys(
                    ["generation", "batch_wait", "weight_sync", "checkpoint", "validation"], SOON
                ),
                "partial_tokens_interval": None,
            },
            "actor_rollout_ref": {"rollout": {"name": "vllm", "prompt_length": 4, "response_length": 16, **rollout}},
        }
    )
    return ResumingClient(config, load_balancer_handle=Handle(balancer_of(*servers)))


def sampled(version: int, tokens: list[int]) -> Sampled:
    return Sampled(list(tokens), [(version, len(tokens))], [-float(token) for token in tokens])


class SlowServer:
    """Its one request samples what a test says, and ends when a test says so."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.calls: list[dict[str, Any]] = []
        self.sampled: list[int] = []
        self.here: dict[str, bool] = {}
        self.end = asyncio.Event()
        self.stop = "completed"
        self.asked: list[dict[str, int]] = []

    async def generate(self, request_id: str, **request: Any) -> Any:
        self.calls.append(request)
        self.here[request_id] = True
        await self.end.wait()
        self.here.pop(request_id, None)
        return part(list(self.sampled), self.version, self.stop)

    async def sampled_since(self, known: dict[str, int]) -> dict[str, Sampled]:
        self.asked.append(known)
        return {name: sampled(self.version, self.sampled[count:]) for name, count in known.items() if name in self.here}


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def answer(
    client: ResumingClient, recorder: TrajectoryRecorder, work: Any = None, **sampling: Any
) -> tuple[Any, TrajectoryRecorder]:
    """One trajectory: ``work`` of the client, by default one request."""
    start_recording(recorder)
    if work is not None:
        return await work(client), recorder
    sampling = {"max_tokens": 8, **sampling}
    return await client.generate("request", prompt_ids=list(PROMPT), sampling_params=sampling), recorder


async def two_turns(client: ResumingClient, observed: list[int] | None = None) -> list[int]:
    """An agent loop with a tool between two requests."""
    observed = TOOL if observed is None else observed
    first = await client.generate("request", prompt_ids=list(PROMPT), sampling_params={"max_tokens": 8})
    second = await client.generate(
        "request", prompt_ids=[*PROMPT, *first.token_ids, *observed], sampling_params={"max_tokens": 8}
    )
    return [*first.token_ids, *observed, *second.token_ids]


async def export(book: AnswerBook, client: ResumingClient, timeout_s: float = SOON) -> dict[str, Any]:
    """As the worker does it."""
    await client.fetch(book.flights(), timeout_s)
    return book.export()


def tokens_of(record: TrajectoryRecord | None) -> list[int]:
    return [] if record is None else [t for kept in pickle.loads(record.answers) for t in kept.answer.token_ids]


class ThenSlow(SlowServer):
    """Answers from a script first."""

    def __init__(self, *script: Any) -> None:
        super().__init__()
        self.script = list(script)

    async def generate(self, request_id: str, **request: Any) -> Any:
        return self.script.pop(0) if self.script else await super().generate(request_id, **request)


async def record_of(*script: Any, resume: bool = True) -> TrajectoryRecord:
    """What is kept of a trajectory whose second request is under way; ``script`` answered the first one."""
    book, server = AnswerBook(), ThenSlow(*script)
    client = client_of(server, resume=resume)
    work = asyncio.create_task(answer(client, book.begin("0-0-0"), two_turns))
    await settle()
    server.sampled = [12, 13]
    record = (await export(book, client))["0-0-0"]
    work.cancel()
    await settle()
    return record


async def interrupted_record() -> TrajectoryRecord:
    return await record_of(part([9], 0, "aborted"), part([10, 11], 0))


async def record_of_one_version() -> TrajectoryRecord:
    return await record_of(part([10, 11], 0), resume=False)


async def test_the_tokens_of_a_request_under_way_are_kept_while_it_goes_on() -> None:
    record = await interrupted_record()
    assert tokens_of(record) == [9, 10, 11, 12, 13]
    assert (record.cut_tokens, record.under_way_tokens) == (3, 2)


@pytest.mark.parametrize("resume", [True, False])
async def test_a_restored_trajectory_asks_only_for_what_is_missing(resume: bool) -> None:
    record = await interrupted_record() if resume else await record_of_one_version()
    server = ScriptedServer(part([14], 0))
    book = AnswerBook()
    result, recorder = await answer(client_of(server, resume=resume), book.begin("0-0-0", record), two_turns)
    first = [9, 10, 11] if resume else [10, 11]
    assert result == [*first, *TOOL, 12, 13, 14]
    assert [call["prompt_ids"] for call in server.calls] == [[*PROMPT, *first, *TOOL, 12, 13]]
    assert [(call["sampling_params"]["max_tokens"], call["sampled"]) for call in server.calls] == [(8, 2)]
    assert recorder.segments[-2:] == [(0, (12, 13)), (0, (14,))]
    assert recorder.restored_tokens == len(first) + 2
    assert recorder.cut_tokens == record.cut_tokens
    # By weight syncs: the checkpoint was none.
    assert recorder.interruptions == (1 if resume else 0)
    book.end("0-0-0", complete=True)
    assert book.account() == TokenAccount(received=1)


async def test_an_answer_of_one_version_goes_on_from_a_checkpoint_under_that_version_only() -> None:
    client = client_of(ScriptedServer(part([14], 1)), resume=False)
    with pytest.raises(GenerationError, match="under version 0 and could continue only under version 1"):
        await answer(client, AnswerBook().begin("0-0-0", await record_of_one_version()), two_turns)


async def test_an_answer_that_a_sync_cut_is_refused_from_a_record_too_where_answers_have_one_version() -> None:
    book = AnswerBook()
    client = client_of(ScriptedServer(part([10], 0, "aborted"), part([11], 0)))
    await answer(client, book.begin("0-0-0"))
    record = book.export()["0-0-0"]
    with pytest.raises(GenerationError, match="was interrupted after 1 tokens"):
        await answer(client_of(ScriptedServer(), resume=False), AnswerBook().begin("0-0-0", record))


@pytest.mark.parametrize("complete_at", ["fetch", "export"])
async def test_a_request_that_ends_while_a_checkpoint_is_taken_is_kept_once_and_whole(complete_at: str) -> None:
    book, server = AnswerBook(), SlowServer()
    client = client_of(server)
    work = asyncio.create_task(answer(client, book.begin("0-0-0")))
    await settle()
    server.sampled = [10, 11]
    fetch = server.sampled_since

    async def fetch_and_end(known: dict[str, int]) -> dict[str, Sampled]:
        if complete_at == "fetch":
            # The engine is done with it, and the answer is on its way.
            server.sampled += [12]
            server.here.clear()
            asyncio.get_running_loop().call_later(0.1, server.end.set)
            server.sampled_since = fetch
            return {}
        told = await fetch(known)
        server.sampled += [12]
        server.end.set()
        await settle()
        return told

    server.sampled_since = fetch_and_end
    record = (await export(book, client))["0-0-0"]
    assert tokens_of(record) == [10, 11, 12]
    assert (record.cut_tokens, record.under_way_tokens) == (0, 0)
    assert (await work)[0].token_ids == [10, 11, 12]


async def test_two_questions_at_once_bring_no_token_twice() -> None:
    book, server = AnswerBook(), SlowServer()
    client = client_of(server)
    work = asyncio.create_task(answer(client, book.begin("0-0-0")))
    await settle()
    server.sampled = [10, 11]
    await asyncio.gather(*[client.fetch(book.flights(), SOON) for _ in range(3)])
    server.sampled += [12]
    assert tokens_of((await export(book, client))["0-0-0"]) == [10, 11, 12]
    work.cancel()


async def test_a_request_whose_server_does_not_tell_keeps_what_is_known(caplog: pytest.LogCaptureFixture) -> None:
    book, server = AnswerBook(), SlowServer()
    client = client_of(server)
    work = asyncio.create_task(answer(client, book.begin("0-0-0")))
    await settle()
    server.sampled = [10, 11]
    await export(book, client)
    server.here.clear()
    server.sampled += [12]
    assert tokens_of((await export(book, client, timeout_s=0.05))["0-0-0"]) == [10, 11]
    assert "it is not known which tokens 1 open requests have sampled" in caplog.text
    work.cancel()


async def test_no_part_of_an_answer_is_kept_where_its_router_choices_would_be_missing() -> None:
    book, server = AnswerBook(), SlowServer()
    client = client_of(server, enable_rollout_routing_replay=True)
    work = asyncio.create_task(answer(client, book.begin("0-0-0")))
    await settle()
    server.sampled = [10, 11]
    assert await export(book, client) == {"0-0-0": None}
    work.cancel()


async def test_a_record_is_kept_over_two_restarts() -> None:
    record = await interrupted_record()
    book, server = AnswerBook(), SlowServer()
    client = client_of(server)
    work = asyncio.create_task(answer(client, book.begin("0-0-0", record), two_turns))
    # Before the agent loop has asked for any of it, and after it has.
    for _ in range(2):
        again = book.export()["0-0-0"]
        assert pickle.loads(again.answers) == pickle.loads(record.answers)
        assert (again.cut_tokens, again.under_way_tokens) == (record.cut_tokens, 0)
        await settle()
    work.cancel()


async def test_what_a_tool_that_answers_differently_leaves_unused_of_the_record_is_lost() -> None:
    book, server = AnswerBook(), ScriptedServer(part([15], 3))
    answers = book.begin("0-0-0", await interrupted_record())
    result, recorder = await answer(client_of(server), answers, lambda client: two_turns(client, [60]))
    assert result == [9, 10, 11, 60, 15]
    book.end("0-0-0", complete=True)
    assert (recorder.restored_tokens, recorder.cut_tokens) == (3, 1)
    assert book.account() == TokenAccount(lost=2, received=1)


async def test_a_request_with_another_image_of_the_same_tokens_does_not_get_the_kept_answer() -> None:
    async def look(client: ResumingClient, color: str) -> list[int]:
        image = Image.new("RGB", (4, 4), color)
        return (await client.generate("request", prompt_ids=PROMPT, sampling_params={}, image_data=[image])).token_ids

    async def tokens_after(record: TrajectoryRecord | None, color: str, *script: Any) -> tuple[list[int], Any]:
        book, client = AnswerBook(), client_of(ScriptedServer(*script))
        result, _ = await answer(client, book.begin("0-0-0", record), lambda client: look(client, color))
        return result, book.export()["0-0-0"]

    _, record = await tokens_after(None, "red", part([10], 0))
    assert (await tokens_after(record, "red"))[0] == [10]
    assert (await tokens_after(record, "blue", part([20], 0)))[0] == [20]


async def test_tokens_of_a_trajectory_that_ends_incomplete_are_counted_as_lost() -> None:
    book = AnswerBook()
    server = SlowServer()
    client = client_of(server)
    work = asyncio.create_task(answer(client, book.begin("0-0-0")))
    await settle()
    server.sampled, server.stop = [10, 11], "aborted"
    server.end.set()
    server.end = asyncio.Event()
    await settle()
    assert book.account() == TokenAccount(cut=2, held=2)
    assert book.account().held_as_lost() == TokenAccount(cut=2, lost=2)
    work.cancel()
    await settle()
    book.end("0-0-0", complete=False)
    assert book.account() == TokenAccount(cut=2, lost=2, received=2, dropped=2)


class CountingServer:
    """Samples tokens that follow from all tokens before them, so that it does not matter where an answer is cut."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.version = 0
        self.sampled = 0
        self.under_way: dict[str, list[int]] = {}
        self.cutting = 0

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], sampled: int, **_: Any
    ) -> Any:
        version, tokens, cuts = self.version, [], self.cutting
        self.under_way[request_id] = tokens
        missing = sampling_params["max_tokens"] - sampled
        while len(tokens) < missing and cuts == self.cutting:
            await asyncio.sleep(0)
            if self.rng.random() < 0.7:
                context = [*prompt_ids, *tokens]
                tokens.append(10 + (sum(context) * 7 + len(context)) % 40)
                self.sampled += 1
        done = len(tokens) == missing
        del self.under_way[request_id]
        for _ in range(self.rng.randint(0, 3)):
            await asyncio.sleep(0)
        return part(tokens, version, "completed" if done else "aborted")

    async def drop_request(self, request_id: str) -> None:
        """Nobody waits for it any more."""

    async def sampled_since(self, known: dict[str, int]) -> dict[str, Sampled]:
        here = {name: self.under_way[name] for name in known if name in self.under_way}
        return {name: sampled(self.version, tokens[known[name] :]) for name, tokens in here.items()}

    async def sync(self) -> None:
        """Cut every answer and take the next version; ended by its task's cancellation."""
        while True:
            for _ in range(self.rng.randint(1, 30)):
                await asyncio.sleep(0)
            self.cutting += 1
            while self.under_way:
                await asyncio.sleep(0)
            self.version += 1


async def a_loop(client: ResumingClient, shape: list[list[int]]) -> list[int]:
    """An agent loop of several turns; a turn has one request or several at once, of so many tokens each."""
    transcript = list(PROMPT)
    for turn in shape:
        asked = [
            client.generate("request", prompt_ids=[*transcript, n], sampling_params={"max_tokens": tokens})
            for n, tokens in enumerate(turn)
        ]
        for found in await asyncio.gather(*asked):
            transcript += found.token_ids
        await asyncio.sleep(0)
        transcript += TOOL
    return transcript


class Life:
    """One process of a run, from what the one before it left to a kill."""

    def __init__(self, rng: random.Random, shapes: list[Any], records: dict[str, Any], results: dict[str, Any]) -> None:
        self.server, self.book = CountingServer(rng), AnswerBook()
        self.client = client_of(self.server, response_length=64)
        self.records, self.results = records, results
        self.trained = 0
        left = {str(n): shape for n, shape in enumerate(shapes) if str(n) not in results}
        self.running = [asyncio.create_task(self._run(key, shape)) for key, shape in left.items()]
        self.syncing = asyncio.create_task(self.server.sync())

    async def _run(self, key: str, shape: list[list[int]]) -> None:
        answers = self.book.begin(key, self.records.get(key))
        self.results[key], recorder = await answer(self.client, answers, lambda client: a_loop(client, shape))
        self.trained += recorder.cut_tokens
        self.book.end(key, complete=True)

    async def checkpoint(self) -> dict[str, TrajectoryRecord]:
        # As the scheduler does it: a trajectory that its worker does not know yet keeps what it begins with.
        told = {**self.records, **await export(self.book, self.client)}
        return {key: record for key, record in told.items() if record is not None and key not in self.results}

    async def kill(self) -> None:
        for task in (*self.running, self.syncing):
            task.cancel()
        await settle()


def sampled_by(tokens_in: list[int], results: dict[str, Any], records: dict[str, TrajectoryRecord]) -> int:
    """Tokens of complete trajectories, and of what is kept of the others."""
    complete = sum(tokens_in[int(key)] for key in results)
    return complete + sum(len(tokens_of(record)) for record in records.values())


@pytest.mark.parametrize("seed", range(40))
async def test_no_token_is_sampled_twice_wherever_a_run_is_killed_and_however_often(seed: int) -> None:
    rng = random.Random(seed)
    shapes = [
        [[rng.randint(1, 9) for _ in range(rng.choice((1, 1, 2)))] for _ in range(rng.randint(1, 3))] for _ in range(4)
    ]
    tokens_in = [sum(sum(turn) for turn in shape) for shape in shapes]
    records: dict[str, TrajectoryRecord] = {}
    results: dict[str, list[int]] = {}
    cut = trained = 0
    for _ in range(3):
        known = sampled_by(tokens_in, results, records)
        life = Life(rng, shapes, records, results)
        for _ in range(rng.randint(0, 60)):
            await asyncio.sleep(0)
        before = life.server.sampled
        records = await life.checkpoint()
        # The checkpoint has what there was and what this life had sampled when it began, and nothing twice.
        assert known + before <= sampled_by(tokens_in, results, records) <= known + life.server.sampled
        # The account of cut answers closes.
        cut += life.book.account().cut + sum(record.under_way_tokens for record in records.values())
        trained += life.trained
        assert cut == trained + sum(record.cut_tokens for record in records.values())
        await life.kill()
    last = Life(rng, shapes, records, dict(results))
    await asyncio.gather(*last.running)
    await last.kill()
    assert last.server.sampled == sum(tokens_in) - sampled_by(tokens_in, results, records)
    whole = client_of(CountingServer(rng), response_length=64)
    for n, shape in enumerate(shapes):
        expected, _ = await answer(whole, TrajectoryRecorder(), lambda client, shape=shape: a_loop(client, shape))
        assert last.results[str(n)] == expected

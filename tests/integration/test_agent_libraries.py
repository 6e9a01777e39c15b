# SPDX-License-Identifier: Apache-2.0
"""Well-known libraries of agents, unchanged, at a trajectory's address: each uses a tool, and is trained on its tokens,
also when it is cut, killed and resumed.

They are installed in a folder beside the other packages (requirements/agents.txt); without it these tests are skipped.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from remote_fakes import part
from scripted_policy import ScriptedClient, agent_loop, called, check_trained, tokenizer
from test_kept_answers import SOON, client_of
from verl.workers.rollout.replica import TokenOutput

from recipe.async_engine.core.versions import NOT_SAMPLED, align_in
from recipe.async_engine.engines.answers import Sampled
from recipe.async_engine.rollout.kept_answers import AnswerBook, TrajectoryRecorder, start_recording

FOLDER = Path(sys.prefix, "agents")
PROGRAM = Path(__file__).with_name("library_agents.py")
CHAT, RESPONSES = [], ["responses"]
PIECE = 11
"""Tokens of an answer between two versions."""

REWRITES = {"smolagents"}
"""Libraries that send an answer back as a text of their own, so that it is context in what follows."""


pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="requirements/agents.txt is not installed")
INTERFACES = pytest.mark.parametrize(
    ("library", "interface"),
    [
        ("openai_agents", CHAT),
        ("openai_agents", RESPONSES),
        ("pydantic_ai", CHAT),
        ("pydantic_ai", RESPONSES),
        ("smolagents", CHAT),
        ("langgraph", CHAT),
        ("langgraph", RESPONSES),
    ],
)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")


def program(library: str, *how: str) -> dict[str, Any]:
    """Arguments of the agent loop that runs a library's agent."""
    command = shlex.join([sys.executable, str(PROGRAM), library, *how])
    return {"command": command, "deadline_s": 120.0, "passed": "PYTHONDONTWRITEBYTECODE"}


def script(library: str) -> list[str]:
    """A call of the tool, and the last answer as the library wants it."""
    last = called("final_answer", answer="3") if library == "smolagents" else "The sum of the two is 3."
    return [f"I add.\n{called('add', a=1, b=2)}", last]


@pytest.mark.parametrize("stream", [[], ["stream"]], ids=["whole", "streamed"])
@INTERFACES
async def test_a_librarys_agent_uses_a_tool_and_is_trained_as_it_was_sampled(
    library: str, interface: list[str], stream: list[str]
) -> None:
    client = ScriptedClient(script(library))
    loop = agent_loop(client, **program(library, *interface, *stream))
    outputs = await loop.run({"temperature": 1.0}, raw_prompt=[])
    check_trained(client, outputs)
    assert len(client.sampled) == 2
    assert isinstance(outputs, list) == (library in REWRITES)
    for output in outputs if isinstance(outputs, list) else [outputs]:
        assert output.reward_score == 1.0
        assert "3" in output.extra_fields["reward_extra_info"]["answer"]
        assert output.extra_fields["agent_unmatched_share"] == float(library in REWRITES)
    if library not in REWRITES:
        assert "<tool_response>\n3\n" in tokenizer().decode(outputs.response_ids)


class CutServer:
    """Samples answers of a script in pieces, each under another version, until it has sampled ``left`` tokens.

    The last of these belong to a request that gets no answer before the kill. ``sampled`` has all tokens, each with
    what it was sampled after, and its version.
    """

    def __init__(self, answers: list[str], version: int, left: int) -> None:
        self.answers, self.version, self.left = answers, version, left
        self.sampled: Counter[tuple[tuple[int, ...], int]] = Counter()
        self.open: dict[str, Sampled] = {}
        self.is_done = asyncio.Event()

    async def generate(self, request_id: str, prompt_ids: list[int], sampled: int, **more: Any) -> TokenOutput:
        answers_before = tokenizer().decode(prompt_ids[: len(prompt_ids) - sampled]).count("<|im_start|>assistant") - 1
        answer = [*tokenizer().encode(self.answers[answers_before]), tokenizer().eos_token_id]
        tokens = answer[sampled:][: min(PIECE, self.left)]
        version, self.version, self.left = self.version, self.version + 1, self.left - len(tokens)
        for end in range(1, len(tokens) + 1):
            self.sampled[(*prompt_ids, *tokens[:end]), version] += 1
        if not self.left:
            self.open[request_id] = Sampled(tokens, [(version, len(tokens))], [-1.0] * len(tokens))
            self.is_done.set()
            await asyncio.get_running_loop().create_future()
        return part(tokens, version, "completed" if sampled + len(tokens) == len(answer) else "aborted")

    async def sampled_since(self, known: dict[str, int]) -> dict[str, Sampled]:
        return self.open

    async def drop_request(self, request_id: str) -> None:
        pass


async def life(library: str, how: list[str], server: CutServer, recorder: TrajectoryRecorder, client: Any) -> list[Any]:
    start_recording(recorder)
    returned = await agent_loop(client, **program(library, *how)).run({"temperature": 1.0}, raw_prompt=[])
    return returned if isinstance(returned, list) else [returned]


@INTERFACES
async def test_a_librarys_agent_that_is_cut_killed_and_resumed_is_trained_once_on_all_that_was_sampled(
    library: str, interface: list[str]
) -> None:
    answers, book = script(library), AnswerBook()
    first = CutServer(answers, version=0, left=len(tokenizer().encode(answers[0])) + 1 + PIECE + 2)
    client = client_of(first)
    killed = asyncio.create_task(life(library, interface, first, book.begin("0-0-0"), client))
    waits = asyncio.create_task(first.is_done.wait())
    await asyncio.wait([killed, waits], return_when=asyncio.FIRST_COMPLETED)
    assert not killed.done(), await killed
    await client.fetch(book.flights(), SOON)
    kept = book.export()["0-0-0"]
    killed.cancel()
    await asyncio.wait([killed])

    book, second = AnswerBook(), CutServer(answers, version=first.version, left=1000)
    recorder = book.begin("0-0-0", kept)
    outputs = await life(library, interface, second, recorder, client_of(second))
    book.end("0-0-0", complete=True)
    assert book.account().lost == 0
    assert recorder.restored_tokens == first.sampled.total() and second.sampled
    trained: Counter[tuple[tuple[int, ...], int]] = Counter()
    for output in outputs:
        labels = align_in(
            recorder.segments, recorder.contexts, output.prompt_ids, output.response_ids, output.response_mask
        )
        assert labels.exact
        sequence, place = [*output.prompt_ids, *output.response_ids], len(output.prompt_ids)
        for version, count in labels.runs:
            ends = range(place + 1, place + count + 1) if version != NOT_SAMPLED else ()
            trained.update((tuple(sequence[:end]), version) for end in ends)
            place += count
    assert trained == first.sampled + second.sampled

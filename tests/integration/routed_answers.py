# SPDX-License-Identifier: Apache-2.0
"""The experts of answers that were interrupted, continued, resumed and moved: real client, servers and engines.

It is a separate process, started by test_router_replay.py, which prints its results as one line of JSON, and writes the
trajectories to a file. Each token's experts are compared with those that Hugging Face's forward pass chooses with the
weights that sampled the next token.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import verl  # noqa: F401  (its plugin makes this vLLM known)
from cut_answers import make_client, make_server
from cut_cases import AT_ONCE, make_tokenizer
from routed_engine import make_engine
from routed_model import MOST_TOKENS, weights_of

from recipe.async_engine.core.errors import EngineDied
from recipe.async_engine.core.versions import align
from recipe.async_engine.engines.vllm.engine_calls import call_each_worker
from recipe.async_engine.rollout.chosen_experts import ChosenExperts
from recipe.async_engine.rollout.client import ResumingClient
from recipe.async_engine.rollout.kept_answers import AnswerBook, TrajectoryRecorder, start_recording

TRAJECTORIES = 90
PUBLISH_EVERY_S, FETCH_EVERY_S = 0.6, 0.05
DIES_AFTER_TOKENS = 60
ROUNDING = 1e-4
"""Difference of two experts' logits, which are about 1, below which fp32 kernels may choose either."""
# A trajectory is at most four answers, and what a tool returned after each.
LONGEST_ANSWER, LONGEST_TOOL, TURNS = 60, 12, 4


class Overwritten(ChosenExperts):
    """Also keeps what stock verl would replay: the experts of the last request's pass over all turns."""

    def first_chosen(self, token_ids: list[int], experts: Any) -> Any:
        self.of_last_pass = experts
        return super().first_chosen(token_ids, experts)


class Mortal:
    """A rollout server whose engine can die under its requests."""

    def __init__(self, server: Any) -> None:
        self._server, self._death = server, asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def die(self) -> None:
        self._death.set()

    async def generate(self, *arguments: Any, **request: Any) -> Any:
        if self._death.is_set():
            raise EngineDied("it is dead")
        work = asyncio.ensure_future(self._server.generate(*arguments, **request))
        death = asyncio.ensure_future(self._death.wait())
        try:
            await asyncio.wait({work, death}, return_when=asyncio.FIRST_COMPLETED)
            if self._death.is_set():
                raise EngineDied("it is dead")
            return await work
        finally:
            work.cancel()
            death.cancel()


async def agent_loop(client: ResumingClient, number: int) -> dict[str, Any]:
    """Return a trajectory of one or more turns; the tools return the same if it is run again."""
    rng = random.Random(number)

    def some(least: int, most: int) -> list[int]:
        return [rng.randrange(3, 288) for _ in range(rng.randint(least, most))]

    prompt, response, mask, experts = some(4, 120), [], [], None
    for turn in range(rng.randint(1, TURNS)):
        if turn:
            tool = some(1, LONGEST_TOOL)
            response, mask = response + tool, mask + [0] * len(tool)
        found = await client.generate(
            f"{number}",
            prompt_ids=prompt + response,
            sampling_params={
                "max_tokens": rng.randint(2, LONGEST_ANSWER),
                "ignore_eos": True,
                "temperature": 1.0,
                "logprobs": True,
            },
        )
        response, mask = response + list(found.token_ids), mask + [1] * len(found.token_ids)
        experts = found.routed_experts
    return {"prompt_ids": prompt, "response_ids": response, "response_mask": mask, "routed_experts": experts}


async def publish(servers: list[Any], version: int, at_swap: str) -> None:
    """Bring a version to the servers, in the order in which the publisher does it."""
    for server in servers:
        await call_each_worker(server.engine, "stage_version", version)
    for server in servers:
        await (server.hold_requests() if at_swap == "keep" else server.abort_all_requests())
    for server in servers:
        await server.swap(version, f"checksum {version}")
    for server in servers:
        await server.resume_generation()


def sampling_versions(trajectory: dict[str, Any], runs: list[tuple[int, int]]) -> list[int]:
    """Return for each token but the last one the version of the pass over it: the one that sampled what came next.

    ``runs`` has the version of each token of the response; negative for the tokens of tools.
    """
    versions = [-1] * len(trajectory["prompt_ids"]) + [version for version, count in runs for _ in range(count)]
    for place in range(len(versions) - 2, -1, -1):
        if versions[place] < 0:
            versions[place] = versions[place + 1]
    return versions[1:]


def excess(version: int, tokens: list[int], rows: list[int], experts: np.ndarray) -> torch.Tensor:
    """Return how much larger the logit of the best expert left out is than that of the worst chosen one, for each row.

    It is the maximum over the layers, and not above 0 if the version's routers choose these experts. The model computes
    the ``rows`` with ``experts``, and the other tokens with its own choice. So a choice between two experts that are
    equal up to rounding does not change what the tokens after it should choose.
    """
    forced, found = torch.from_numpy(experts[rows].astype(np.int64)), []

    def force(gate: Any, inputs: Any, output: Any) -> Any:
        logits, _, chosen = output
        mine = forced[:, len(found)]
        left = logits[rows].scatter(1, mine, -torch.inf).max(1).values
        found.append(left - logits[rows].gather(1, mine).min(1).values)
        chosen = chosen.index_copy(0, torch.tensor(rows), mine)
        weights = logits.softmax(-1).gather(1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    model = weights_of(version)
    hooks = [layer.mlp.gate.register_forward_hook(force) for layer in model.model.layers]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found).max(0).values


def differences(trajectory: dict[str, Any], versions: list[int], experts: np.ndarray) -> tuple[int, int]:
    """Return the numbers of tokens with other experts than their version chooses, and of equal ones up to rounding."""
    tokens = [*trajectory["prompt_ids"], *trajectory["response_ids"]]
    assert len(experts) == len(versions) == len(tokens) - 1
    wrong = ties = 0
    for version in set(versions):
        rows = [place for place, by in enumerate(versions) if by == version]
        found = excess(version, tokens, rows, experts)
        wrong += int((found > ROUNDING).sum())
        ties += int(((found > 0) & (found <= ROUNDING)).sum())
    return wrong, ties


class Run:
    """Trajectories at two servers, one of which dies, over checkpoints and versions."""

    def __init__(self, engines: list[Any]) -> None:
        settings = {"max_model_len": MOST_TOKENS, "response_length": 400, "prompt_length": 120}
        settings["enable_rollout_routing_replay"] = True
        self.servers = [Mortal(make_server(engine, **settings)) for engine in engines]
        self.client = make_client(*self.servers, fetch_every_s=FETCH_EVERY_S, **settings)
        self.version, self.publications = 0, {"interrupt": 0, "keep": 0}
        self.done: dict[int, tuple[dict[str, Any], TrajectoryRecorder]] = {}
        self.records: dict[str, Any] = {}
        self.checkpoints = self.kept_under_way = 0
        self.stopped = False

    def fetched_from(self, server: str) -> int:
        """Return the number of tokens that the client has fetched of answers under way at a server."""
        return sum(len(flight.token_ids) for flight in self.client._flights if flight.server_id == server)

    async def publishing(self) -> None:
        while not self.stopped:
            await asyncio.sleep(PUBLISH_EVERY_S)
            at_swap = "keep" if self.version % 2 else "interrupt"
            self.version += 1
            await publish(self.servers, self.version, at_swap)
            self.publications[at_swap] += 1

    async def life(self, until: int) -> None:
        """Run the unfinished trajectories, until so many have finished; then take a checkpoint and end."""
        book, slots = AnswerBook(), asyncio.Semaphore(2 * AT_ONCE)

        async def one(number: int) -> None:
            async with slots:
                recorder = start_recording(
                    book.begin(f"{number}", self.records.get(f"{number}"), experts=Overwritten())
                )
                self.done[number] = await agent_loop(self.client, number), recorder
                book.end(f"{number}", complete=True)

        tasks = [asyncio.create_task(one(number)) for number in range(TRAJECTORIES) if number not in self.done]
        while len(self.done) < until:
            await asyncio.sleep(0.01)
            for task in tasks:
                if task.done():
                    task.result()
        await self.client.fetch(book.flights(), timeout_s=5.0)
        records = {**self.records, **book.export()}
        self.records = {key: record for key, record in records.items() if record is not None}
        self.kept_under_way += sum(record.under_way_tokens for record in self.records.values())
        self.checkpoints += 1
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def play(folder: Path) -> dict[str, Any]:
    make_tokenizer().save_pretrained(folder / "model")
    weights_of(0).save_pretrained(folder / "model")
    engines = [make_engine(folder / "model") for _ in range(2)]
    run = Run(engines)
    publishing = asyncio.create_task(run.publishing())
    await run.life(until=TRAJECTORIES // 4)
    dying = asyncio.create_task(run.life(until=TRAJECTORIES // 2))
    while run.fetched_from("server-0") < DIES_AFTER_TOKENS:
        await asyncio.sleep(0.01)
    run.servers[0].die()
    await dying
    await run.life(until=TRAJECTORIES)
    run.stopped = True
    await publishing
    for engine in engines:
        engine.shutdown()
    return compared(run, folder)


def compared(run: Run, folder: Path) -> dict[str, Any]:
    counts = ("tokens", "differences", "ties", "shifted", "of_last_pass", "turns", "mixed")
    seen: dict[str, Any] = dict.fromkeys(counts, 0)
    recorders = [recorder for _, recorder in run.done.values()]
    for trajectory, recorder in run.done.values():
        alignment = align(recorder.segments, trajectory["response_ids"], trajectory["response_mask"])
        assert alignment.exact
        versions, found = sampling_versions(trajectory, alignment.runs), trajectory["routed_experts"]
        wrong, ties = differences(trajectory, versions, found)
        seen["tokens"], seen["ties"] = seen["tokens"] + len(found), seen["ties"] + ties
        seen["differences"] += wrong
        seen["shifted"] += differences(trajectory, versions, np.roll(found, 1, 0))[0]
        seen["of_last_pass"] += differences(trajectory, versions, recorder.experts.of_last_pass)[0]
        seen["turns"] = max(seen["turns"], 1 + trajectory["response_mask"].count(0) // LONGEST_TOOL)
        seen["mixed"] += alignment.oldest != alignment.newest
    (folder / "trajectories").write_bytes(pickle.dumps([trajectory for trajectory, _ in run.done.values()]))
    return seen | {
        "publications": run.publications,
        "checkpoints": run.checkpoints,
        "interruptions": sum(recorder.interruptions for recorder in recorders),
        "restored": sum(recorder.restored_tokens for recorder in recorders),
        "kept_under_way": run.kept_under_way,
        "recovered": sum(recorder.recovered_tokens for recorder in recorders),
    }


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        found = asyncio.run(play(Path(sys.argv[2])))
    sys.stdout.write(json.dumps(found) + "\n")

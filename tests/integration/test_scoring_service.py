# SPDX-License-Identifier: Apache-2.0
"""A log-prob server's loop over a scripted engine: every request ends, and versions move in their order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from recipe.async_engine.core.scoring import Anchor, ScoringSettings
from recipe.async_engine.log_prob_servers.service import (
    EngineLost,
    ScoringService,
    Unscored,
)

SOON = 10.0


class Engine:
    """Says by which version it scored; ``script`` has errors to raise, and events to wait for."""

    def __init__(self) -> None:
        self.version = -1
        self.script: list[Any] = []
        self.batches: list[tuple[int, list[Any]]] = []
        self.promotion_error: Exception | None = None
        self.gives: int | None = None
        self.busy = False

    async def score(self, sequences: Sequence[Any]) -> list[str]:
        assert not self.busy
        self.busy = True
        try:
            step = self.script.pop(0) if self.script else None
            if isinstance(step, asyncio.Event):
                await step.wait()
            if isinstance(step, Exception):
                raise step
            self.batches.append((self.version, list(sequences)))
            return [f"{sequence} by {self.version}" for sequence in sequences][: self.gives]
        finally:
            self.busy = False

    async def promote(self, version: int) -> None:
        assert not self.busy
        if self.promotion_error is not None:
            raise self.promotion_error
        self.version = version


class Harness:
    def __init__(self, anchor: Anchor, drain_s: float = 60.0, ranks: int = 1, holds: bool = False) -> None:
        self.engine = Engine()
        settings = ScoringSettings(anchor, 100, max_delay_s=0.02, drain_s=drain_s, holds_for_weights=holds)
        self.lost: asyncio.Queue[BaseException] = asyncio.Queue()
        self.service = ScoringService(settings, self.engine, self.lost.put_nowait, ranks=ranks)
        self.service.run()

    async def load(self, version: int) -> None:
        await self.service.begin_load(version, SOON)
        self.service.staged()

    def ask(self, name: str, version: int, tokens: int = 10, start: int = 0) -> asyncio.Task[Any]:
        return asyncio.create_task(self.service.score(name, tokens, version, start))

    async def hold(self, *names: str, version: int = 0) -> tuple[asyncio.Event, list[asyncio.Task[Any]]]:
        """Requests whose batch has begun; it ends when the event is set."""
        held = asyncio.Event()
        self.engine.script = [held]
        tasks = [self.ask(name, version) for name in names]
        while not self.engine.busy:
            await asyncio.sleep(0.01)
        return held, tasks

    async def end(self) -> BaseException:
        return await asyncio.wait_for(self.lost.get(), SOON)

    async def answer(self, task: asyncio.Task[Any]) -> Any:
        return await asyncio.wait_for(task, SOON)


@pytest.fixture
async def generation() -> AsyncIterator[Harness]:
    harness = Harness(Anchor.GENERATION)
    yield harness
    harness.service._loop.cancel()


@pytest.fixture
async def latest() -> AsyncIterator[Harness]:
    harness = Harness(Anchor.LATEST)
    yield harness
    harness.service._loop.cancel()


async def test_requests_are_scored_together_and_counted(generation: Harness) -> None:
    await generation.load(0)
    answers = await asyncio.gather(*[generation.answer(generation.ask(name, 0)) for name in "ab"])
    assert [answer.scores for answer in answers] == ["a by 0", "b by 0"]
    assert all((answer.version, answer.late) == (0, False) and answer.queued_s >= 0 for answer in answers)
    assert generation.engine.batches == [(0, ["a", "b"])]
    counts = generation.service.counts
    assert (counts.batches, counts.sequences, counts.tokens, counts.late) == (1, 2, 20, 0)
    assert counts.fill == pytest.approx(0.2)


async def test_segments_of_both_sides_of_a_sync_get_their_versions(generation: Harness) -> None:
    await generation.load(0)
    held, [first] = await generation.hold("first")
    await generation.load(1)
    newer = generation.ask("newer", 1)
    await asyncio.sleep(0)
    older = generation.ask("older", 0)
    await asyncio.sleep(0.05)
    held.set()
    got = [await generation.answer(task) for task in (first, older, newer)]
    assert [answer.scores for answer in got] == ["first by 0", "older by 0", "newer by 1"]
    assert not any(answer.late for answer in got)


async def test_segment_that_misses_the_deadline_is_scored_late() -> None:
    harness = Harness(Anchor.GENERATION, drain_s=0.05)
    await harness.load(0)
    await harness.answer(harness.ask("settles", 0))
    harness.service.pause_serving()
    older = harness.ask("older", 0)
    await asyncio.sleep(0)
    await harness.load(1)
    newer = harness.ask("newer", 1)
    while harness.service._queue.live != 1:
        await asyncio.sleep(0.01)
    harness.service.resume_serving()
    answer = await harness.answer(older)
    assert (answer.scores, answer.version, answer.late) == ("older by 1", 1, True)
    assert not (await harness.answer(newer)).late
    assert harness.service.counts.late == 1
    harness.service._loop.cancel()


async def test_next_load_waits_until_the_weights_before_it_have_moved_in(generation: Harness) -> None:
    for version in range(3):
        await generation.load(version)
    assert generation.service._queue.live == 1
    await generation.answer(generation.ask("pushes", 2))
    assert generation.service._queue.live == 2


async def test_load_that_finds_no_place_in_time_is_taken_back(generation: Harness) -> None:
    await generation.load(0)
    held, [task] = await generation.hold("held")
    await generation.load(1)
    with pytest.raises(TimeoutError):
        await generation.service.begin_load(2, 0.05)
    held.set()
    await generation.answer(task)
    await generation.load(2)


@pytest.fixture
async def ranks() -> AsyncIterator[Harness]:
    """A server of two ranks that compute nothing while weights come; version 0 is live."""
    harness = Harness(Anchor.GENERATION, ranks=2, holds=True)
    for _ in range(2):
        await harness.service.begin_load(0, SOON)
    for _ in range(2):
        harness.service.staged()
    await harness.answer(harness.ask("settles", 0))
    yield harness
    harness.service._loop.cancel()


async def test_no_rank_joins_before_the_batch_under_way_has_ended_and_none_begins_until_all_have(
    ranks: Harness,
) -> None:
    held, [task] = await ranks.hold("held")
    joining = [asyncio.create_task(ranks.service.begin_join()) for _ in range(2)]
    assert not (await asyncio.wait(joining, timeout=0.1))[0]
    waits = ranks.ask("waits", 0)
    held.set()
    await ranks.answer(task)
    await asyncio.gather(*joining)
    ranks.service.joined()
    assert not (await asyncio.wait([waits], timeout=0.1))[0], "the other rank has not joined yet"
    ranks.service.joined()
    assert (await ranks.answer(waits)).version == 0


async def test_no_rank_receives_before_the_batch_under_way_has_ended_and_none_begins_meanwhile(ranks: Harness) -> None:
    held, [task] = await ranks.hold("held")
    receiving = [asyncio.create_task(ranks.service.begin_load(1, SOON)) for _ in range(2)]
    assert not (await asyncio.wait(receiving, timeout=0.1))[0]
    waits = ranks.ask("waits", 0)
    held.set()
    await ranks.answer(task)
    await asyncio.gather(*receiving)
    assert not (await asyncio.wait([waits], timeout=0.1))[0]
    ranks.service.staged()
    assert not (await asyncio.wait([waits], timeout=0.1))[0], "the other rank still receives"
    ranks.service.staged()
    assert (await ranks.answer(waits)).version == 0
    assert (await ranks.answer(ranks.ask("newer", 1))).version == 1


async def test_ranks_compute_again_once_one_of_them_cannot_take_the_weights(ranks: Harness) -> None:
    for _ in range(2):
        await ranks.service.begin_load(1, SOON)
    ranks.service.staged()
    waits = ranks.ask("waits", 0)
    ranks.service.load_failed("one lacks a tensor")
    assert (await ranks.answer(waits)).version == 0
    for _ in range(2):
        await ranks.service.begin_load(1, SOON)
    ranks.service.staged()
    newer = ranks.ask("newer", 1)
    assert not (await asyncio.wait([newer], timeout=0.1))[0], "one rank alone has the version"
    ranks.service.staged()
    assert (await ranks.answer(newer)).version == 1


async def test_failed_load_sends_its_requests_elsewhere_and_the_old_version_goes_on(generation: Harness) -> None:
    await generation.load(0)
    await generation.answer(generation.ask("settles", 0))
    await generation.service.begin_load(1, SOON)
    doomed = generation.ask("doomed", 1)
    await asyncio.sleep(0)
    generation.service.load_failed("the stream was cut off")
    with pytest.raises(Unscored, match="version 1 did not come: the stream was cut off"):
        await generation.answer(doomed)
    with pytest.raises(Unscored, match="version 1 is not here"):
        await generation.answer(generation.ask("too early", 1))
    assert (await generation.answer(generation.ask("still", 0))).version == 0


async def test_engine_error_costs_its_batch_only(generation: Harness) -> None:
    await generation.load(0)
    generation.engine.script = [MemoryError("too long")]
    with pytest.raises(Unscored, match="MemoryError: too long") as caught:
        await generation.answer(generation.ask("long", 0))
    assert isinstance(caught.value.__cause__, MemoryError)
    assert (await generation.answer(generation.ask("short", 0))).scores == "short by 0"


async def test_lost_engine_ends_the_server(generation: Harness) -> None:
    await generation.load(0)
    generation.engine.script = [EngineLost("a rank died")]
    asked = [generation.ask(name, 0) for name in "ab"]
    assert isinstance(await generation.end(), EngineLost)
    assert not any(task.done() for task in asked), "they end with the process"


async def test_failed_promotion_ends_the_server(generation: Harness) -> None:
    await generation.load(0)
    await generation.answer(generation.ask("settles", 0))
    generation.engine.promotion_error = RuntimeError("rank 1 is gone")
    await generation.load(1)
    waits = generation.ask("waits", 1)
    assert await generation.end() is generation.engine.promotion_error
    assert not waits.done()


async def test_error_of_the_loop_itself_ends_the_server(generation: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(now: float) -> None:
        raise KeyError("no such request")

    await generation.load(0)
    monkeypatch.setattr(generation.service._queue, "next", fail)
    generation.ask("waits", 0)
    assert isinstance(await generation.end(), KeyError)


@pytest.mark.parametrize("moved_in", [False, True])
async def test_refused_weights_score_nothing_and_the_next_ones_do(generation: Harness, moved_in: bool) -> None:
    await generation.load(0)
    await generation.answer(generation.ask("settles", 0))
    await generation.load(1)
    if moved_in:
        assert (await generation.answer(generation.ask("moves", 1))).version == 1
    generation.service.refuse(1, "it has another checksum")
    for version in (0, 1):
        with pytest.raises(Unscored):
            await generation.answer(generation.ask("asks", version))
    await generation.load(2)
    assert (await generation.answer(generation.ask("d", 2))).scores == "d by 2"


async def test_requests_that_wait_for_refused_weights_or_are_scored_by_them_go_elsewhere(generation: Harness) -> None:
    await generation.load(0)
    held, scored = await generation.hold("a")
    await generation.load(1)
    waits = generation.ask("b", 1)
    await asyncio.sleep(0)
    generation.service.refuse(1, "it has another checksum")
    with pytest.raises(Unscored, match="another checksum"):
        await generation.answer(waits)
    held.set()
    assert (await generation.answer(scored[0])).version == 0, "the weights before it were right"
    await generation.load(2)
    held, scored = await generation.hold("c", version=2)
    generation.service.refuse(2, "it has another checksum")
    held.set()
    with pytest.raises(Unscored, match="version 2 were refused"):
        await generation.answer(scored[0])


async def test_engine_that_gives_too_few_scores_costs_its_batch_only(generation: Harness) -> None:
    await generation.load(0)
    generation.engine.gives = 1
    held, tasks = await generation.hold("a", "b")
    held.set()
    for task in tasks:
        with pytest.raises(Unscored, match="2 sequences could not be scored: ValueError: the engine gave 1"):
            await generation.answer(task)
    generation.engine.gives = None
    assert (await generation.answer(generation.ask("c", 0))).scores == "c by 0"


async def test_caller_that_goes_away_takes_its_request_along(generation: Harness) -> None:
    await generation.load(0)
    generation.service.pause_serving()
    task = generation.ask("unwanted", 0)
    await asyncio.sleep(0)
    assert len(generation.service._queue) == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(generation.service._queue) == 0
    generation.service.resume_serving()
    assert (await generation.answer(generation.ask("wanted", 0))).scores == "wanted by 0"
    assert generation.engine.batches == [(0, ["wanted"])]


async def test_caller_that_goes_away_during_its_batch_disturbs_nobody(generation: Harness) -> None:
    await generation.load(0)
    held, [leaving, staying] = await generation.hold("leaving", "staying")
    leaving.cancel()
    await asyncio.sleep(0)
    held.set()
    assert (await generation.answer(staying)).scores == "staying by 0"


async def test_latest_waits_for_the_version_that_it_needs(latest: Harness) -> None:
    await latest.load(0)
    await latest.answer(latest.ask("settles", 0))
    await latest.service.begin_load(1, SOON)
    refreshed = latest.ask("refreshed", 1)
    await asyncio.sleep(0.05)
    assert not refreshed.done()
    latest.service.staged()
    answer = await latest.answer(refreshed)
    assert (answer.version, answer.late) == (1, False)
    assert (await latest.answer(latest.ask("older will do", 0))).version == 1

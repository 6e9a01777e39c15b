# SPDX-License-Identifier: Apache-2.0
"""Users' agent loops and tools that do everything wrong: real worker, pool, client and tool loop, in one process.

Whatever one does costs its own trajectory, with its words or its field's name; beside it, others go on. What ends a
process, changes it or stands still in it, is in tests/e2e/test_users_functions.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from odd_errors import WORDS
from odd_functions import INSTEAD, RAISING, RETURNED
from odd_loops import BEHAVING, OURSELVES, raising, returning, returning_instead
from odd_tools import TOOLS, words_of
from remote_fakes import Handle, ScriptedServer, part
from test_trajectory_worker import LOOPS, SOON, Loop, Reward, make_worker  # noqa: F401
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, _agent_loop_registry
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema

from recipe.async_engine.core.groups import Group, PromptRef
from recipe.async_engine.rollout import loop_output
from recipe.async_engine.rollout.group_run import (
    DEATHS_ALONE,
    DEATHS_FOR_NOTHING,
    GroupRun,
    TrajectoryCancelled,
    TrajectoryDisturbed,
    TrajectoryFailed,
    TrajectoryRun,
)
from recipe.async_engine.rollout.loop_output import RewardError
from recipe.async_engine.rollout.trajectory_codec import unpack
from recipe.async_engine.rollout.users_loop import run_loop
from recipe.async_engine.rollout.worker_pool import WorkerPool

DOES: dict[str, Any] = {}
"""What loops do, by what a row says; a row itself goes to other processes."""


def does(what: Any, **columns: Any) -> dict[str, Any]:
    """A row whose loop does this."""
    DOES[str(len(DOES))] = what
    return {"agent_name": "odd", "does": str(len(DOES) - 1), **columns}


class OddLoop(Loop):
    """Does what its row says."""

    async def run(self, sampling_params: dict[str, Any], **sample: Any) -> Any:
        return await DOES[sample["does"]](self, sampling_params, sample)

    async def sound(self, sampling_params: dict[str, Any]) -> AgentLoopOutput:
        return self.output([1, 2], await self.ask(sampling_params, [1, 2]))


@pytest.fixture
def worker(make_worker: Any, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: F811
    """One agent-loop worker with a server and a reward that never end."""
    monkeypatch.setattr(sys.modules[LOOPS], "OddLoop", OddLoop, raising=False)
    monkeypatch.setitem(_agent_loop_registry, "odd", {"_target_": f"{LOOPS}.OddLoop"})
    return make_worker(ScriptedServer(*[part([10, 11], 7)] * 2_000), Reward(*[0.5] * 2_000), trajectory_s=SOON)


@pytest.fixture(autouse=True)
def unlogged() -> Iterator[None]:
    """verl logs what tools raise as it is, and workers of pytest-xdist cannot send half a character."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


async def outcome(pool: WorkerPool, number: int, row: dict[str, Any]) -> Any:
    """A trajectory's payload, or the words that its failure is logged with."""
    uid = f"0-{number}"
    columns = {"raw_prompt": [{"role": "user", "content": "hi"}], **row}
    arrays = {name: np.fromiter([value], dtype=object) for name, value in columns.items()}
    run = GroupRun(Group(number, PromptRef(number, 0, uid), 7), arrays, 1).trajectories[0]
    pool.assign(run)
    try:
        await pool.attempt(run, lambda: None)
        return unpack(await run.payload)[-1]
    except TrajectoryFailed as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


async def outcomes(worker: Any, rows: list[dict[str, Any]]) -> list[Any]:
    """Of all these rows, each between two that are sound."""
    pool = WorkerPool([Handle(Answering(worker))])
    sound = {"agent_name": "PlainLoop"}
    mixed = [each for row in rows for each in (row, sound)]
    work = [outcome(pool, number, row) for number, row in enumerate(mixed)]
    try:
        found = await asyncio.wait_for(asyncio.gather(*work), 60.0)
    finally:
        pool.stop()
    assert not [each for each in found[1::2] if isinstance(each, str)], "a sound one beside them failed"
    assert worker._running == {}
    return found[::2]


class Answering:
    """A worker that is asked all the time whether it answers."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)

    async def is_there(self) -> None:
        """A sign of life."""


def faults(table: dict[str, str | None], found: list[Any]) -> list[str]:
    """Which of them did not end as the table says: taken where it has None, else with these words."""
    wrong = []
    for (name, words), each in zip(table.items(), found, strict=True):
        if words is None and isinstance(each, str):
            wrong.append(f"{name}: {each:.300}")
        elif words is not None and not (isinstance(each, str) and re.search(words, each, re.DOTALL)):
            wrong.append(f"{name}: expected {words!r}, was {each!s:.300}")
    return wrong


@pytest.mark.parametrize("where", ["before", "after"])
async def test_whatever_a_loop_raises_costs_its_trajectory_with_its_words(worker: Any, where: str) -> None:
    rows = [does(raising(function, where)) for function, _ in RAISING.values()]
    found = await outcomes(worker, rows)
    assert faults({name: words for name, (_, words) in RAISING.items()}, found) == []
    assert max(map(len, found)) < 20_000


async def test_whatever_a_loop_returns_is_a_plain_value_or_fails_by_the_name_of_its_field(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_output, "LARGEST", 1 << 20)
    rows = [does(returning(changes)) for changes, _ in RETURNED.values()]
    rows += [does(returning_instead(made)) for made, _ in INSTEAD.values()]
    table = {name: words for name, (_, words) in RETURNED.items()}
    table |= {f"instead, {name}": words for name, (_, words) in INSTEAD.items()}
    found = await outcomes(worker, rows)
    assert faults(table, found) == []
    taken = {name: each for name, each in zip(table, found, strict=True) if not isinstance(each, str)}
    for name, each in taken.items():
        count = 1 if name == "instead, a list of two" else 2
        assert each.response_ids[0, :count].tolist() == [10, 11][-count:], name
        assert type(each.reward_score) is float and type(each.num_turns) is int, name
    names = taken["verl's names"].extra_fields
    assert names["reported_uid"] == "mine" and not {"uid", "advantages", "prompts", "data_source"} & names.keys()
    ours = taken["this package's names"].extra_fields
    assert (ours["exact_versions"], list(ours["version_runs"]), ours["reported_version_runs"]) == (True, [(7, 2)], 7)
    assert "proximal_scores" not in ours


async def test_whatever_a_loop_does_to_its_process_costs_no_other(worker: Any) -> None:
    table = {**BEHAVING, **{name: (raising(function), None) for name, function in OURSELVES.items()}}
    found = await outcomes(worker, [does(what) for what, _ in table.values()])
    assert faults({name: words for name, (_, words) in table.items()}, found) == []


async def test_one_that_cancels_every_task_disturbs_the_others_which_is_no_failure_of_theirs(worker: Any) -> None:
    pool = WorkerPool([Handle(Answering(worker))])

    async def waits(loop: OddLoop, sampling_params: dict[str, Any], sample: dict[str, Any]) -> Any:
        await asyncio.sleep(SOON)

    async def cancels_all(loop: OddLoop, sampling_params: dict[str, Any], sample: dict[str, Any]) -> Any:
        for task in asyncio.all_tasks():
            if task.get_name().startswith("trajectory "):
                task.cancel()
        await asyncio.sleep(0)

    def call(number: int, what: Any) -> Any:
        row = does(what, raw_prompt=[])
        arrays = {name: np.fromiter([value], dtype=object) for name, value in row.items()}
        run = GroupRun(Group(number, PromptRef(number, 0, str(number)), 7), arrays, 1).trajectories[0]
        pool.assign(run)
        return pool.attempt(run, lambda: None)

    both = await asyncio.gather(call(0, waits), call(1, cancels_all), return_exceptions=True)
    pool.stop()
    assert [type(error) for error in both] == [TrajectoryDisturbed] * 2


async def test_those_under_suspicion_run_one_at_a_time_and_the_others_beside_them(worker: Any) -> None:
    pool, running, most = WorkerPool([Handle(Answering(worker))]), set[str](), set[frozenset[str]]()

    async def notes(loop: OddLoop, sampling_params: dict[str, Any], sample: dict[str, Any]) -> Any:
        running.add(sample["name"])
        await asyncio.sleep(0.02)
        most.add(frozenset(running))
        running.discard(sample["name"])
        return await loop.sound(sampling_params)

    async def follow(number: int, name: str) -> None:
        row = does(notes, raw_prompt=[], name=name)
        arrays = {column: np.fromiter([value], dtype=object) for column, value in row.items()}
        run = GroupRun(Group(number, PromptRef(number, 0, name), 7), arrays, 1).trajectories[0]
        run.errors = [TrajectoryDisturbed("the worker died")] * DEATHS_FOR_NOTHING * name.startswith("suspect")
        pool.assign(run)
        await pool.attempt(run, lambda: None)

    await asyncio.gather(*[follow(n, name) for n, name in enumerate(["suspect 1", "other", "suspect 2"])])
    pool.stop()
    assert not [each for each in most if {"suspect 1", "suspect 2"} <= each]
    assert [each for each in most if "other" in each and len(each) > 1]


def test_what_another_one_may_have_done_is_for_nothing_until_it_was_the_only_one_under_suspicion() -> None:
    own, death = TrajectoryFailed("its own"), TrajectoryDisturbed("the worker died")

    def after(errors: list[Any]) -> TrajectoryRun:
        run = GroupRun(Group(0, PromptRef(0, 0, "uid"), 0), {}, 1).trajectories[0]
        run.errors = errors
        return run

    def may_try_again(errors: list[Any], max_retries: int) -> bool:
        return after(errors).may_try_again(max_retries)

    assert may_try_again([], 0) and not may_try_again([own], 0) and may_try_again([own], 1)
    most = DEATHS_FOR_NOTHING + DEATHS_ALONE
    assert may_try_again([death] * (most - 1), 0)
    assert not may_try_again([death] * most, 9)
    assert may_try_again([death, own, death], 1) and not may_try_again([death, own, death, own], 1)
    assert not may_try_again([RewardError("no")], 9) and not may_try_again([TrajectoryCancelled("told")], 9)
    assert [after([death] * n).is_suspect for n in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("given", [None, "", float("nan")])
async def test_row_without_an_agent_loop_has_the_default_one(worker: Any, given: Any) -> None:
    (found,) = await outcomes(worker, [{"agent_name": given}])
    assert not isinstance(found, str)


NAMES = ("output", "validate", "trace", "trajectory", "kwargs", "key", "record", "turn", "args", "row", "cancellation")


async def test_columns_have_any_names_but_those_of_a_loops_own_arguments(worker: Any) -> None:
    async def keeps(loop: OddLoop, sampling_params: dict[str, Any], sample: dict[str, Any]) -> Any:
        output = await loop.sound(sampling_params)
        output.extra_fields["found"] = {name: sample.get(name) for name in (*NAMES, "session_id", "global_steps")}
        return output

    mine = {name: f"my {name}" for name in NAMES}
    row = does(keeps)
    refused = ["sampling_params", "self"]
    found = await outcomes(worker, [{**row, **mine}, {**row, "session_id": 9}, *({**row, n: 1} for n in refused)])
    assert found[0].extra_fields["found"] == {**mine, "session_id": 0, "global_steps": 7}
    assert found[1].extra_fields["found"]["session_id"] == 9
    assert [f"a column '{name}'" in each for name, each in zip(refused, found[2:], strict=True)] == [True, True]


async def test_lists_that_verl_makes_no_array_of_are_refused_by_name(worker: Any) -> None:
    """Lists of one length, and of mappings, reach the reward."""
    rows = [{"agent_name": "PlainLoop", "parts": parts} for parts in ([[1], [1, 2]], [[1, 2], [3, 4]], [{"a": 1}, {}])]
    ragged, *others = await outcomes(worker, rows)
    assert "column 'parts' has lists of different lengths" in ragged
    assert not any(isinstance(other, str) for other in others)


async def test_column_that_a_file_lacks_has_the_loops_own_default() -> None:
    class Loop:
        async def run(self, sampling_params: Any, level: str = "easy", *, hint: Any, **more: Any) -> Any:
            return level, hint, more

    row = {"level": None, "hint": None, "other": None}
    assert await run_loop(Loop(), {}, row) == ("easy", None, {"other": None})  # type: ignore[arg-type]


@pytest.mark.parametrize(("priority", "used"), [(3, 3), (np.int64(4), 4), ("high", 0), (None, 0), (2.5, 0)])
async def test_verls_loops_have_a_priority_that_is_a_whole_number_and_other_loops_whatever_it_is(
    priority: Any, used: int
) -> None:
    class Loop:
        async def run(self, sampling_params: Any, priority: Any = 0, **more: Any) -> Any:
            return priority

    verls = type("Verls", (Loop,), {"__module__": "verl.experimental.agent_loop.single_turn_agent_loop"})
    assert await run_loop(verls(), {}, {"priority": priority}) == used
    assert await run_loop(Loop(), {}, {"priority": priority}) == (0 if priority is None else priority)  # type: ignore


# Tools, in verl's own loop.


def tool_of(name: str, function: Callable[..., Any]) -> FunctionTool:
    parameters = {"type": "object", "properties": {}, "required": []}
    about = {"name": name, "description": "a tool", "parameters": parameters}
    schema = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": about})

    async def call() -> Any:
        return function()

    return FunctionTool(name=name, fn=call, tool_schema=schema, is_async=True)


async def test_whatever_a_tool_does_costs_at_most_its_trajectory(make_worker: Any) -> None:  # noqa: F811
    """Of what a tool raises verl's loop tells the policy, unless it is no `Exception`."""
    functions = TOOLS
    assert len(functions) >= 75

    def answer(**request: Any) -> Any:
        asked = worker.tokenizer.decode(request["prompt_ids"])
        if "<tool_call>" in asked:
            return part(worker.tokenizer.encode("done<|end|>"), 7)
        if (named := re.search(r"call (\w+)", asked)) is None:
            return part([10, 11], 7)
        call = {"name": named[1], "arguments": {}}
        return part(worker.tokenizer.encode(f"<tool_call>{json.dumps(call)}</tool_call><|end|>"), 7)

    worker = make_worker(ScriptedServer(*[answer] * 1_000), Reward(*[0.5] * 1_000), trajectory_s=2 * SOON)
    worker.tools = [tool_of(f"tool{n}", function) for n, function in enumerate(functions.values())]
    turns = {"max_user_turns": 3, "max_assistant_turns": 3, "max_parallel_calls": 1, "max_tool_response_length": 64}
    turns |= {"tool_response_truncate_side": "left", "format": "hermes"}
    lengths = {"prompt_length": 2_000, "response_length": 2_000}
    # verl's loop reads the one, its worker the other.
    worker.config.actor_rollout_ref.rollout.update({**lengths, "multi_turn": turns, "full_determinism": False})
    vars(worker.rollout_config).update(lengths)
    rows = [
        {
            "agent_name": "tool_agent",
            "raw_prompt": [{"role": "user", "content": f"call tool{n}"}],
            "extra_info": {"tool_selection": [f"tool{n}"]},
        }
        for n in range(len(functions))
    ]
    found = dict(zip(functions, await outcomes(worker, rows), strict=True))
    lost = {name: each for name, each in found.items() if isinstance(each, str)}
    expected = {name: words for name in functions if (words := words_of(name)) is not None}
    unlike = {name: lost.get(name, "taken")[:300] for name in lost.keys() ^ expected.keys()}
    assert not unlike, unlike
    assert faults(expected, [lost[name] for name in expected]) == []
    said = worker.tokenizer.decode(found["raises ValueError"].response_ids[0].tolist())
    assert WORDS in said

# SPDX-License-Identifier: Apache-2.0
"""A session of runs in which users' rewards, agent loops, tools and rows do whatever there is to be done wrong.

Each row of the data names one function of the tables that `make test` has too. Of each the run's record says what
became of its prompt, and the log of the trainer what a group that failed failed with; every second row is a right one.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import odd_agent_loop
import odd_rewards
import odd_tools
import psutil
import pyarrow
import pytest
from main_runs import FULLY_ASYNC, FinishedRun, run_main, small, trainer_log
from odd_errors import WORDS
from odd_poisons import POISONING
from odd_rewards import DIED, HARMLESS, LATE, SCORED, WAYS
from pyarrow import parquet

from recipe.async_engine.record.event_file import files, read
from recipe.async_engine.record.events import GROUPS
from recipe.async_engine.rollout.loop_output import is_number
from recipe.laptop.task import TaskPaths

BATCH, ANSWERS = 8, 2
ROLLOUT = "actor_rollout_ref.rollout"
TWO_WORKERS = [
    f"{ROLLOUT}.agent.num_workers=2",
    "async_training.timeouts.agent_worker=8",
    "async_training.timeouts.trajectory=8",
]
GIVEN_UP = r"prompt group PromptRef\(index=(\d+), epoch=0, uid='[^']*'\) failed for good"
MESSAGE = r"^recipe\.async_engine\.\S+?: (.*?)(?=^Traceback |^(?:ERROR|WARNING|INFO):\d{4}-|\Z)"
SLOW = {"huge list", "mapping without end", "fills memory", "little time"}
"""What takes seconds where there are other things to do, and may meet its deadline first."""
EITHER = "what it does to others it may do to itself"
PR_SET_CHILD_SUBREAPER = 36


class Odd(NamedTuple):
    """A function: where its name stands in ``extra_info``, and the words of its failure, None if it is trained.

    quiet: right rows that follow it.
    """

    kind: str
    name: str
    words: str | None
    quiet: int = 1
    more: tuple[tuple[str, str], ...] = ()


def reward(name: str, quiet: int = 1) -> Odd:
    way = WAYS[name]
    words: str | None = way.says
    if way.ends == LATE or name in SLOW:
        words = f"{words}|no reward within|gave nothing within"
    if way.ends in (LATE, DIED):
        # One that ends the process which all of them are forked from ends the others with it.
        words = f"{words}|ended, exit status"
    if way.ends == SCORED:
        words = None if is_number(way.says) else "the reward function gave reward="
    return Odd("way", name, words, quiet)


def spread(odd: list[Odd]) -> list[Odd]:
    """Those of one fate as far from each other as can be: what takes long is not beside its like."""
    by_words: dict[Any, list[Odd]] = {}
    for each in odd:
        by_words.setdefault(each.words, []).append(each)
    placed = [((n + 0.5) / len(same), each) for same in by_words.values() for n, each in enumerate(same)]
    return [each for _, each in sorted(placed, key=lambda pair: pair[0])]


REWARDS = [
    *spread([reward(name) for name, way in WAYS.items() if not way.alone]),
    *[reward(name, quiet=4) for name, way in WAYS.items() if way.alone],
]
LOOPS = [
    *spread(
        [Odd("loop", name, words) for name, (_, words) in odd_agent_loop.LOOPS.items() if words != odd_agent_loop.DEATH]
        + [reward(name) if WAYS[name].ends != DIED else Odd("way", name, WORDS) for name in HARMLESS]
    ),
    *[
        Odd("loop", name, words, quiet=2 * BATCH)
        for name, (_, words) in odd_agent_loop.LOOPS.items()
        if words == odd_agent_loop.DEATH
    ],
]


POISONS = [
    Odd("loop", name, EITHER if name.endswith("later") else f"{WORDS}|died|was cancelled", quiet=2 * BATCH)
    for name in POISONING
]


class Ended(NamedTuple):
    """What became of a prompt, by the record, and what the log says of it."""

    what: str
    said: str


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Whatever a run has started, and has no parent any more, is a child of this process, and must have ended."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    before = set(psutil.Process().children(recursive=True))
    yield
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0)
    left = [each for each in set(psutil.Process().children(recursive=True)) - before if each.status() != "zombie"]
    told = [" ".join(each.cmdline())[:200] for each in left]
    for each in left:
        each.send_signal(signal.SIGKILL)
    assert not told


def data_file(task: TaskPaths, odd: list[Odd], folder: Path) -> tuple[Path, list[Odd | None]]:
    """A file of the data with a row for each, and right ones between them; and what each row is."""
    asked: list[Odd | None] = []
    for each in odd:
        asked += [each, *[None] * each.quiet]
    sound = sum(each is None or each.words is None for each in asked)
    # So that nothing is left when no batch is full any more.
    asked += [None] * (-sound % BATCH)
    rows = parquet.read_table(task.train).to_pylist()
    made = []
    names = {"way": "", "loop": "", "tool": "", "name": "", "row": ""}
    for index, each in enumerate(asked):
        row = rows[index % len(rows)]
        chosen = {} if each is None else {each.kind: each.name, **dict(each.more)}
        made.append({**row, "extra_info": {"index": index, **names, **chosen}})
    file = folder / "odd.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(made), file)
    return file, asked


def ended(run: FinishedRun, overrides: list[str]) -> dict[int, Ended]:
    """By the place of a row in the data, which is issued in its order."""
    log = re.split(GIVEN_UP, trainer_log(overrides))
    said = {int(index): message(words) for index, words in zip(log[1::2], log[2::2], strict=True)}
    _, table, _ = read(files(run.folder)[-1])
    found = {}
    for event in table.to_pylist():
        if event["lane"] == GROUPS and event["what"] != "ready":
            found[event["group"]] = Ended(event["what"], f"{event['text']}: {said.get(event['group'], '')}")
    return found


def message(logged: str) -> str:
    """The messages of this package's own errors in what is logged of a group."""
    return "".join(re.findall(MESSAGE, logged, re.MULTILINE | re.DOTALL))


def faults(asked: list[Odd | None], found: dict[int, Ended]) -> list[str]:
    """Which of the rows did not come to what is said of it."""
    wrong = []
    for index, each in enumerate(asked):
        became = found.get(index, Ended("nothing", ""))
        what = "a right row" if each is None else f"{each.kind} {each.name!r}"
        if each is not None and each.words == EITHER and became.what in ("trained", "failed"):
            continue
        if each is None or each.words is None:
            if became.what != "trained":
                wrong.append(f"{index}, {what}: {became.what}, {became.said[:600]}")
        elif became.what != "failed":
            wrong.append(f"{index}, {what}: {became.what}, and not failed")
        elif not re.search(each.words, became.said, re.DOTALL):
            wrong.append(f"{index}, {what}: not {each.words!r} in {became.said[:600]!r}")
    return wrong


def run_with(
    odd: list[Odd], task: TaskPaths, folder: Path, ray_dir: Path, *more: str, timeout_s: float = 1500.0
) -> FinishedRun:
    """A run over all of them, of which each has cost what it should."""
    file, asked = data_file(task, odd, folder)
    overrides = [
        *small(task, folder, ray_dir),
        f"data.train_files={file}",
        "data.shuffle=false",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
        f"{ROLLOUT}.n={ANSWERS}",
        "trainer.total_epochs=1",
        "trainer.total_training_steps=null",
        # More than half of them fail, as they should.
        "async_training.alarms.failed_groups=null",
        "async_training.max_group_retries=2",
        *more,
    ]
    run = run_main(FULLY_ASYNC, overrides, folder, timeout_s=timeout_s, shared=False)
    found = ended(run, overrides)
    wrong = faults(asked, found)
    (folder / "wrong.txt").write_text("\n".join(wrong))
    sys.stdout.write("\n".join(f"{index}: {each.what}: {each.said[:300]}" for index, each in sorted(found.items())))
    assert run.returncode == 0, run.output[-8000:]
    ledger = run.summary["ledger"]
    if any(each is not None and each.words == EITHER for each in asked):
        # Of the last ones no batch may be full.
        wrong = [
            said for said in wrong if int(said.partition(",")[0]) < len(asked) - 2 * BATCH or "nothing" not in said
        ]
        assert not wrong, "\n".join(wrong)
        assert (ledger["issued"], ledger["live"] < BATCH) == (len(asked), True)
        return run
    assert not wrong, "\n".join(wrong)
    failed = sum(each is not None and each.words is not None for each in asked)
    assert (ledger["issued"], ledger["failed"], ledger["live"]) == (len(asked), failed, 0)
    return run


@pytest.mark.e2e
@pytest.mark.slow
def test_whatever_rewards_do_costs_their_own_prompts(untrained_task: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    validated = [reward(name) for name in HARMLESS]
    validation = tmp_path / "validation"
    validation.mkdir()
    file, rows = data_file(untrained_task, validated, validation)
    run = run_with(
        REWARDS,
        untrained_task,
        tmp_path,
        ray_dir,
        f"data.val_files={file}",
        "trainer.val_before_train=true",
        f"reward.custom_reward_function.path={odd_rewards.__file__}",
        "async_training.reward_processes=6",
        "async_training.reward_memory_gib=1",
        "async_training.timeouts.reward=10",
    )
    failed = sum(each is not None and each.words is not None for each in rows)
    assert run.summary["validation"]["failed"] == failed


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.chaos
def test_whatever_agent_loops_and_asynchronous_rewards_do_costs_their_own_prompts(
    untrained_task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    run = run_with(
        LOOPS,
        untrained_task,
        tmp_path,
        ray_dir,
        *agent("odd", "OddAgentLoop", tmp_path),
        f"reward.custom_reward_function.path={odd_rewards.__file__}",
        "reward.custom_reward_function.name=compute_score_later",
        *TWO_WORKERS,
    )
    assert run.metrics[-1]["fully_async/count/agent_loop_worker_restarts"] >= len(odd_agent_loop.odd_loops.DEADLY)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.chaos
def test_whatever_agent_loops_change_in_their_process_is_over_soon(
    untrained_task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    run_with(
        POISONS,
        untrained_task,
        tmp_path,
        ray_dir,
        *agent("odd", "OddAgentLoop", tmp_path),
        *TWO_WORKERS,
    )


def agent(name: str, kind: str, folder: Path) -> list[str]:
    file = folder / "agent_loops.yaml"
    file.write_text(f"- name: {name}\n  _target_: odd_agent_loop.{kind}\n")
    return [f"{ROLLOUT}.agent.agent_loop_config_path={file}", f"{ROLLOUT}.agent.default_agent_loop={name}"]


def tools_and_rows() -> list[Odd]:
    tools = [
        Odd("tool", name, odd_tools.words_of(name, where), more=(("name", where),))
        for where in ("odd", "odd_in_a_thread")
        for name in odd_tools.TOOLS
    ]
    rows = [Odd("row", name, _words(kind)) for name, kind in odd_agent_loop.ROWS.items()]
    return spread([*tools, *rows])


def _words(kind: Any) -> str | None:
    return re.escape(kind.words).replace(r"row\ 0", r"row\ \d+") if hasattr(kind, "words") else None


@pytest.mark.e2e
@pytest.mark.slow
def test_whatever_tools_and_rows_do_costs_their_own_prompts(
    untrained_task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    run_with(
        tools_and_rows(),
        untrained_task,
        tmp_path,
        ray_dir,
        *agent("calls", "CallsItsTool", tmp_path),
        f"data.custom_cls.path={odd_agent_loop.__file__}",
        "data.custom_cls.name=OddRows",
        "data.max_response_length=320",
        "data.max_prompt_length=64",
        f"{ROLLOUT}.max_model_len=400",
        f"{ROLLOUT}.max_num_seqs=16",
        f"{ROLLOUT}.multi_turn.function_tool_path={odd_tools.__file__}",
        f"{ROLLOUT}.multi_turn.max_assistant_turns=2",
        f"{ROLLOUT}.multi_turn.max_tool_response_length=64",
        "async_training.timeouts.trajectory=8",
    )


@pytest.mark.e2e
@pytest.mark.slow
def test_a_session_has_at_least_300_functions() -> None:
    asked = [*REWARDS, *LOOPS, *tools_and_rows()]
    assert len({(each.kind, each.name, each.more) for each in asked}) >= 300

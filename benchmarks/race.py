# SPDX-License-Identifier: Apache-2.0
"""The race: stock verl's trainers and this package's on the same tasks and the same number of emulated accelerators.

    python benchmarks/race.py benchmarks/race.jsonl [--tasks uniform long_tail] [--settings defaults "threshold 1"]
        [--sides "stock fully_async" fully_async] [--repeats 1]
    python benchmarks/race.py benchmarks/race.jsonl --table

A cell is a run of a main, which appends a line to the file when it ends; cells that have enough repeats are skipped, so
an interrupted race continues. ``--table`` writes the table of docs/benchmarks.md from the file and runs nothing. All
figures come from what the devices record, whichever main runs on them:

- tokens: trained answer tokens (a token of the run stands for `TOKEN_SCALE`) per device and second of emulated time,
  from the end of the update after the first ones to that of the third last.
- generation, trainer: the part of that time in which generation slots, and the trainer's devices, were at work.
- load: number of processes of the machine that wanted a core, as a mean over 15 minutes. If there are more than cores,
  the parts of a run that are not emulated wait for each other and for other work: do not compare such a cell.
- late: by how much the real work of the emulated devices took longer than theirs; above a share of `MOST_LATE` the cell
  measures the machine, and is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from documents import put_between, table
from mains import Run, end_shared_forks, ray_folder, run, shared_forks, short_run, stock, with_helpers
from process_cpu import ProcessTimes
from race_sides import (
    ANSWERS,
    BATCH,
    DEVICES,
    SETTINGS,
    SIDES,
    SLOTS,
    TASKS,
    TOKEN_SCALE,
    Task,
    common,
    overrides,
    own_preset,
    reward,
)

from benchmarks.emulation.devices import Emulation, records
from recipe.laptop.task import TaskSettings, ensure_task

CHECKOUT = Path(__file__).parents[1]
DOCUMENT = CHECKOUT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- made by benchmarks/race.py -->", "<!-- end of what benchmarks/race.py made -->"
LAST = 2
# If the real work exceeds the devices' time by more than this share, it determines the result instead of the devices.
MOST_LATE = 0.1
STALENESS = ("fully_async/staleness/oldest_token_max", "training/off_policy/trajectory_staleness_worst/max")


def cell(name: str, setting: str, task_name: str, folder: Path) -> dict[str, Any]:
    """Run a side once and evaluate what its devices did."""
    task, side = TASKS[task_name], SIDES[name]
    training = DEVICES if side.shared else side.training
    paths = ensure_task(folder / task.lengths, TaskSettings(lengths=task.lengths))
    with ray_folder() as ray_dir, tempfile.TemporaryDirectory() as out:
        record = Path(out) / "devices"
        emulation = Emulation(
            replica_devices=DEVICES if side.shared else DEVICES - training,
            trainer_devices=training,
            shared=side.shared or side.lends,
            token_scale=TOKEN_SCALE,
            time_scale=task.time_scale,
            record=str(record),
        )
        settings = [
            *short_run(paths, Path(out), ray_dir),
            *settings_of(name, setting, task, task.steps, Path(out)),
            *reward(task, paths, Path(out)),
        ]
        processes = ProcessTimes()
        processes.start()
        try:
            finished = run_side(name, settings, Path(out), emulation)
        finally:
            processes.stop()
        row = measure(records(record), task, processes)
        if side.ours:
            row["account"] = json.loads((Path(out) / "summary.json").read_text())["account"]
    # Stock's logger writes a step's metrics below its number.
    steps = [step if side.ours else step["data"] for _, step in finished.steps]
    seen = [step[key] for step in steps for key in STALENESS if key in step]
    return {
        "task": task_name,
        "setting": setting,
        "side": name,
        **row,
        "staleness": max(seen, default=None),
        "load": round(os.getloadavg()[2], 1),
    }


def settings_of(name: str, setting: str, task: Task, steps: int, out: Path) -> list[str]:
    """Return the settings of a side: preset, agent loop and overrides."""
    loops = out / "agent_loops.yaml"
    # Stock's fully_async asks for verl's own agent loop by name, whatever is configured.
    target = f"{task.loop}\n  prompts: {steps * BATCH}" if task.loop.endswith("GrowingLengthLoop") else task.loop
    loops.write_text("".join(f"- name: {loop}\n  _target_: {target}\n" for loop in ("race", "single_turn_agent")))
    return [own_preset(task, name), *common(task, steps, loops), *overrides(name, setting, task)]


def run_side(name: str, settings: list[str], out: Path, emulation: Emulation) -> Run:
    """Run the side's main to its end."""
    here = str(Path(__file__).parent)
    ours = SIDES[name].ours
    environment = with_helpers(os.environ if ours else stock.stock_environment(CHECKOUT)) | emulation.environment()
    environment["PYTHONPATH"] = os.pathsep.join([here, environment["PYTHONPATH"]])
    if ours:
        return run(SIDES[name].main, settings, out / "metrics.jsonl", out, environment)
    metrics = out / "stock.jsonl"
    environment["VERL_FILE_LOGGER_PATH"] = str(metrics)
    # All cells of stock share one process that has imported the stack.
    return run(SIDES[name].main, settings, metrics, out, environment, shared_forks(environment))


def measure(devices: dict[str, list[dict[str, Any]]], task: Task, processes: ProcessTimes) -> dict[str, Any]:
    """Return the figures of a run from what its devices recorded, and the CPU time of its processes."""
    trainer = [line for lines in devices.values() for line in lines if line["kind"] in ("update", "log_probs")]
    engine = [line for lines in devices.values() for line in lines if line["kind"] == "step"]
    updates = sorted((line for line in trainer if line["kind"] == "update"), key=_end)
    first, counted = updates[task.skip - 1], updates[task.skip : -LAST]
    began, ended = _end(first), _end(counted[-1])
    seconds = ended - began
    tokens = sum(line["answer_tokens"] for line in counted) * TOKEN_SCALE
    steps = [line for line in engine if began <= line["began"] <= ended]
    work = [line for line in trainer if began <= _end(line) <= ended and line is not first]
    both = [*steps, *work]
    return {
        "step_s": round(seconds / len(counted), 3),
        "tokens_per_device_s": round(tokens * task.time_scale / seconds / DEVICES, 1),
        "generation": round(sum(_took(line) * line["sequences"] for line in steps) / (SLOTS * seconds), 3),
        "trainer": round(sum(map(_took, work)) / seconds, 3),
        "late": round(sum(line["late_s"] for line in both) / sum(line["device_s"] for line in both), 3),
        "cpu_ms": {
            process: round(1000 * seconds / (len(counted) * BATCH * ANSWERS), 2)
            for process, seconds in processes.seconds(began, ended).items()
            if seconds > 0
        },
    }


def _took(line: dict[str, Any]) -> float:
    return line["device_s"] + line["late_s"]


def _end(line: dict[str, Any]) -> float:
    return line["began"] + _took(line)


def runs_of(lines: list[dict[str, Any]], *key: str) -> list[dict[str, Any]]:
    """Return the lines of this task, setting and side."""
    return [line for line in lines if (line["task"], line["setting"], line["side"]) == key]


def summary(lines: list[dict[str, Any]]) -> str:
    """Return a table with a row per setting and side and a column per task; cells without a valid run stay empty."""
    rows = []
    for setting in SETTINGS:
        for name in (side for side in SIDES if setting in SIDES[side].settings):
            cells = [_figures(lines, task, setting, name) for task in TASKS]
            if any(cells):
                rows.append([setting, name, *cells])
    return table(["setting", "side", *(f"`{task}`" for task in TASKS)], rows)


def _figures(lines: list[dict[str, Any]], task: str, setting: str, name: str) -> str:
    """Return the median tokens per device-second, the ratio to stock's fully_async, and the number of runs."""
    found = [line for line in runs_of(lines, task, setting, name) if line["late"] <= MOST_LATE]
    if not found:
        return ""
    # A setting that only this package has, such as a bound, is compared with stock's runs without it.
    of = runs_of(lines, task, setting.partition(",")[0], "stock fully_async")
    tokens, theirs = (statistics.median(line["tokens_per_device_s"] for line in runs) for runs in (found, of))
    return f"{tokens:.0f} ({tokens / theirs:.2f}), {len(found)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=["defaults", "threshold 1"])
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="write the table of docs/benchmarks.md and run nothing")
    arguments = parser.parse_args()
    lines = (
        [json.loads(line) for line in arguments.results.read_text().splitlines()] if arguments.results.exists() else []
    )
    if arguments.table:
        put_between(BEGIN, END, summary(lines), DOCUMENT)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    folder = CHECKOUT / "runs" / "race_tasks"
    try:
        for key in cells(arguments.tasks, arguments.settings, arguments.sides, arguments.repeats, lines):
            lines.append(cell(*key, folder))
            with arguments.results.open("a") as results:
                results.write(json.dumps(lines[-1]) + "\n")
            print(json.dumps(lines[-1]), flush=True)
    finally:
        end_shared_forks()


def cells(
    tasks: list[str], settings: list[str], sides: list[str], repeats: int, lines: list[dict[str, Any]]
) -> Iterator[tuple[str, str, str]]:
    """Yield side, setting and task of each run that is missing in ``lines``, which grow meanwhile."""
    for turn in range(repeats):
        for task in tasks:
            for setting in settings:
                for name in (side for side in sides if setting in SIDES[side].settings):
                    if len(runs_of(lines, task, setting, name)) <= turn:
                        yield name, setting, task


if __name__ == "__main__":
    main()

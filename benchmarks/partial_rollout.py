# SPDX-License-Identifier: Apache-2.0
"""Compares partial rollout with synchronous training, both taking turns on the same accelerators.

    python benchmarks/partial_rollout.py [--shapes uniform tail long_tail] [--repeats 1] [--colocate-async]

Both are this package's main with the same placement; the synchronous side has the bound 0, under which a batch is
generated completely. Answers have fixed lengths (`fixed_lengths`). A decode step of the engine takes a fixed time and
no core (`benchmarks.emulation`), as on an accelerator, where it is bound by reading the weights. Steps at the beginning
are not counted and, with interruptions, neither are the last two, in which no further prompts start because the run
ends. The results are: wall-clock seconds per trained sample of both; the synchronous side's idle share, which is the
part of its wall-clock time in which generation slots stood empty while others were in use; and what partial rollout
saved.

    saved = 1 - seconds a sample / synchronous seconds a sample;   saved / idle share is to be at least 0.9

With ``--colocate-async`` a third side runs: stock verl's v1 trainer of that name, with one batch ahead, waiting for
groups at the same bound; it checks for groups every 2 seconds, which is changed to 0.05 here.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mains import Run, ray_folder, run, short_run, stock, with_helpers

from benchmarks.emulation.devices import Emulation
from recipe.laptop.prefork.run import Prefork
from recipe.laptop.task import TaskSettings, ensure_task

CHECKOUT = Path(__file__).parents[1]
MAIN = "recipe.partial_rollout.main"
STOCK_MAIN = "verl.trainer.main_ppo"
LAST = 2
PRESETS = {False: "tiny_cpu", True: "tiny_cpu_long_tail"}


@dataclass(frozen=True)
class Shape:
    """The work to generate, and the resources for it.

    tail: the prompts at one place of every twenty have answers of 120 tokens and the others of 6; otherwise all have 6.
    The order of the data is fixed, so five batches contain all of it. slots: groups that generate at once. decode_s:
    seconds of a decode step. bound: max_staleness. steps: of the synchronous side and of partial rollout. skip: steps
    at the beginning that are not counted; for partial rollout the last ones are not counted either.
    """

    tail: bool
    slots: int
    decode_s: float
    bound: int
    steps: tuple[int, int]
    skip: tuple[int, int]
    batch: int = 16
    answers: int = 4


SHAPES = {
    "uniform": Shape(False, slots=8, decode_s=0.1, bound=1, steps=(12, 14), skip=(2, 2)),
    "tail": Shape(True, slots=4, decode_s=0.08, bound=6, steps=(7, 19), skip=(2, 7)),
    "long_tail": Shape(True, slots=8, decode_s=0.15, bound=9, steps=(7, 22), skip=(2, 10)),
}


def environment_of(shape: Shape, base: Mapping[str, str]) -> dict[str, str]:
    environment = with_helpers(base) | Emulation(decode_step_s=shape.decode_s).environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), environment["PYTHONPATH"]])
    return environment


def overrides_of(shape: Shape, steps: int, out: str) -> list[str]:
    """Return the overrides that all sides have in common."""
    sequences = shape.slots * shape.answers
    length = 256 if shape.tail else 128
    loops = Path(out) / "agent_loops.yaml"
    loops.write_text("- name: fixed\n  _target_: fixed_lengths.FixedLengthLoop\n")
    rollout = "actor_rollout_ref.rollout"
    return [
        "data.shuffle=false",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={shape.batch}",
        f"{rollout}.n={shape.answers}",
        f"{rollout}.max_num_seqs={sequences}",
        f"{rollout}.max_num_batched_tokens={sequences * length}",
        f"{rollout}.agent.agent_loop_config_path={loops}",
        f"{rollout}.agent.default_agent_loop=fixed",
        f"trainer.total_training_steps={steps}",
    ]


def one_run(shape: Shape, synchronous: bool, task: Path) -> Run:
    bound, depth = (0, 0) if synchronous else (shape.bound, 1)
    with ray_folder() as ray_dir, tempfile.TemporaryDirectory() as out:
        overrides = [
            f"preset={PRESETS[shape.tail]}",
            f"builtin_task.dir={task / PRESETS[shape.tail]}",
            *overrides_of(shape, shape.steps[not synchronous], out),
            f"async_training.staleness_threshold={depth}",
            f"async_training.max_staleness={bound}",
            "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=benchmarks.emulation.engine.EmulatedExtension",
            "trainer.val_before_train=false",
            "trainer.test_freq=-1",
            f"trainer.default_local_dir={out}",
            f"hydra.run.dir={out}/hydra",
            f"+ray_kwargs.ray_init._temp_dir={ray_dir}",
        ]
        finished = run(MAIN, overrides, Path(out) / "metrics.jsonl", Path(out), environment_of(shape, os.environ))
    if not synchronous:
        del finished.steps[-LAST:]
    return finished


def colocate_async_run(shape: Shape, folder: Path) -> Run:
    task = ensure_task(folder / PRESETS[shape.tail], TaskSettings(lengths="long_tail" if shape.tail else "uniform"))
    with ray_folder() as ray_dir, tempfile.TemporaryDirectory() as out:
        metrics = Path(out) / "stock.jsonl"
        environment = environment_of(shape, stock.stock_environment(CHECKOUT))
        environment["VERL_FILE_LOGGER_PATH"] = str(metrics)
        with Prefork(environment) as forks:
            overrides = [
                f"+preset={PRESETS[shape.tail]}",
                *short_run(task, Path(out), ray_dir),
                *overrides_of(shape, shape.steps[1], out),
                "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=benchmarks.emulation.engine.EmulatedExtension",
                "algorithm.adv_estimator=grpo",
                f"data.train_batch_size={shape.batch}",
                "trainer.v1.trainer_mode=colocate_async",
                f"trainer.v1.sampler.max_off_policy_threshold={shape.bound + 1}",
                "trainer.v1.sampler.max_off_policy_strategy=wait",
                "trainer.v1.sampler.custom_sampler.path=pkg://quick_replay_buffer",
                "trainer.v1.sampler.custom_sampler.name=QuickReplayBuffer",
                "trainer.logger=[console,file]",
                "trainer.resume_mode=disable",
                # The client reads this setting if the section exists, which the preset adds.
                "+async_training.partial_rollout=true",
                f"ray_kwargs.ray_init.runtime_env.py_executable={forks.executable}",
            ]
            finished = run(STOCK_MAIN, overrides, metrics, Path(out), environment)
    finished.steps = [(at, line["data"]) for at, line in finished.steps if "actor/grad_norm" in line["data"]][:-LAST]
    return finished


def idle_share(result: Run, skip: int) -> float:
    """Return the share of time after the first ``skip`` steps in which slots stood empty in generation turns."""
    steps = [step for _, step in counted(result, skip)]
    seconds = sum(step["timing_s/gen"] * (1.0 - step["partial_rollout/turn_occupancy"]) for step in steps)
    times = [moment for moment, _ in result.steps]
    return seconds / (times[-1] - times[skip - 1])


def counted(result: Run, skip: int) -> list[tuple[float, dict[str, Any]]]:
    return result.steps[skip:]


def mean(result: Run, skip: int, key: str) -> float:
    return statistics.fmean(step[key] for _, step in counted(result, skip))


def compare(shape: Shape, task: Path, with_stock: bool) -> dict[str, float]:
    skip_sync, skip = shape.skip
    sync, partial = one_run(shape, True, task), one_run(shape, False, task)
    samples = shape.batch * shape.answers
    seconds_sync, seconds = sync.seconds_per_step(skip_sync) / samples, partial.seconds_per_step(skip) / samples
    idle, saved = idle_share(sync, skip_sync), 1.0 - seconds / seconds_sync
    row = {
        "sync_ms_per_sample": 1000 * seconds_sync,
        "partial_ms_per_sample": 1000 * seconds,
        "sync_idle_share": idle,
        "saved": saved,
        "saved_over_idle": saved / idle if idle else 0.0,
        "partial_idle_share": idle_share(partial, skip),
        "sync_train_s": mean(sync, skip_sync, "timing_s/step") - mean(sync, skip_sync, "timing_s/gen"),
        "partial_train_s": mean(partial, skip, "timing_s/step") - mean(partial, skip, "timing_s/gen"),
        "interrupt_s_max": max(step["partial_rollout/interrupt_seconds"] for _, step in counted(partial, skip)),
        "interrupt_s_median": statistics.median(
            step["partial_rollout/interrupt_seconds"] for _, step in counted(partial, skip)
        ),
        "staleness_max": max(step["fully_async/staleness/oldest_token_max"] for _, step in partial.steps),
    }
    if with_stock:
        stock_run = colocate_async_run(shape, task)
        stock_seconds = stock_run.seconds_per_step(skip) / samples
        row |= {
            "partial_tokens_per_answer": mean(partial, skip, "response_length/mean"),
            "colocate_async_tokens_per_answer": mean(stock_run, skip, "response_length/mean"),
            "colocate_async_staleness_max": max(
                step["training/off_policy/trajectory_staleness_worst/max"] for _, step in stock_run.steps
            ),
            "colocate_async_ms_per_sample": 1000 * stock_seconds,
            "colocate_async_saved": 1.0 - stock_seconds / seconds_sync,
            "over_colocate_async": stock_seconds / seconds,
        }
    return {name: round(value, 4) for name, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--colocate-async", action="store_true", help="also run stock verl's v1 trainer of that name")
    parser.add_argument("--task", type=Path, help="folder of the built-in tasks; made anew by default")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        for name in arguments.shapes:
            for _ in range(arguments.repeats):
                row = compare(SHAPES[name], arguments.task or Path(made), arguments.colocate_async)
                print(json.dumps({"shape": name, **row}), flush=True)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Runs each mode on the same work on the CPU for `modes_picture`, and reads the records of these runs.

There are eight generation slots, batches of six prompts with two answers each, long-tailed lengths, slow decode steps
and slow updates (`timed_answers`). A run's ``metrics.jsonl`` shows when the trainer worked; the engine's record shows
which answer was decoded when, and by which version.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.emulation.devices import Emulation
from recipe.async_engine.record.run_record import WITH_ALARMS

CHECKOUT = Path(__file__).parents[1]
PROMPTS, ANSWERS = 6, 2
BATCH = PROMPTS * ANSWERS
SLOTS, DECODE_S, UPDATE_S, STEPS, RUN_S = 8, 0.1, 2.5, 14, 300


@dataclass(frozen=True)
class Mode:
    """A band of the picture: what to run, and its caption.

    ``shared``: training and generation use the same devices.
    """

    name: str
    package: str
    overrides: tuple[str, ...]
    says: str
    shared: bool = False

    def folder(self, root: Path) -> Path:
        return root / self.name.replace(" ", "-")


AT_ONCE, AHEAD = "async_training.staleness_threshold=0", "async_training.staleness_threshold=2"
BOUND = "async_training.max_staleness=3"
MODES = (
    Mode("synchronous", "fully_async", (AT_ONCE,), "a batch is generated, then trained"),
    Mode("one-step-off", "one_step_off", (), "the next batch is generated while one is trained"),
    Mode(
        "fully async",
        "fully_async",
        (AHEAD, BOUND),
        "both sides stream; at a weight sync, answers go on under the new version",
    ),
    Mode(
        "partial rollout",
        "partial_rollout",
        (BOUND,),
        "turns on the same devices; unfinished answers are kept and go on in the next turn",
        shared=True,
    ),
)

TRAIN, SYNC = "train", "sync"


@dataclass(frozen=True)
class Span:
    """A period of time, in seconds.

    ``what``: `TRAIN`, `SYNC`, or the name of an answer of which this is a part. ``version``: the version that sampled
    the part; for the trainer, the version that it made or published.
    """

    what: str
    version: int
    began: float
    ended: float


def overrides(mode: Mode, folder: Path, ray_folder: str) -> list[str]:
    loops = folder / "agent_loops.yaml"
    loops.write_text("- name: long_tail\n  _target_: timed_answers.LongTail\n")
    rollout = "actor_rollout_ref.rollout"
    return [
        "preset=tiny_cpu_long_tail",
        f"builtin_task.dir={folder.parent / 'task'}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        f"{rollout}.n={ANSWERS}",
        f"{rollout}.max_num_seqs={SLOTS}",
        f"async_training.concurrent_samples_per_replica={SLOTS // ANSWERS}",
        f"{rollout}.engine_kwargs.vllm.worker_extension_cls=timed_answers.TimedDecodeExtension",
        f"{rollout}.agent.agent_loop_config_path={loops}",
        f"{rollout}.agent.default_agent_loop=long_tail",
        f"trainer.total_training_steps={STEPS}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        f"trainer.default_local_dir={folder}",
        f"hydra.run.dir={folder}/hydra",
        f"+ray_kwargs.ray_init._temp_dir={ray_folder}",
        *mode.overrides,
    ]


def run(mode: Mode, folder: Path) -> None:
    """Run the mode's main; leave ``metrics.jsonl``, ``decode.jsonl`` and, in ``began``, the start time."""
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "decode.jsonl"
    record.unlink(missing_ok=True)
    helpers = [str(CHECKOUT / "tools"), str(CHECKOUT / "tests" / "e2e"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, helpers)),
        **Emulation(decode_step_s=DECODE_S).environment(),
        "UPDATE_S": str(UPDATE_S),
        "MODE": mode.package,
        "TRAINER": "timed_answers.SlowUpdate",
        "DECODE_RECORD": str(record),
    }
    # Ray's sockets are in this folder, and their paths must be short.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as ray_folder:
        command = [sys.executable, "-m", "trainer_main", *overrides(mode, folder, ray_folder)]
        with (folder / "output.txt").open("w") as output:
            process = subprocess.Popen(command, env=environment, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
        began = psutil.Process(process.pid).create_time()
        try:
            status = process.wait(RUN_S)
        finally:
            process.terminate()
    if status not in (0, WITH_ALARMS):
        raise SystemExit(f"{mode.name} ended with status {status}: {folder}/output.txt")
    (folder / "began").write_text(json.dumps(began))


def answers(steps: Iterable[dict[str, Any]]) -> list[Span]:
    """Return the parts of answers in the engine's record: what one version sampled of one answer."""
    parts: dict[tuple[str, int], Span] = {}
    for step in steps:
        for name in step["answers"]:
            key = name, step["version"]
            began = parts[key].began if key in parts else step["began"]
            parts[key] = Span(*key, began, step["ended"])
    return list(parts.values())


def training(steps: Iterable[dict[str, Any]], origin: float) -> list[Span]:
    """Return what the trainer did, from a run's metrics: each step ends with its weight sync."""
    spans = []
    for step in steps:
        version, ended = int(step["fully_async/count/current_param_version"]), origin + step["wall_seconds"]
        began = ended - step["timing_s/step"] + step["timing_s/gen"]
        spans.append(Span(TRAIN, version, began, ended - step["timing_s/update_weights"]))
        spans.append(Span(SYNC, version, ended - step["fully_async/weight_sync/seconds"], ended))
    return spans


def read(folder: Path) -> list[Span]:
    """Return a run's spans; time starts with its first decode step."""
    decoded, steps = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("decode.jsonl", "metrics.jsonl")
    )
    first = decoded[0]["began"]
    spans = answers(decoded) + training(steps, json.loads((folder / "began").read_text()))
    return [replace(span, began=span.began - first, ended=span.ended - first) for span in spans]

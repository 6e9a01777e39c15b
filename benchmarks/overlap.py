# SPDX-License-Identifier: Apache-2.0
"""How much of generation and training overlaps in the one-step-off mode.

    python benchmarks/overlap.py [--stage-seconds 12] [--steps 7] [--repeats 3]

Stage times come from the synchronous mode (bound 0) of the same run: T_gen is what the trainer waits for a batch,
T_train the rest of a step. Both stages are then padded by waits that use no CPU until each takes ``--stage-seconds``:

    efficiency = max(T_gen, T_train) / seconds per step with bound 1.

Without pads both stages share the cores, so there is little to gain: those figures stand beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

from mains import Run, ray_folder, run

SKIP = 2


def one_run(steps: int, bound: int, pads: tuple[float, float], task: Path) -> Run:
    here = Path(__file__).parent
    environment = dict(os.environ) | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(here), os.environ.get("PYTHONPATH")])),
        "GENERATION_PAD_S": str(pads[0]),
        "TRAINING_PAD_S": str(pads[1]),
    }
    with ray_folder() as ray_dir, tempfile.TemporaryDirectory() as out:
        loops = Path(out) / "agent_loops.yaml"
        loops.write_text("- name: padded\n  _target_: padded.PaddedLoop\n")
        overrides = [
            "preset=tiny_cpu",
            f"builtin_task.dir={task}",
            f"async_training.staleness_threshold={bound}",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
            "actor_rollout_ref.rollout.agent.default_agent_loop=padded",
            "trainer.val_before_train=false",
            "trainer.test_freq=-1",
            f"trainer.total_training_steps={steps}",
            f"trainer.default_local_dir={out}",
            f"hydra.run.dir={out}/hydra",
            f"+ray_kwargs.ray_init._temp_dir={ray_dir}",
        ]
        return run("padded_main", overrides, Path(out) / "metrics.jsonl", Path(out), environment)


def stages(sync: Run) -> tuple[float, float]:
    """(T_gen, T_train): medians over the steps of a synchronous run."""
    steps = [metrics for _, metrics in sync.steps[SKIP:]]
    waits = [metrics["timing_s/gen"] for metrics in steps]
    rest = [metrics["timing_s/step"] - metrics["timing_s/gen"] for metrics in steps]
    return statistics.median(waits), statistics.median(rest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage-seconds", type=float, default=12.0)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    target = arguments.stage_seconds
    with tempfile.TemporaryDirectory() as task:
        plain = one_run(arguments.steps, 0, (0.0, 0.0), Path(task))
        bare_gen, bare_train = stages(plain)
        bare = one_run(arguments.steps, 1, (0.0, 0.0), Path(task)).seconds_per_step(SKIP)
        print(
            json.dumps(
                {
                    "padded": False,
                    "T_gen": round(bare_gen, 2),
                    "T_train": round(bare_train, 2),
                    "step": round(bare, 2),
                    "efficiency": round(max(bare_gen, bare_train) / bare, 3),
                    "sync_step_over_step": round(plain.seconds_per_step(SKIP) / bare, 3),
                }
            ),
            flush=True,
        )
        pads = (max(0.0, target - bare_gen), max(0.0, target - bare_train))
        efficiencies = []
        for _ in range(arguments.repeats):
            generation, training = stages(one_run(arguments.steps, 0, pads, Path(task)))
            step = one_run(arguments.steps, 1, pads, Path(task)).seconds_per_step(SKIP)
            efficiencies.append(max(generation, training) / step)
            row = {"padded": True, "T_gen": round(generation, 2), "T_train": round(training, 2), "step": round(step, 2)}
            print(json.dumps(row | {"efficiency": round(efficiencies[-1], 3)}), flush=True)
        print(json.dumps({"median_efficiency": round(statistics.median(efficiencies), 3)}))


if __name__ == "__main__":
    main()

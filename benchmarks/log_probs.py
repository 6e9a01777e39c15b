# SPDX-License-Identifier: Apache-2.0
"""Compares the four sources of proximal log-probs: time of a step, the trainer's log-prob seconds, learning.

    python benchmarks/log_probs.py [--steps 50] [--padded-steps 8] [--stage-seconds 8] [--log-prob-share 0.6]

The mode is fully asynchronous, with one trainer rank, one replica and, for `server`, one log-prob server; a step has 16
prompts of 8 answers, one version of staleness, and token-level truncated importance sampling. The first run of each
source shows learning. In the second, generation and update are padded to the same length and log-probs to a share of
it, by waits that use no CPU, as if each had accelerators of its own. With a share of 0.6 a step with `recompute` takes
1.6 times as long as one with `bypass`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from mains import Run, ray_folder, run

SKIP = 3
BATCH, ANSWERS = 16, 8
SOURCES = ("bypass", "recompute", "server", "loglinear")


def one_run(source: str, steps: int, pads: tuple[float, float, float], task: Path) -> tuple[Run, dict[str, Any]]:
    """Return a run and its summary. ``pads``: seconds of generation, update and log-probs of a batch."""
    here = Path(__file__).parent
    names = ("GENERATION_PAD_S", "TRAINING_PAD_S", "LOG_PROB_PAD_S")
    environment = dict(os.environ) | {name: str(pad) for name, pad in zip(names, pads, strict=True)}
    environment["BATCH_TRAJECTORIES"] = str(BATCH * ANSWERS)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(here), os.environ.get("PYTHONPATH")]))
    with ray_folder() as ray_dir, tempfile.TemporaryDirectory() as out:
        loops = Path(out) / "agent_loops.yaml"
        loops.write_text("- name: padded\n  _target_: padded.PaddedLoop\n")
        overrides = [
            "preset=tiny_cpu",
            f"builtin_task.dir={task}",
            f"async_training.proximal_log_probs={source}",
            "algorithm.rollout_correction.rollout_is=token",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
            "actor_rollout_ref.rollout.agent.default_agent_loop=padded",
            "trainer.val_before_train=false",
            f"trainer.test_freq={steps if sum(pads) == 0 else -1}",
            f"trainer.total_training_steps={steps}",
            f"trainer.default_local_dir={out}",
            f"hydra.run.dir={out}/hydra",
            f"+ray_kwargs.ray_init._temp_dir={ray_dir}",
        ]
        overrides += ["model_engine_server=fsdp2"] if source == "server" else []
        finished = run("padded_fully_async_main", overrides, Path(out) / "metrics.jsonl", Path(out), environment)
        return finished, json.loads((Path(out) / "summary.json").read_text())


def row(source: str, finished: Run) -> dict[str, Any]:
    metrics = [step for _, step in finished.steps[SKIP:]]

    def median(key: str) -> float:
        return round(statistics.median(step[key] for step in metrics), 3)

    return {
        "source": source,
        "step": round(finished.seconds_per_step(SKIP), 2),
        "trainer_log_prob_s": median("timing_s/old_log_prob"),
        "waiting_for_log_probs_s": median("log_probs/critical_path_seconds"),
        "waiting_for_samples_s": median("timing_s/gen"),
        "update_s": median("timing_s/update_actor"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--padded-steps", type=int, default=8)
    parser.add_argument("--stage-seconds", type=float, default=8.0)
    parser.add_argument("--log-prob-share", type=float, default=0.6)
    arguments = parser.parse_args()
    stage = arguments.stage_seconds
    with tempfile.TemporaryDirectory() as task:
        for source in SOURCES if arguments.steps else ():
            finished, summary = one_run(source, arguments.steps, (0.0, 0.0, 0.0), Path(task))
            rewards = [step["critic/score/mean"] for _, step in finished.steps[-10:]]
            learned = {"validation": summary["validation"]["last"], "last_rewards": round(statistics.mean(rewards), 3)}
            print(json.dumps({"padded": False} | row(source, finished) | learned), flush=True)
        steps = {}
        for source in SOURCES:
            pads = (stage, stage, stage * arguments.log_prob_share)
            finished, _ = one_run(source, arguments.padded_steps, pads, Path(task))
            measured = row(source, finished)
            steps[source] = measured["step"]
            print(json.dumps({"padded": True} | measured), flush=True)
    ratios = {
        "server_over_bypass": round(steps["server"] / steps["bypass"], 3),
        "recompute_over_server": round(steps["recompute"] / steps["server"], 3),
    }
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Measures what slow rewards add to a step beside slow generation.

    python benchmarks/rewards.py [--steps 8] [--generation-seconds 9] [--rewards-seconds 7]

The mode is fully asynchronous, with 16 prompts of 8 answers of 6 tokens per step, 64 at a time; a decode step takes a
fixed time and no core (`benchmarks.emulation`), and a reward sleeps. A batch's generation and its rewards, one after
the other, would take the two numbers of seconds; they represent 180 and 140 seconds at a twentieth of the scale. The
results, from the steps after the first ones: seconds per step without rewards and with them, and the share of the
rewards' time, including queues, in which generation went on. The last step is left out of the share, because nothing is
generated beside it any more.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

from mains import Run, ray_folder, run, with_helpers

from benchmarks.emulation.devices import Emulation

MAIN = "recipe.fully_async.main"
BATCH, ANSWERS, TOKENS, AT_ONCE = 16, 8, 6, 64
PROCESSES = 8
SKIP = 3
REWARD = """
import time


def compute_score(data_source, solution_str, ground_truth, extra_info=None, seconds=0.0):
    time.sleep(seconds)
    return float(solution_str == ground_truth)
"""


def one_run(steps: int, generation_s: float, rewards_s: float, task: Path) -> Run:
    """Run once; ``generation_s`` and ``rewards_s`` are the seconds of a batch."""
    rounds = BATCH * ANSWERS / AT_ONCE
    environment = with_helpers(os.environ) | Emulation(decode_step_s=generation_s / rounds / TOKENS).environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), environment["PYTHONPATH"]])
    with ray_folder() as ray_dir, tempfile.TemporaryDirectory() as out:
        loops = Path(out) / "agent_loops.yaml"
        loops.write_text("- name: fixed\n  _target_: fixed_lengths.FixedLengthLoop\n")
        reward = Path(out) / "reward.py"
        reward.write_text(REWARD)
        rollout = "actor_rollout_ref.rollout"
        overrides = [
            "preset=tiny_cpu",
            f"builtin_task.dir={task}",
            f"async_training.concurrent_samples_per_replica={AT_ONCE // ANSWERS}",
            f"async_training.reward_processes={PROCESSES}",
            f"reward.custom_reward_function.path={reward}",
            "reward.custom_reward_function.name=compute_score",
            f"+reward.custom_reward_function.reward_kwargs.seconds={rewards_s * PROCESSES / (BATCH * ANSWERS)}",
            f"{rollout}.agent.agent_loop_config_path={loops}",
            f"{rollout}.agent.default_agent_loop=fixed",
            f"{rollout}.engine_kwargs.vllm.worker_extension_cls=benchmarks.emulation.engine.EmulatedExtension",
            "trainer.val_before_train=false",
            "trainer.test_freq=-1",
            f"trainer.total_training_steps={steps}",
            f"trainer.default_local_dir={out}",
            f"hydra.run.dir={out}/hydra",
            f"+ray_kwargs.ray_init._temp_dir={ray_dir}",
        ]
        return run(MAIN, overrides, Path(out) / "metrics.jsonl", Path(out), environment)


def hidden_share(finished: Run) -> float:
    """Return the share over the counted steps, except the last, at which nothing more is generated."""
    first, last = finished.steps[SKIP - 1][1], finished.steps[-2][1]
    names = "fully_async/rewards/seconds", "fully_async/rewards/hidden_share"
    (began, began_share), (ended, ended_share) = ([step[name] for name in names] for step in (first, last))
    return (ended * ended_share - began * began_share) / (ended - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--generation-seconds", type=float, default=9.0)
    parser.add_argument("--rewards-seconds", type=float, default=7.0)
    arguments = parser.parse_args()
    seconds = {}
    with tempfile.TemporaryDirectory() as task:
        for rewards_s in (0.0, arguments.rewards_seconds):
            finished = one_run(arguments.steps, arguments.generation_seconds, rewards_s, Path(task))
            step = seconds[rewards_s] = finished.seconds_per_step(SKIP)
            row = {
                "rewards_s": rewards_s,
                "step_s": round(step, 2),
                "reward_seconds": round(finished.steps[-1][1]["fully_async/rewards/seconds"], 1),
                "hidden_share": round(hidden_share(finished), 3),
                "hidden_share_with_beginning_and_end": round(
                    finished.steps[-1][1]["fully_async/rewards/hidden_share"], 3
                ),
            }
            print(json.dumps(row), flush=True)
    with_rewards, without = seconds[arguments.rewards_seconds], seconds[0.0]
    ratios = {
        "with_over_without": round(with_rewards / without, 3),
        "one_after_the_other_over_with": round((without + arguments.rewards_seconds) / with_rewards, 3),
    }
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()

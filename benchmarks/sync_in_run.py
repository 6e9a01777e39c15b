# SPDX-License-Identifier: Apache-2.0
"""Measures how long each side stands still for a weight sync, in runs of the fully-asynchronous main.

    python benchmarks/sync_in_run.py [--steps 3] [--masters bf16]

One trainer rank and one replica run the built-in task, once with its own tiny model and once with an untrained model of
0.5B parameters (the shape of Qwen2.5-0.5B, bf16 in the engine; a step of it takes minutes on two cores), each published
beside training and inline. The results are medians over the steps' syncs: the transfer itself (`weight_sync/seconds`,
until the engine has received every tensor), the whole sync, the time in which no replica generated and that in which
the trainer waited, and their shares of the sync. `weight_sync.py` compares the transfer with a copy in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from pathlib import Path

from mains import ray_folder, run, short_run

from recipe.laptop.task import TaskPaths, TaskSettings, ensure_task

SYNC = {
    "transfer_s": "weight_sync/seconds",
    "sync_s": "fully_async/weight_sync/seconds",
    "generation_paused_s": "fully_async/weight_sync/generation_paused_seconds",
    "trainer_paused_s": "fully_async/weight_sync/trainer_paused_seconds",
}
BF16 = "{param_dtype:bf16,reduce_dtype:bf16,buffer_dtype:bf16}"
# Two cores can only do one short step between two syncs with half a billion parameters, and that is enough.
LARGE = [
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "data.max_response_length=8",
    "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16",
    f"actor_rollout_ref.actor.fsdp_config.mixed_precision={BF16}",
    "actor_rollout_ref.rollout.dtype=bfloat16",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=320",
    "actor_rollout_ref.rollout.max_num_seqs=8",
    "actor_rollout_ref.rollout.max_num_batched_tokens=1024",
]


def half_billion(task: TaskPaths, folder: Path) -> Path:
    """Create an untrained model of that size with the task's tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shutil.copytree(task.model, folder)
    for weights in folder.glob("*.safetensors*"):
        weights.unlink()
    tokens = json.loads((folder / "config.json").read_text())
    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        **{name: tokens[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=("tiny", "0.5B"), default=("tiny", "0.5B"))
    parser.add_argument("--masters", choices=("bf16", "fp32"), default="bf16", help="the larger model's in training")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        task = ensure_task(Path(folder) / "task", TaskSettings())
        for model in arguments.models:
            large = model == "0.5B"
            path = half_billion(task, Path(folder) / "large") if large else task.model
            for publish in ("beside", "inline"):
                masters = f"actor_rollout_ref.actor.fsdp_config.model_dtype={arguments.masters}"
                extra = [*LARGE, masters] if large else []
                extra += [f"actor_rollout_ref.model.path={path}", f"async_training.weights.publish={publish}"]
                row = measure(task, extra, arguments.steps)
                print(json.dumps({"model": model, "publish": publish, **row}), flush=True)


def measure(task: TaskPaths, extra: list[str], steps: int) -> dict[str, float]:
    """Return medians over the syncs of one run."""
    with ray_folder() as ray_dir, tempfile.TemporaryDirectory() as out:
        overrides = [
            "preset=tiny_cpu",
            *short_run(task, Path(out), ray_dir),
            *extra,
            f"trainer.total_training_steps={steps}",
        ]
        seen = run("recipe.fully_async.main", overrides, Path(out) / "metrics.jsonl", Path(out)).steps
    # If weights are published beside training, a sync is in the record of a later step than the one that began it.
    found = {name: [step[key] for _, step in seen if key in step] for name, key in SYNC.items()}
    medians = {name: statistics.median(values) for name, values in found.items()}
    sent = next(step["weight_sync/bytes"] for _, step in seen if "weight_sync/bytes" in step)
    row = {"syncs": len(found["sync_s"]), "megabytes": sent / 1e6, **medians}
    for side in ("generation", "trainer"):
        row[f"{side}_paused_share"] = medians[f"{side}_paused_s"] / medians["sync_s"]
    row["step_s"] = statistics.median(step["timing_s/step"] for _, step in seen[1:])
    return {name: round(value, 4) for name, value in row.items()}


if __name__ == "__main__":
    main()

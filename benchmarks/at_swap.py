# SPDX-License-Identifier: Apache-2.0
"""Compares the ways to handle running answers at a weight swap: drain, interrupt and keep, and their effect on
learning.

    python benchmarks/at_swap.py runs/at_swap.jsonl [--steps 30] [--seeds 3]

The fully-asynchronous mode runs on long-tailed answers with a policy that changes quickly (a learning rate of 1e-3),
one step per version, and decode steps of 30 ms that use no core, so that a long answer spans several swaps. Every
version's weights and every batch are stored. Each token's log-prob is computed again by Hugging Face's forward pass,
with the weights of the version that labels the token, over the whole answer before it; this is the pure policy. Each
run appends a line: the rewards and the validation score; the differences of log-probs from the pure policy, for tokens
before the first swap in their answer and for those after it; the effective sample size of the trained tokens, from the
ratio of the trained policy to the one that sampled; seconds per step, and the pauses. At the end the means over the
seeds are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from mains import ray_folder, run, with_helpers
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.emulation.devices import Emulation
from recipe.async_engine.core.columns import TOKEN_VERSIONS
from recipe.laptop.task import TaskSettings, ensure_task

WEIGHTS = "async_training.weights"
WAYS = {
    "drain": [f"{WEIGHTS}.at_swap=drain"],
    "interrupt": [f"{WEIGHTS}.at_swap=interrupt"],
    "keep": [f"{WEIGHTS}.at_swap=keep"],
}
SETTINGS = [
    "preset=tiny_cpu_long_tail",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "async_training.staleness_threshold=2",
    "async_training.max_staleness=8",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=benchmarks.emulation.engine.EmulatedExtension",
]
STEP_S = 0.03
MEANS = {
    "step_s": "timing_s/step",
    "generation_paused_s": "fully_async/weight_sync/generation_paused_seconds",
    "trainer_paused_s": "fully_async/weight_sync/trainer_paused_seconds",
    "sync_s": "fully_async/weight_sync/seconds",
    "spanning_share": "fully_async/partial/partial_ratio",
}
SKIP = 3


class Policies:
    """Computes log-probs with any version whose weights were stored."""

    def __init__(self, config: Path, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config), dtype=torch.float32).eval()
        self._folder = folder
        self._has: int | None = None

    @torch.no_grad()
    def log_probs(self, version: int, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the log-prob of each response token, float32 (rows, R)."""
        if version != self._has:
            weights = torch.load(self._folder / f"version_{version}.pt", weights_only=True)
            missing = self._model.load_state_dict(weights, strict=False).missing_keys
            assert not set(missing) - {"lm_head.weight"}, missing
            self._model.tie_weights()
            self._has = version
        length = batch["responses"].shape[1]
        logits = self._model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=batch["position_ids"]
        ).logits[:, -length - 1 : -1]
        return torch.log_softmax(logits, -1).gather(-1, batch["responses"][..., None]).squeeze(-1)


def judge(policies: Policies, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return, for a batch's sampled tokens, differences from the pure policy before and after a swap, and ratios."""
    versions, sampled_by = batch[TOKEN_VERSIONS], batch["rollout_log_probs"]
    there = versions >= 0
    difference = torch.zeros_like(sampled_by)
    for version in versions[there].unique().tolist():
        its = versions == version
        rows = its.any(1)
        pure = policies.log_probs(version, {name: batch[name][rows] for name in ROWS})
        difference[rows] += (sampled_by[rows] - pure).abs() * its[rows]
    first = versions.where(there, versions.max() + 1).amin(1, keepdim=True)
    ratios = (policies.log_probs(batch["version"], batch) - sampled_by).exp()
    return {
        "before": difference[there & (versions == first)],
        "after": difference[there & (versions > first)],
        "ratios": ratios[there],
    }


ROWS = ("input_ids", "attention_mask", "position_ids", "responses")


def one_run(way: str, seed: int, steps: int, data: Path) -> dict[str, Any]:
    task = ensure_task(data, TaskSettings(lengths="long_tail"))
    with ray_folder() as ray_dir, tempfile.TemporaryDirectory() as out:
        recorded = Path(out) / "recorded"
        recorded.mkdir()
        overrides = [
            *SETTINGS,
            *WAYS[way],
            f"builtin_task.dir={data}",
            f"data.seed={seed}",
            f"actor_rollout_ref.rollout.seed={seed}",
            f"trainer.total_training_steps={steps}",
            f"trainer.test_freq={steps}",
            f"trainer.default_local_dir={out}",
            f"hydra.run.dir={out}/hydra",
            f"+ray_kwargs.ray_init._temp_dir={ray_dir}",
        ]
        environment = with_helpers(os.environ) | {
            "MODE": "fully_async",
            "TRAINER": "at_swap_trainer.KeepingTrainer",
            "RECORDED": str(recorded),
            **Emulation(decode_step_s=STEP_S).environment(),
        }
        environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), environment["PYTHONPATH"]])
        result = run("trainer_main", overrides, Path(out) / "metrics.jsonl", Path(out), environment)
        summary = json.loads((Path(out) / "summary.json").read_text())
        policies = Policies(task.model, recorded)
        batches = [torch.load(recorded / f"batch_{step}.pt", weights_only=True) for step in range(SKIP + 1, steps + 1)]
        judged = [judge(policies, batch) for batch in batches]
    before, after, ratios = (torch.cat([one[name] for one in judged]) for name in ("before", "after", "ratios"))
    steps_seen = [step for _, step in result.steps[SKIP:]]
    return {
        "way": way,
        "seed": seed,
        "reward": [round(step["critic/score/mean"], 4) for _, step in result.steps],
        "first": summary["validation"]["first"],
        "last": summary["validation"]["last"],
        "staleness": summary["staleness"],
        "tokens_before": len(before),
        "tokens_after": len(after),
        "difference_before": before.mean().item(),
        "difference_before_max": before.max().item(),
        "difference_after": after.mean().item() if len(after) else 0.0,
        "difference_after_max": after.max().item() if len(after) else 0.0,
        "effective_sample_size": (ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum())).item(),
        "seconds": result.steps[-1][0] - result.steps[SKIP][0],
        **{
            name: statistics.fmean(step[key] for step in steps_seen if key in step)
            for name, key in MEANS.items()
            if any(key in step for step in steps_seen)
        },
    }


def report(way: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return means over the seeds, and the range of the final score."""
    names = [name for name, value in rows[0].items() if isinstance(value, float) and name not in ("first", "last")]
    scores = [row["last"] for row in rows]
    means = {name: round(statistics.fmean(row[name] for row in rows), 6) for name in names}
    return {"way": way, "seeds": len(rows), "last": [min(scores), statistics.fmean(scores), max(scores)], **means}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    results: Path = arguments.results
    results.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    with tempfile.TemporaryDirectory() as data:
        for seed in range(arguments.seeds):
            for way in WAYS:
                if any((row["way"], row["seed"]) == (way, seed) for row in rows):
                    continue
                rows.append(one_run(way, seed, arguments.steps, Path(data)))
                with results.open("a") as lines:
                    lines.write(json.dumps(rows[-1]) + "\n")
    for way in WAYS:
        print(json.dumps(report(way, [row for row in rows if row["way"] == way])), flush=True)


if __name__ == "__main__":
    main()

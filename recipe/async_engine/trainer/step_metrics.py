# SPDX-License-Identifier: Apache-2.0
"""Computes metrics that stock verl's trainers report for a step, but that verl's methods for its stages do not compute.

Contract: a metric that has the name of a metric of stock verl also has the meaning of that metric. docs/metrics.md
lists the exceptions in a table, and a test compares the table with verl's source and with the metrics of real runs.
Shown by tests/integration/test_metrics.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopManager
from verl.trainer.ppo.ray_trainer import compute_spec_decode_metrics

from recipe.async_engine.config.placement import wanted
from recipe.async_engine.config.plan import RunPlan
from recipe.async_engine.rollout.group_run import GroupRun

STALE = "fully_async/count/stale_trajectory_processed"
SPECULATIVE = ("spec_num_draft_tokens", "spec_num_accepted_tokens", "spec_num_verify_steps")


class StepMetrics:
    """Computes the metrics of this module for each step of a run."""

    def __init__(self, config: Any, plan: RunPlan) -> None:
        parts = wanted(OmegaConf.to_container(config, resolve=True), plan.settings)
        self._trainers_share = plan.trainer_ranks / sum(part.on_a_node * part.groups for part in parts)
        algorithm = config.algorithm
        self._gdpo_keys = tuple(algorithm.gdpo_reward_keys or ()) if algorithm.adv_estimator == "gdpo" else ()
        self._stale = 0

    def of_batch(
        self, batch: DataProto, groups: Sequence[GroupRun], manager: AgentLoopManager, timing: dict[str, float]
    ) -> dict[str, float]:
        """Return metrics of an assembled batch, and add verl's ``agent_loop/*`` to the step's ``timing``.

        The results are computed from the agent loops' measurements, which are removed from the batch.
        """
        measured = batch.meta_info.pop("metrics")
        timing.update(manager._performance_metrics([measured], batch))
        generating = [loop["generate_sequences"] for loop in measured]
        columns = [batch.non_tensor_batch.get(name) for name in SPECULATIVE]
        is_complete = all(column is not None and None not in column.tolist() for column in columns)
        return {
            "training/epoch": max(group.group.prompt.epoch for group in groups),
            "fully_async/outputs_per_trajectory": len(batch) / sum(len(group.trajectories) for group in groups),
            "fully_async/processing_time/avg": float(np.mean(generating)),
            "fully_async/processing_time/max": max(generating),
            "fully_async/processing_time/min": min(generating),
            **{
                f"fully_async/processing_time/tp{share}": float(np.percentile(generating, share))
                for share in (50, 95, 99)
            },
            **(compute_spec_decode_metrics(*columns) if is_complete else {}),
        }

    def of_step(self, batch: DataProto, metrics: dict[str, Any], timing: dict[str, float]) -> dict[str, float]:
        """Return further metrics of a trained step, which are computed from the step's metrics and durations."""
        self._stale += metrics[STALE]
        return {
            STALE: self._stale,
            # verl has divided the throughput by the number of the trainer's accelerators; here all accelerators count.
            "perf/throughput": metrics["perf/throughput"] * self._trainers_share,
            "fully_async/total_wait_time": timing["gen"],
            "fully_async/trainer/idle_ratio": timing["gen"] / timing["step"],
            "fully_async/trained_samples": len(batch),
            **{
                f"training/num_turns/{name}": metrics[f"num_turns/{name}"]
                for name in ("min", "max", "mean")
                if f"num_turns/{name}" in metrics
            },
            **self._gdpo(batch),
        }

    def _gdpo(self, batch: DataProto) -> dict[str, float]:
        """Return verl's metrics of GDPO's rewards (ray_trainer.py:1773)."""
        found: dict[str, float] = {}
        for key in self._gdpo_keys:
            values = np.asarray(batch.non_tensor_batch[key], dtype=np.float32)
            found |= {
                f"gdpo/{key}/{name}": float(of(values))
                for name, of in (("mean", np.mean), ("std", np.std), ("max", np.max), ("min", np.min))
            }
        return found

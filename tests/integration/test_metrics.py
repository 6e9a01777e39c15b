# SPDX-License-Identifier: Apache-2.0
"""The table of docs/metrics.md against verl's source, and metrics under stock's names against their formulas.

What runs write is held against it in each end-to-end run (tests/e2e/main_runs.py).
"""

from __future__ import annotations

import ast
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from metric_names import ALL, names_in, row_of, rows, stock_names
from omegaconf import OmegaConf
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopManager

from recipe.async_engine.config.plan import RunPlan, derive
from recipe.async_engine.core.groups import LedgerCounts
from recipe.async_engine.core.prompt_manager import PromptCounts
from recipe.async_engine.record.timeline import Timeline
from recipe.async_engine.trainer.base import AsyncPPOTrainer
from recipe.async_engine.trainer.step_metrics import StepMetrics

PACKAGE = Path(__file__).parents[2] / "recipe"


def test_every_metric_of_stock_has_a_row_that_says_whose_it_is() -> None:
    table, stock = rows(), stock_names()
    assert len(stock) > 150
    assert sorted(name for name in stock if row_of(name, table) is None) == []
    of_rows: dict[Any, set[str]] = {}
    for name, trainers in stock.items():
        of_rows.setdefault(row_of(name, table), set()).update(trainers)
    wrong = {
        row.patterns[0]: (sorted(found), sorted(row.stock)) for row, found in of_rows.items() if found != row.stock
    }
    assert wrong == {}


def test_rows_without_a_metric_in_stocks_source_are_made_elsewhere_and_said_to_be_everybodys() -> None:
    table, stock = rows(), stock_names()
    silent = [row for row in table if row.stock and not any(row.has(name) for name in stock)]
    assert all(row.stock == ALL for row in silent), [row.patterns for row in silent]


def test_every_metric_that_this_package_names_has_a_row() -> None:
    table = rows()
    named = {name for file in PACKAGE.rglob("*.py") for name in names_in(ast.parse(file.read_text()))}
    ours = {name for name in named if name.startswith(("fully_async/", "training/", "partial_rollout/", "gdpo/"))}
    assert len(ours) > 50
    # On the terminal alone.
    ours -= {"fully_async/trainer/does", "fully_async/rollouter/does"}
    absent = {name for name in ours if (row := row_of(name, table)) is None or row.here.startswith("not here")}
    assert absent == set()


def settings(**others: Any) -> Any:
    config = {
        "async_training": {},
        "rollout": {"nnodes": 1, "n_gpus_per_node": 6, "total_rollout_steps": 8},
        "trainer": {"nnodes": 1, "n_gpus_per_node": 2, "total_training_steps": 2},
        "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 2}, "rollout": {"n": 2}},
        "algorithm": {"adv_estimator": "grpo", "gdpo_reward_keys": None, "rollout_correction": {"bypass_mode": True}},
    }
    config["algorithm"] |= others  # type: ignore[operator]
    return OmegaConf.create(config)


def stage(**others: Any) -> StepMetrics:
    config = settings(**others)
    plan: RunPlan = derive(OmegaConf.to_container(config), dataset_rows=8)
    return StepMetrics(config, plan)


def batch_of(**columns: Any) -> DataProto:
    loops = [
        {"generate_sequences": seconds, "tool_calls": 0.5, "compute_score": 0.1, "num_preempted": 0}
        for seconds in (1.0, 4.0, 2.0)
    ]
    tensors = {"prompts": torch.ones(3, 2), "attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1], [1, 1, 1]])}
    return DataProto.from_dict(tensors=tensors, non_tensors=columns, meta_info={"metrics": loops})


def groups(*epochs: int) -> Any:
    return [
        SimpleNamespace(group=SimpleNamespace(prompt=SimpleNamespace(epoch=epoch)), trajectories=[0])
        for epoch in epochs
    ]


def test_times_of_agent_loops_are_those_of_the_batch() -> None:
    batch, timing = batch_of(), {"gen": 1.0}
    manager = AgentLoopManager.__new__(AgentLoopManager)
    metrics = stage().of_batch(batch, groups(0, 1, 0), manager, timing)
    assert timing["agent_loop/generate_sequences/max"] == timing["agent_loop/slowest/generate_sequences"] == 4.0
    assert timing["agent_loop/tool_calls/mean"] == 0.5 and timing["agent_loop/slowest/prompt_length"] == 1
    assert metrics == {
        "training/epoch": 1,
        "fully_async/outputs_per_trajectory": 1.0,
        "fully_async/processing_time/avg": pytest.approx(7 / 3),
        "fully_async/processing_time/max": 4.0,
        "fully_async/processing_time/min": 1.0,
        "fully_async/processing_time/tp50": 2.0,
        "fully_async/processing_time/tp95": pytest.approx(3.8),
        "fully_async/processing_time/tp99": pytest.approx(3.96),
    }
    assert "metrics" not in batch.meta_info, "they go to no worker"


def test_speculative_decoding_is_told_where_every_answer_has_its_counts() -> None:
    counts = {
        "spec_num_draft_tokens": [4, 4, 2],
        "spec_num_accepted_tokens": [2, 4, 0],
        "spec_num_verify_steps": [2, 2, 1],
    }
    manager = AgentLoopManager.__new__(AgentLoopManager)
    columns = {name: np.array(values, dtype=object) for name, values in counts.items()}
    metrics = stage().of_batch(batch_of(**columns), groups(0), manager, {})
    assert metrics["rollout/spec_accept_rate"] == pytest.approx((0.5 + 1 + 0) / 3)
    assert metrics["rollout/spec_accept_length"] == pytest.approx((2 + 3 + 1) / 3)
    columns["spec_num_draft_tokens"][0] = None
    assert "rollout/spec_accept_rate" not in stage().of_batch(batch_of(**columns), groups(0), manager, {})


def test_throughput_is_of_all_accelerators_and_stale_trajectories_are_counted_on() -> None:
    steps = stage(adv_estimator="gdpo", gdpo_reward_keys=["style"])
    batch, timing = batch_of(style=np.array([1.0, 0.0, 0.5])), {"gen": 1.0, "step": 4.0}
    verls = {"perf/throughput": 100.0, "num_turns/mean": 2.0, "fully_async/count/stale_trajectory_processed": 2}
    metrics = steps.of_step(batch, verls, timing)
    assert metrics["perf/throughput"] == 100.0 * 2 / 8
    assert metrics["fully_async/trainer/idle_ratio"] == 0.25 and metrics["fully_async/total_wait_time"] == 1.0
    assert metrics["training/num_turns/mean"] == 2.0
    assert metrics["gdpo/style/mean"] == 0.5 and metrics["gdpo/style/max"] == 1.0
    assert [steps.of_step(batch, verls, timing)[f"fully_async/count/{STALE}"] for _ in range(2)] == [4, 6]


STALE = "stale_trajectory_processed"


class Stepping(AsyncPPOTrainer):
    """Its one step ends a version; what is before and after its training is left out, or takes its time."""

    def __init__(self) -> None:
        def nothing(*_: Any) -> dict[str, Any]:
            return {}

        self.global_steps, self.max_steps_duration = 0, 0.0
        self.timeline = Timeline(time.monotonic, 1)
        other = SimpleNamespace(is_over=False, restarts=0, begin=nothing, train=nothing, end=nothing, metrics=nothing)
        figures = SimpleNamespace(now=nothing, report=nothing, of_step=nothing, log=lambda data, step: None)
        parts = dict.fromkeys(("saving", "publishing", "profiling", "publisher", "reward_loop_manager"), other)
        parts |= dict.fromkeys(("figures", "step_metrics", "logger"), figures)
        self.stages: Any = SimpleNamespace(begin_step=nothing, measure=nothing)
        calls = ("_fetched_groups", "_train", "_save_if_instance_expires")
        vars(self).update(parts, **dict.fromkeys(calls, nothing))
        plan = SimpleNamespace(total_steps=1, settings=SimpleNamespace(servers=SimpleNamespace(enabled=False)))
        self.restarts: Any = SimpleNamespace(begun=0)
        vars(self).update(plan=plan, ledger=SimpleNamespace(batches_left=0, announced=1))

    def _publish(self) -> None:
        """Nothing is published."""

    def _save_and_validate(self) -> None:
        time.sleep(LONG_S)


LONG_S = 0.5


def test_a_steps_time_is_without_validation_and_checkpoint() -> None:
    trainer = Stepping()
    trainer._step()
    assert 0 <= trainer.timing_raw["step"] < LONG_S
    assert trainer.max_steps_duration == trainer.timing_raw["step"]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_the_rollout_did_is_told_by_version() -> None:
    clock = Clock()
    timeline = Timeline(clock, 2)
    books = timeline.rollout
    counts = LedgerCounts(9, 4, 3, 0, 2, 1, 1, 0, {"odd": 2, "uniform": 1}, {})
    prompts = PromptCounts(*[0] * len(PromptCounts.__dataclass_fields__))

    def version(busy: float, idle: float, complete: int) -> dict[str, float]:
        books.set(running=1)
        clock.now += busy
        books.set(running=0)
        clock.now += idle
        for _ in range(complete):
            books.completed([])
        books.end_version()
        return books.metrics(counts, prompts)

    assert "fully_async/rollouter/version_time" not in books.metrics(counts, prompts), "no version has ended"
    first, second = version(6.0, 2.0, 3), version(1.0, 1.0, 1)
    of = "fully_async/rollouter"
    assert [first[f"{of}/{name}"] for name in ("version_time", "active_time", "idle_ratio")] == [8.0, 6.0, 0.25]
    assert [second[f"{of}/{name}"] for name in ("version_time", "active_time", "idle_ratio")] == [2.0, 1.0, 0.5]
    assert [step[f"{of}/step_generated_samples"] for step in (first, second)] == [3, 1]
    assert second[f"{of}/idle_share"] == 0.3, "so far"
    named = [
        f"fully_async/count/{name}"
        for name in ("total_generated_samples", "staleness_samples", "dropped_stale_samples")
    ]
    assert [second[name] for name in named] == [4, 2, 0]

# SPDX-License-Identifier: Apache-2.0
"""Agent loops that return lists, by a flag of stock verl's main: groups of 1 to 9 rows, each as it was sampled."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import stock_overrides as stock
from accounts import check_account
from main_process import last_words, short_run
from main_runs import FinishedRun, check_metrics
from published import GRPO_GSM8K, PPO_CRITIC, SCALED_DOWN
from splitting_loop import count_of, lists, token_ages, trajectories_of

from recipe.laptop.task import TaskPaths
from recipe.mains.register import VARIABLE

CHECKOUT = Path(__file__).parents[2]
STEPS, GROUPS, MINI = 4, 8, 4


# Micro-batches of rows, which do not divide the rows of a batch either.
GRPO = [
    *GRPO_GSM8K,
    *SCALED_DOWN,
    "actor_rollout_ref.actor.use_dynamic_bsz=false",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
]
TWO_RANKS = [
    *PPO_CRITIC,
    *SCALED_DOWN,
    "critic.model.use_remove_padding=False",
    "critic.model.enable_gradient_checkpointing=False",
    "critic.ppo_mini_batch_size=8",
    "trainer.n_gpus_per_node=2",
    "trainer.balance_batch=true",
]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("script", [GRPO, TWO_RANKS], ids=["GRPO", "a critic on two ranks"])
def test_lists_by_a_flag_are_trained_as_they_were_sampled_and_the_books_close(
    script: list[str], untrained_task: TaskPaths, tmp_path: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = untrained_task
    asked = tmp_path / "asked.jsonl"
    monkeypatch.setenv("ASKED", str(asked))
    overrides = [
        "+recipe=fully_async",
        *script,
        *short_run(task, tmp_path, ray_dir),
        *lists(task, tmp_path),
        f"trainer.rollout_data_dir={tmp_path}/samples",
        f"trainer.total_training_steps={STEPS}",
        "async_training.alarms.exit_status=false",
    ]
    environment = stock.stock_environment(CHECKOUT) | {VARIABLE: "1"}
    finished = stock.forked_main("verl.trainer.main_ppo", overrides, tmp_path, environment)
    assert finished.returncode == 0, last_words(finished)
    run = FinishedRun(finished.returncode, finished.stdout, tmp_path)
    check_account(run)
    check_metrics(run)
    assert run.summary["ledger"] | {"live": 0} == dict(
        issued=run.summary["ledger"]["issued"], trained=STEPS * GROUPS, filtered=0, failed=0, live=0
    )
    assert run.summary["staleness"]["max"] <= run.summary["staleness"]["bound"]
    answers = {line["input"]: line for line in map(json.loads, asked.read_text().splitlines())}
    seen: set[str] = set()
    for step, metrics in enumerate(run.metrics, start=1):
        rows = [json.loads(line) for line in (tmp_path / "samples" / f"{step}.jsonl").read_text().splitlines()]
        inputs = [row["input"] for row in rows]
        # Every answer is its engine's, and is trained once.
        assert [row["output"] for row in rows] == [answers[text]["output"] for text in inputs]
        assert len({*inputs}) == len(inputs) and not seen & {*inputs}
        seen |= {*inputs}
        assert metrics["fully_async/trained_samples"] == len(rows)
        # The age of every token is that of the version which the engine said.
        ages = np.concatenate([token_ages(answers[text]["runs"], step - 1) for text in inputs])
        assert metrics["fully_async/sampled_tokens"] == len(ages) == sum(answers[text]["tokens"] for text in inputs)
        assert metrics["fully_async/staleness/token_mean"] == pytest.approx(ages.mean())
        assert metrics["fully_async/staleness/oldest_token_max"] == ages.max()
        assert metrics["fully_async/partial/inexact_version_ratio"] == 0
        assert metrics["critic/advantages/max"] > 0 > metrics["critic/advantages/min"]
        assert metrics["actor/grad_norm"] > 0
        if script is TWO_RANKS:
            assert metrics["critic/grad_norm"] > 0
    indices = range(STEPS * GROUPS)
    sizes = {sum(count_of(index, session) for session in range(trajectories_of(index))) for index in indices}
    assert sizes == {1, 2, 3, 4, 5, 6, 9}

# SPDX-License-Identifier: Apache-2.0
"""Final scores of the modes and staleness bounds over seeds, against those of synchronous training. `make test-all`.

The runs are those of benchmarks/convergence.py, 45 of them, of about three minutes each. Name a folder in
RECIPE_CONVERGENCE_RESULTS to keep their rows, or to go on where an interrupted test stopped.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import convergence

pytestmark = pytest.mark.vllm("runs of a benchmark, which name their engine")

COMPARED = ("uniform", "long_tail")
SEEDS = 3
VALIDATION_PROMPTS = 256
FP32_KL = 1e-6
"""More than this the policy that sampled differs from the one trained only if it is an older one."""


Scores = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def scores_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Scores]:
    """Rows of a task by variant; its runs are done when they are first asked for."""
    kept = os.environ.get("RECIPE_CONVERGENCE_RESULTS")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("convergence")

    @functools.cache
    def of(name: str) -> Scores:
        task = convergence.TASKS[name]
        by_variant = defaultdict(list)
        for row in convergence.sweep(folder / f"{name}.jsonl", convergence.STEPS, SEEDS, task):
            by_variant[row["variant"]].append(row)
        assert {variant: len(rows) for variant, rows in by_variant.items()} == dict.fromkeys(task.variants, SEEDS)
        return by_variant

    return of


def variance_of_mean(scores: list[float]) -> float:
    """Of the mean over seeds: between seeds, but at least what validating on so many prompts leaves uncertain."""
    mean = statistics.mean(scores)
    return max(statistics.variance(scores), mean * (1 - mean) / VALIDATION_PROMPTS) / len(scores)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("task", COMPARED)
def test_every_variant_learns_within_its_bound(task: str, scores_of: Callable[[str], Scores]) -> None:
    for variant, rows in scores_of(task).items():
        for row in rows:
            assert row["last"] >= row["first"] + 0.3, (variant, row["seed"])
            assert len(row["reward"]) == convergence.STEPS
            assert row["staleness"]["max"] <= row["staleness"]["bound"], (variant, row["seed"])


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "variant"),
    [(task, variant) for task in COMPARED for variant in convergence.TASKS[task].variants if variant != "sync"],
)
def test_asynchronous_training_ends_no_worse_than_synchronous(
    task: str, variant: str, scores_of: Callable[[str], Scores]
) -> None:
    scores = scores_of(task)
    final = [row["last"] for row in scores[variant]]
    synchronous = [row["last"] for row in scores["sync"]]
    error = math.sqrt(variance_of_mean(final) + variance_of_mean(synchronous))
    assert statistics.mean(final) >= statistics.mean(synchronous) - 3 * error


@pytest.mark.e2e
@pytest.mark.slow
def test_harm_of_old_answers_shows_in_the_metrics_and_is_less_with_correction(
    scores_of: Callable[[str], Scores],
) -> None:
    scores = scores_of("far_behind")
    current, corrected, uncorrected = (scores[variant] for variant in convergence.TASKS["far_behind"].variants)
    kl, sample_size = "rollout_corr/kl", "rollout_corr/rollout_is_eff_sample_size"
    for row in current:
        assert row["staleness"]["max"] == 0
        assert abs(row["mismatch"][kl]) < FP32_KL
        assert row["mismatch"][sample_size] == pytest.approx(1, abs=1e-5)
    for row in (*corrected, *uncorrected):
        assert 2 < row["staleness"]["max"] <= row["staleness"]["bound"]
        assert row["mismatch"][kl] > 1000 * FP32_KL
        assert row["mismatch"][sample_size] < 0.999
    for what in (lambda row: row["last"], lambda row: row["mismatch"][sample_size]):
        means = [statistics.mean(what(row) for row in rows) for rows in (current, corrected, uncorrected)]
        assert means == sorted(means, reverse=True)

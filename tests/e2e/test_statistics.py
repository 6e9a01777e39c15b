# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Final scores of the modes and staleness bounds over seeds, against those of synchronous training. `make test-all`.

The runs are those of benchmarks/convergence.py, 24 of them, of about three minutes each. Name a file in
RECIPE_CONVERGENCE_RESULTS to keep their rows, or to go on where an interrupted test stopped.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import convergence

SEEDS = 3
VALIDATION_PROMPTS = 256


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Rows by variant."""
    kept = os.environ.get("RECIPE_CONVERGENCE_RESULTS")
    results = Path(kept) if kept else tmp_path_factory.mktemp("convergence") / "results.jsonl"
    by_variant = defaultdict(list)
    for row in convergence.sweep(results, convergence.STEPS, SEEDS):
        by_variant[row["variant"]].append(row)
    assert {variant: len(rows) for variant, rows in by_variant.items()} == dict.fromkeys(convergence.VARIANTS, SEEDS)
    return by_variant


def variance_of_mean(scores: list[float]) -> float:
    """Of the mean over seeds: between seeds, but at least what validating on so many prompts leaves uncertain."""
    mean = statistics.mean(scores)
    return max(statistics.variance(scores), mean * (1 - mean) / VALIDATION_PROMPTS) / len(scores)


@pytest.mark.e2e
@pytest.mark.slow
def test_every_variant_learns_within_its_bound(scores: dict[str, list[dict[str, Any]]]) -> None:
    for variant, rows in scores.items():
        for row in rows:
            assert row["last"] >= row["first"] + 0.3, (variant, row["seed"])
            assert len(row["reward"]) == convergence.STEPS
            assert row["staleness"]["max"] <= row["staleness"]["bound"], (variant, row["seed"])


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("variant", [variant for variant in convergence.VARIANTS if variant != "sync"])
def test_asynchronous_training_ends_no_worse_than_synchronous(
    variant: str, scores: dict[str, list[dict[str, Any]]]
) -> None:
    final = [row["last"] for row in scores[variant]]
    synchronous = [row["last"] for row in scores["sync"]]
    error = math.sqrt(variance_of_mean(final) + variance_of_mean(synchronous))
    assert statistics.mean(final) >= statistics.mean(synchronous) - 3 * error

# SPDX-License-Identifier: Apache-2.0
"""Scores an answer 1.0 if its last line, which follows a tool's picture if there is one, is the ground truth."""

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, **kwargs: Any) -> float:
    return float(solution_str.split("\n")[-1] == ground_truth)

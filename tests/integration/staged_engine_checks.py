# SPDX-License-Identifier: Apache-2.0
"""Checks on the results of engines with staged weights, on any device and in any precision."""

from __future__ import annotations

from typing import Any

EXPERTS = "qwen3_moe;glm4_moe, router bias"
"""Architectures of tiny_architectures.py in which a swap must reach more than the parameters of layers."""


def check_architectures(found: dict[str, Any], close: float, far: float) -> dict[str, float]:
    """Check `architecture_engine.py`'s results like `check_seen`: log-probs after a swap equal a fresh engine's."""
    assert not [seen["error"] for seen in found.values() if "error" in seen]
    right = [difference for seen in found.values() for difference in (*seen["swapped"], *seen["untouched"])]
    other = [seen["versions"] for seen in found.values()]
    assert len(right) == 5 * len(found)
    assert max(right) < close and min(other) > far, found
    return {"largest_difference": max(right), "smallest_difference_of_other_weights": min(other)}


def check_seen(seen: dict[str, Any], close: float, far: float) -> dict[str, float]:
    """Check the results of `staged_engine.py`.

    Returns the largest difference from the right weights' log-probs, and the smallest from other weights'.

    Args:
        close: a difference that the engine's rounding may cause.
        far: a difference that only other weights cause.
    """
    right = [seen["at_start"], seen["woken"], seen["cached"]["before"], seen["cached"]["of its own"]]
    right += [difference for _, difference in (*seen["staged"], *seen["refused"])]
    right += [new for new, _ in seen["swapped"]]
    other = [old for _, old in seen["swapped"]]
    assert len(other) == 4 and all(problem is None for problem, _ in seen["staged"])
    assert all(problem for problem, _ in seen["refused"])
    assert max(right) < close and min(other) > far
    return {"largest_difference": max(right), "smallest_difference_of_other_weights": min(other)}

# SPDX-License-Identifier: Apache-2.0
"""What has to hold of all that engines with staged weights have seen, on whatever device and in whatever precision."""

from __future__ import annotations

from typing import Any

EXPERTS = "qwen3_moe;glm4_moe, router bias"
"""Of tiny_architectures.py: what a swap has to reach beside the parameters of layers."""


def check_architectures(found: dict[str, Any], close: float, far: float) -> dict[str, float]:
    """As `check_seen`, of what `architecture_engine.py` has seen: each swap's log-probs are a fresh engine's."""
    assert not [seen["error"] for seen in found.values() if "error" in seen]
    right = [difference for seen in found.values() for difference in (*seen["swapped"], *seen["untouched"])]
    other = [seen["versions"] for seen in found.values()]
    assert len(right) == 5 * len(found)
    assert max(right) < close and min(other) > far, found
    return {"largest_difference": max(right), "smallest_difference_of_other_weights": min(other)}


def check_seen(seen: dict[str, Any], close: float, far: float) -> dict[str, float]:
    """Of what `staged_engine.py` has seen.

    Returns the largest difference from the right weights' log-probs, and the smallest from others'.

    Args:
        close: a difference that the engine's rounding may make.
        far: a difference that only other weights make.
    """
    right = [seen["at_start"], seen["woken"], seen["cached"]["before"], seen["cached"]["of its own"]]
    right += [difference for _, difference in (*seen["staged"], *seen["refused"])]
    right += [new for new, _ in seen["swapped"]]
    other = [old for _, old in seen["swapped"]]
    assert len(other) == 4 and all(problem is None for problem, _ in seen["staged"])
    assert all(problem for problem, _ in seen["refused"])
    assert max(right) < close and min(other) > far
    return {"largest_difference": max(right), "smallest_difference_of_other_weights": min(other)}

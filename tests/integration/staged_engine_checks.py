# SPDX-License-Identifier: Apache-2.0
"""What has to hold of all that `staged_engine.py` has seen, on whatever device and in whatever precision."""

from __future__ import annotations

from typing import Any


def check_seen(seen: dict[str, Any], close: float, far: float) -> dict[str, float]:
    """Returns the largest difference from the right weights' log-probs, and the smallest from others'.

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

# SPDX-License-Identifier: Apache-2.0
"""The rule-based reward of the built-in task, in the form of verl's ``custom_reward_function``.

An answer scores 1.0 if it equals the ground truth character by character, else 0.0. This file imports only the standard
library, because verl loads it by its path in every reward worker.

``reward_kwargs={"permute": true}`` is for control experiments: each training answer gets the score of a random earlier
answer, so that rewards keep their distribution but are unrelated to the answers. Validation answers always get their
own scores. Shown by tests/integration/test_builtin_task.py.
"""

from __future__ import annotations

import random
import threading
from typing import Any

# The first scores in the permuter's reservoir have this mean: the fraction of answers that are right after the warm
# start.
_INITIAL_ACCURACY = 0.35


class ScorePermuter:
    """Permutes a stream of scores by means of a reservoir of ``window`` earlier scores.

    Each new score replaces a random score in the reservoir, and the replaced score is returned. So no answer gets its
    own score, and every score is either returned once or still in the reservoir. The class is thread-safe, because verl
    computes scores in a thread pool.
    """

    def __init__(self, window: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self.reservoir = [float(self._rng.random() < _INITIAL_ACCURACY) for _ in range(window)]

    def exchange(self, score: float) -> float:
        """Store ``score`` in the reservoir, and return the earlier score that it replaces."""
        with self._lock:
            slot = self._rng.randrange(len(self.reservoir))
            earlier, self.reservoir[slot] = self.reservoir[slot], score
            return earlier


_permuter = ScorePermuter(window=64, seed=0)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    permute: bool = False,
    **kwargs: Any,
) -> dict[str, float]:
    """Score one answer, given its text without special tokens: ``score`` is the reward, ``acc`` is 1.0 if it is right.

    With ``permute``, the ``score`` of a training row (``extra_info["split"]`` is "train") is that of an earlier answer.
    """
    accuracy = float(solution_str == ground_truth)
    score = accuracy
    if permute and (extra_info or {}).get("split") == "train":
        score = _permuter.exchange(accuracy)
    return {"score": score, "acc": accuracy}

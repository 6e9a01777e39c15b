# SPDX-License-Identifier: Apache-2.0
"""The rule-based reward of the built-in task, in the form of verl's ``custom_reward_function``.

An answer scores 1.0 if it equals the ground truth character by character, else 0.0. This file imports only the standard
library and nothing of this package: verl loads it by path in every reward worker.

``reward_kwargs={"permute": true}`` is the control of an experiment: training prompts then get real scores of earlier
answers in random order, so that the rewards keep their distribution but say nothing about the answer. Validation
prompts are always scored truthfully. tests/integration/test_builtin_task.py shows both.
"""

from __future__ import annotations

import random
import threading
from typing import Any

# Fraction of right answers after the warm start, with which the reservoir is filled before any score is known.
_INITIAL_ACCURACY = 0.35


class ScorePermuter:
    """Returns a stream of scores in permuted order.

    A reservoir holds the last scores, ``window`` of them; each new score replaces a random one, which is returned. So
    (initial reservoir + scores put in) and (scores returned + final reservoir) are the same multiset, and a score is
    never returned for the answer that earned it. It is thread-safe, since verl scores in a thread pool.
    """

    def __init__(self, window: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self.reservoir = [float(self._rng.random() < _INITIAL_ACCURACY) for _ in range(window)]

    def exchange(self, score: float) -> float:
        """Store ``score`` and return the earlier one that it replaces."""
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
    """Score one answer, decoded without special tokens.

    ``permute`` replaces the scores of training rows (``extra_info`` has the split train) by those of earlier answers.
    Returns ``score``, the reward, and ``acc``, 1.0 for a right answer and 0.0 for a wrong one, which is never permuted.
    """
    accuracy = float(solution_str == ground_truth)
    score = accuracy
    if permute and (extra_info or {}).get("split") == "train":
        score = _permuter.exchange(accuracy)
    return {"score": score, "acc": accuracy}

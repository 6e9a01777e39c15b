# SPDX-License-Identifier: Apache-2.0
"""A reward function that goes wrong for every fourth prompt, each time in the next of `WAYS`, and is right otherwise.

verl loads it by path in every reward worker. What a prompt's way is, tests ask by :func:`way`. ``REWARD_HUNG`` names a
file that the call creates which hangs.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

from odd_rewards import WAYS as WAYS_OF_REWARDS

EVERY = 4
HARMLESS = ("reward hangs once", "reward leaks", "answer garbage", "prints megabytes", "forks and both return")
"""What ends as a finite score of an answer that was sampled: it may be trained."""
TABLE = (
    "rate limit",
    "own base",
    "exit",
    "stop iteration",
    "leaves at once",
    "circle",
    "text",
    "closes files",
    "kills its parent",
    "prints megabytes",
    "forks and both return",
)
"""Ways of `odd_rewards`."""
WAYS = (
    "reward NaN",
    "reward raises",
    "reward infinite",
    "reward hangs once",
    "reward leaks",
    "reward no number",
    "answer empty",
    "answer garbage",
    "log-prob NaN",
    "log-prob -inf",
    "log-probs missing",
    *TABLE,
)
LEAK_BYTES = 96 << 20

_kept: list[bytearray] = []


def way(index: int) -> str | None:
    """How the prompt of this index goes wrong, None if it does not."""
    return None if index % EVERY else WAYS[index // EVERY % len(WAYS)]


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> Any:
    how = way(int((extra_info or {})["index"]))
    if how == "reward raises":
        raise RuntimeError("the verifier has no license")
    if how == "reward hangs once" and _is_first():
        time.sleep(3600)
    if how == "reward leaks":
        _kept.append(bytearray(LEAK_BYTES))
    if how in TABLE:
        return WAYS_OF_REWARDS[how].do()
    if how == "reward no number":
        return {"score": "ten"}
    wrong = {"reward NaN": math.nan, "reward infinite": math.inf}
    return wrong.get(str(how), float(len(solution_str) % 2))


def _is_first() -> bool:
    try:
        Path(os.environ["REWARD_HUNG"]).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

# SPDX-License-Identifier: Apache-2.0
"""Compares what a run has trained with what its engines have written of themselves (`recorded_samples`).

The engines know no versions, only their weights. A run's first weights are version 0, and each change of the weights is
the next version. A resumed run's first weights have to be those of a version before the kill.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Sampled = Counter[tuple[tuple[int, ...], int]]
"""Tokens, each with all tokens before it, and its version."""


def sampled_by_engines(folder: Path) -> Sampled:
    """Return what all lives of a run with one replica have sampled, by the record of its engine in ``folder``.

    Tokens by weights that a kill has undone are left out.
    """
    found: Counter[tuple[tuple[int, ...], str]] = Counter()
    versions: list[str] = []
    for file in sorted(folder.iterdir()):
        now, sequences = -1, dict[str, list[int]]()
        # The last line of a killed engine may be incomplete.
        for what, *told in map(json.loads, file.read_text().split("\n")[:-1]):
            if what == "weights":
                now = changed(versions, now, *told)
            elif what == "asked":
                sequences[told[0]] = told[1]
            else:
                request, tokens, weights = told
                for token in tokens:
                    sequences[request].append(token)
                    found[tuple(sequences[request]), weights] += 1
    numbers = {weights: version for version, weights in enumerate(versions)}
    return Counter({(tokens, numbers[by]): count for (tokens, by), count in found.items() if by in numbers})


def changed(versions: list[str], now: int, weights: str) -> int:
    """Add the weights that an engine has after those of version ``now``; return their version."""
    if now == -1 and versions:
        return versions.index(weights)
    if versions[now : now + 1] == [weights]:
        return now
    versions[now + 1 :] = [weights]
    return now + 1


def trained_tokens(answers: Sequence[Mapping[str, Any]]) -> Sampled:
    """Return the trained tokens of the answers that a trainer of `recording_trainer` has recorded."""
    found: Sampled = Counter()
    for answer in answers:
        sequence, first = [*answer["prompt"], *answer["tokens"]], len(answer["prompt"]) + 1
        for place, version in enumerate(answer["versions"]):
            if version >= 0:
                found[tuple(sequence[: first + place]), version] += 1
    return found

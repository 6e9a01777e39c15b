# SPDX-License-Identifier: Apache-2.0
"""Where the answered parts of a trajectory ended up in its response.

A part is what one generation request returned, with all that came before it as context. Pure. Shown by
tests/core/test_alignment.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import gt


@dataclass(frozen=True, slots=True)
class Part:
    """One answered request: the version that sampled ``tokens``, which follow ``context``."""

    version: int
    context: Sequence[int]
    tokens: Sequence[int]


def place(
    parts: Sequence[Part], prompt: Sequence[int], response: Sequence[int], mask: Sequence[int]
) -> list[tuple[int, int]] | None:
    """Position in the response and number of tokens used, for each part.

    A part's log-probs hold for the response only if its context is what stands before it there. Returns None if for
    some part it is not, or if a token that is marked as sampled (``mask`` 1) is in no part: the agent loop has then
    rewritten what was generated.
    """
    sequence = [*prompt, *response]
    places, covered = [], bytearray(len(response))
    for part in parts:
        begin, known = len(part.context), [*part.context, *part.tokens][: len(sequence)]
        if begin > len(sequence):
            places.append((len(response), 0))
            continue
        if begin < len(prompt) or sequence[: len(known)] != known:
            return None
        first, used = begin - len(prompt), len(known) - begin
        places.append((first, used))
        covered[first : first + used] = b"\1" * used
    if len(mask) != len(response):
        raise ValueError(f"the mask has {len(mask)} tokens, the response {len(response)}")
    if any(map(gt, map(bool, mask), covered)):
        return None
    return places

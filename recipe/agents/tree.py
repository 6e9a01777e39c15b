# SPDX-License-Identifier: Apache-2.0
"""Records each sampled token of a trajectory with the tokens before it, and makes the sequences that are trained.

Contract:

* An *exchange* is a request's prompt, as tokens, and the tokens that were sampled for it. The parent of an exchange is
  the earlier exchange whose tokens share the longest common prefix with its prompt. That prefix has to include a token
  that the earlier exchange sampled; otherwise there is no parent.
* A *segment* is a sequence to train: the tokens of one exchange, prompt and answer. A token may have mask 1 only where
  it was sampled after exactly the tokens that precede it in the segment.
* Each sampled token has mask 1 in exactly one segment. If several exchanges continue one answer, the exchange
  that keeps most of the answer's tokens trains those; in the other exchanges they are context. The tokens at the
  answer's end that this exchange dropped are trained in a segment of their own.
* A segment fits in ``prompt_length`` and ``response_length`` if no answer was longer than `TokenTree.room` allows.

This module compares only tokens, not texts. So whatever an agent changes in its history, only sampled tokens are
trained, and none of them twice. Shown by tests/core/test_token_tree.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Exchange:
    """One request and its answer.

    Attributes:
        number: index of the exchange in the order of answers.
        prompt: all tokens before the answer.
        sampled: the answer's tokens.
        log_probs: their log-probs.
        media: digests of the prompt's images, in order.
        parent: the number of the parent (see the module's contract), or None.
        kept: how many of the parent's tokens the prompt begins with.
    """

    number: int
    prompt: tuple[int, ...]
    sampled: tuple[int, ...]
    log_probs: tuple[float, ...]
    media: tuple[str, ...] = ()
    parent: int | None = None
    kept: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.sampled


@dataclass(frozen=True)
class Segment:
    """A sequence to train: the prompt and answer of exchange number ``last``. ``turns`` answers in it are trained."""

    prompt: list[int]
    response: list[int]
    mask: list[int]
    log_probs: list[float]
    last: int
    turns: int


class TokenTree:
    """The exchanges of one trajectory."""

    def __init__(self, prompt_length: int, response_length: int) -> None:
        self.exchanges: list[Exchange] = []
        self._prompt_length, self._response_length = prompt_length, response_length

    def add(
        self, prompt: Sequence[int], sampled: Sequence[int], log_probs: Sequence[float], media: Sequence[str] = ()
    ) -> Exchange:
        """Record an answer and return its exchange.

        Raises:
            ValueError: the prompt or the answer is empty, or the numbers of tokens and log-probs differ.
        """
        if not prompt or not sampled or len(sampled) != len(log_probs):
            raise ValueError(
                "an exchange needs a prompt, an answer, and a log-prob for each of the answer's tokens, but has "
                f"{len(prompt)} prompt tokens, {len(sampled)} answer tokens and {len(log_probs)} log-probs"
            )
        parent, kept = self._parent(tuple(prompt), tuple(media))
        number = len(self.exchanges)
        exchange = Exchange(number, tuple(prompt), tuple(sampled), tuple(log_probs), tuple(media), parent, kept)
        self.exchanges.append(exchange)
        return exchange

    def room(self, prompt: Sequence[int], media: Sequence[str] = ()) -> int:
        """Return how many tokens an answer to ``prompt`` may have; 0 or less if the prompt is too long."""
        number, _ = self._parent(tuple(prompt), tuple(media))
        first = len(prompt)
        while number is not None:
            first, number = len(self.exchanges[number].prompt), self.exchanges[number].parent
        return min(first, self._prompt_length) + self._response_length - len(prompt)

    def segments(self) -> list[Segment]:
        """Return the sequences in which the exchanges are trained, in the order of `Segment.last`."""
        heirs = self._heirs()
        segments = []
        for exchange in self.exchanges:
            heir = heirs.get(exchange.number)
            begin, end = len(exchange.prompt), len(exchange.tokens)
            if heir is None:
                trained = [(begin, end), *self._inherited(exchange, heirs)]
            elif heir.kept < end:
                trained = [(heir.kept, end)]
            else:
                continue
            segments.append(self._segment(exchange, trained))
        return segments

    def _heirs(self) -> dict[int, Exchange]:
        """Map the number of each exchange that has children to the child that keeps most of the exchange's tokens."""
        heirs: dict[int, Exchange] = {}
        for exchange in self.exchanges:
            if exchange.parent is not None and (
                exchange.parent not in heirs or exchange.kept > heirs[exchange.parent].kept
            ):
                heirs[exchange.parent] = exchange
        return heirs

    def _inherited(self, exchange: Exchange, heirs: dict[int, Exchange]) -> list[tuple[int, int]]:
        """Return the ranges (begin, end) of earlier answers' tokens that the segment of ``exchange`` trains."""
        ranges = []
        while exchange.parent is not None and heirs[exchange.parent] is exchange:
            parent = self.exchanges[exchange.parent]
            ranges.append((len(parent.prompt), exchange.kept))
            exchange = parent
        return ranges

    def _segment(self, exchange: Exchange, trained: list[tuple[int, int]]) -> Segment:
        tokens = list(exchange.tokens)
        mask, log_probs = [0] * len(tokens), [0.0] * len(tokens)
        answered = self._log_probs(exchange)
        for begin, end in trained:
            mask[begin:end] = [1] * (end - begin)
            log_probs[begin:end] = answered[begin:end]
        cut = min(*(begin for begin, _ in trained), self._prompt_length)
        return Segment(tokens[:cut], tokens[cut:], mask[cut:], log_probs[cut:], exchange.number, len(trained))

    def _log_probs(self, exchange: Exchange) -> list[float]:
        """Return the log-prob of each token of an exchange, 0 for those that were not sampled."""
        found = [0.0] * len(exchange.tokens)
        end = len(found)
        while True:
            begin = len(exchange.prompt)
            found[begin:end] = exchange.log_probs[: end - begin]
            if exchange.parent is None:
                return found
            exchange, end = self.exchanges[exchange.parent], exchange.kept

    def _parent(self, prompt: tuple[int, ...], media: tuple[str, ...]) -> tuple[int | None, int]:
        """Return the number of a prompt's parent, and how many of the parent's tokens the prompt begins with.

        If several exchanges share equally many tokens with the prompt, the latest one without a child is the parent, or
        the latest one if all have children.
        """
        continued = {exchange.parent for exchange in self.exchanges}
        found: tuple[int, bool, int] | None = None
        for exchange in self.exchanges:
            if len(exchange.prompt) >= len(prompt):
                continue
            if media[: len(exchange.media)] != exchange.media or prompt[: len(exchange.prompt)] != exchange.prompt:
                continue
            kept = common(exchange.tokens, prompt)
            if kept > len(exchange.prompt):
                found = max(found or (0, False, 0), (kept, exchange.number not in continued, exchange.number))
        return (None, 0) if found is None else (found[2], found[0])


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return the length of the common prefix of two sequences."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return bisect_left(range(shorter), True, key=lambda end: one[: end + 1] != other[: end + 1])

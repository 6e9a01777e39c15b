# SPDX-License-Identifier: Apache-2.0
"""Makes SGLang's penalties count the tokens that an answer already has when it enters a batch.

SGLang forgets the tokens of a request that it retracts (sampling/penaltylib): when the request enters a batch again,
penalties begin at zero, and so does the count for ``min_new_tokens``. Here they include the tokens that the request
has, so that an interruption does not change the sampling of an answer. Shown by
tests/integration/test_sglang_server.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)


def count_frequency(penalizer: BatchedFrequencyPenalizer, row: int, tokens: torch.Tensor) -> None:
    penalties = penalizer.frequency_penalties[row].expand(len(tokens))
    penalizer.cumulated_frequency_penalties[row].index_add_(0, tokens, penalties)


def count_presence(penalizer: BatchedPresencePenalizer, row: int, tokens: torch.Tensor) -> None:
    penalizer.cumulated_presence_penalties[row, tokens] = penalizer.presence_penalties[row]


def count_repetition(penalizer: BatchedRepetitionPenalizer, row: int, tokens: torch.Tensor) -> None:
    penalizer.cumulated_repetition_penalties[row, tokens] = penalizer.repetition_penalties[row]


def count_length(penalizer: BatchedMinNewTokensPenalizer, row: int, tokens: torch.Tensor) -> None:
    penalizer.len_output_tokens[row] += len(tokens)


def count_earlier_tokens() -> None:
    """Patch SGLang's penalties in this process."""
    BatchedFrequencyPenalizer._prepare = _counting(BatchedFrequencyPenalizer._prepare, count_frequency)
    BatchedPresencePenalizer._prepare = _counting(BatchedPresencePenalizer._prepare, count_presence)
    BatchedRepetitionPenalizer._prepare = _counting(BatchedRepetitionPenalizer._prepare, count_repetition)
    BatchedMinNewTokensPenalizer._prepare = _counting(BatchedMinNewTokensPenalizer._prepare, count_length)


def _counting(prepare: Callable[[Any], None], count: Callable[[Any, int, torch.Tensor], None]) -> Callable[[Any], None]:
    @functools.wraps(prepare)
    def prepared(self: Any) -> None:
        prepare(self)
        for row, request in enumerate(self.orchestrator.reqs()):
            if request.output_ids:
                count(self, row, torch.tensor(request.output_ids, device=self.orchestrator.device))

    return prepared

# SPDX-License-Identifier: Apache-2.0
"""Sequences to score, in the form that verl's engines take, and what comes back.

Contract: position ``t`` of what comes back is the log-probability of token ``t`` given those before it, and the entropy
of the distribution that it was drawn from; position 0 has neither and is 0. verl's engines give position ``t`` those of
the token after it. Shown by tests/integration/test_model_engine_adapter.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu


@dataclass(frozen=True)
class Segment:
    """Some tokens of a sequence, and what came before them.

    Attributes:
        token_ids: int32 (L,), of the sequence up to the last token wanted.
        first: position of the first token wanted.
    """

    token_ids: np.ndarray
    first: int


def to_batch(sequences: Sequence[torch.Tensor], temperature: float) -> TensorDict:
    """Sequences of token ids, int64 (L,) each, without padding; logits are divided by ``temperature``."""
    rows = len(sequences)
    positions = [torch.arange(len(sequence)) for sequence in sequences]
    # verl's engines look for the masks of a loss, which is not computed here.
    mask = torch.ones(rows, 1, dtype=torch.int64)
    return tu.get_tensordict(
        tensor_dict={
            "input_ids": torch.nested.as_nested_tensor(list(sequences), layout=torch.jagged),
            "position_ids": torch.nested.as_nested_tensor(positions, layout=torch.jagged),
            "loss_mask": mask,
            "response_mask": mask.clone(),
            "temperature": torch.full((rows,), temperature),
        },
        non_tensor_dict={
            "calculate_entropy": True,
            "compute_loss": False,
            "global_token_num": [len(sequence) for sequence in sequences],
            "max_response_len": 1,
        },
    )


def from_batch(output: TensorDict) -> list[np.ndarray]:
    """Log-probs and entropies of each sequence of a batch that an engine computed, in their order: float32 (2, L)."""
    columns = (output["log_probs"].unbind(), output["entropy"].unbind())
    return [torch.stack([_shifted(column) for column in row]).numpy() for row in zip(*columns, strict=True)]


def _shifted(of_next_token: torch.Tensor) -> torch.Tensor:
    """By one position; the engine's last value has no token that it belongs to."""
    return torch.cat([torch.zeros(1), of_next_token[:-1].float().cpu()])

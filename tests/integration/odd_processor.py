# SPDX-License-Identifier: Apache-2.0
"""A user's logits processor, whose allowed tokens depend on all tokens of the answer so far."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class OddTokens(AdapterLogitsProcessor):
    """After ``odd_after`` tokens, allows only tokens with the parity of the sum of those so far."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        after = (params.extra_args or {}).get("odd_after")
        if after is None:
            return None

        def process(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(tokens) >= after:
                logits[1 - sum(tokens) % 2 :: 2] = float("-inf")
            return logits

        return process

# SPDX-License-Identifier: Apache-2.0
"""A logits processor as a user may write one: what it allows next goes by all that the answer has so far."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class OddTokens(AdapterLogitsProcessor):
    """After ``odd_after`` tokens, only tokens that are odd if the sum of those so far is, and even if that is even."""

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

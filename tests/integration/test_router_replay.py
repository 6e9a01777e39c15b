# SPDX-License-Identifier: Apache-2.0
"""Router replay: the experts that an engine chose for a token are those with which the trainer computes it.

Real vLLM engines answer through the real client and servers, while versions are swapped under them, trajectories of
several turns are resumed from checkpoints, and one of the engines dies. verl's functions batch the trajectories, and
verl's Megatron engine, with stand-ins for Transformer Engine, replays them. It has other weights, so that its own
routers would choose other experts.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_program import seen_by

TOKENS = 10_000


@pytest.mark.slow
def test_experts_that_were_chosen_are_the_ones_that_are_replayed(tmp_path: Path) -> None:
    seen = seen_by("routed_answers.py", "cpu", str(tmp_path), timeout_s=600)
    assert seen["tokens"] >= TOKENS and seen["differences"] == 0, seen
    # An engine's experts shifted by one token are wrong, and so are those of the last request of several turns.
    assert seen["shifted"] > 0.9 * seen["tokens"] and seen["of_last_pass"] > 0.1 * seen["tokens"], seen
    # All of it happened.
    assert min(seen["publications"].values()) >= 3 and seen["checkpoints"] == 3 and seen["turns"] == 4, seen
    assert min(seen[name] for name in ("mixed", "interruptions", "restored", "kept_under_way", "recovered")) >= 20, seen
    layouts = seen_by("replayed_experts.py", "cpu", str(tmp_path), timeout_s=600)
    assert layouts.keys() == {"one rank", "expert parallel", "pipeline", "tensor and sequence parallel"}
    for ranks in layouts.values():
        assert not [rank["traceback"] for rank in ranks if "traceback" in rank]
        tokens = sum(rank["tokens"] for rank in ranks)
        assert tokens >= TOKENS and sum(rank["differences"] for rank in ranks) == 0, layouts
        for rank in ranks:
            assert rank["shifted"] > 0.9 * rank["tokens"] and rank["without"] > 0.9 * rank["tokens"], layouts

# SPDX-License-Identifier: Apache-2.0
"""Log-prob servers' engines on an accelerator, in bf16, against Hugging Face's forward in the same precision."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from engine_program import seen_by
from server_log_probs import check_close

PROGRAM = str(Path(__file__).with_name("server_log_probs.py"))
MEGATRON = importlib.util.find_spec("megatron") and importlib.util.find_spec("transformer_engine")


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_log_probs_before_and_after_a_streamed_update(
    accelerators: int, backend: str, tmp_path: Path, note: Any
) -> None:
    if backend == "megatron" and not MEGATRON:
        pytest.skip("megatron-core and transformer-engine are not installed")
    seen = seen_by(PROGRAM, "cuda", backend, str(tmp_path))
    note(**seen)
    check_close(seen)

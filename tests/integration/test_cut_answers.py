# SPDX-License-Identifier: Apache-2.0
"""A cut changes no answer: 2,000 of them at random, over all sampling parameters, with client, server and engine.

A short form, of the engine alone, is in test_staged_engine.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_program import seen_by

CUTS = 2000


@pytest.mark.slow
def test_answers_that_are_cut_are_the_ones_that_they_would_have_been_whole(tmp_path: Path) -> None:
    seen = seen_by("cut_answers.py", "cpu", str(tmp_path), str(CUTS), "5", timeout_s=1200)
    assert not seen["differences"]
    assert not seen["errors"]
    assert seen["cuts"] >= CUTS and len(seen["kinds"]) == 15

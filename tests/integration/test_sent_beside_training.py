# SPDX-License-Identifier: Apache-2.0
"""What tests/gpu measures of weights that are sent while FSDP2 trains, on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_fleet import Engine
from training_ranks import send_beside_training

SETTINGS = {"timeout_s": 60.0, "bucket_size": 8 << 20}
GLOO = Engine("recipe_gloo", "recipe.laptop.transfer.gloo_engine", SETTINGS, bulk_mebibytes=256)


@pytest.mark.slow
def test_two_ranks_train_while_what_they_copied_arrives(cluster: None, tmp_path: Path) -> None:
    seen = send_beside_training(GLOO, str(tmp_path / "meeting"), width=64, layers=4, versions=2)
    assert seen["steps_meanwhile"] > 1 and seen["gigabytes"] > 0.25

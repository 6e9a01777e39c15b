# SPDX-License-Identifier: Apache-2.0
"""Weights on their way to an engine on accelerators: by NCCL between them, beside training too, by CUDA IPC in one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from broadcast import broadcast, engine_for
from handover import hand_over
from training_ranks import send_beside_training

BULK = 1024
BUCKET = {"bucket_size": 256 << 20}


@pytest.fixture
def cluster(accelerators: int, ray_dir: Path) -> Iterator[None]:
    ray.shutdown()
    ray.init(include_dashboard=False, _temp_dir=str(ray_dir), log_to_driver=False)
    yield
    ray.shutdown()


def test_weights_reach_the_engine_beside_their_worker_by_ipc(accelerators: int, ray_dir: Path, note: Any) -> None:
    note(**hand_over("cuda", BULK, str(ray_dir)))


def test_versions_reach_a_replica_bit_for_bit(accelerators: int, cluster: None, note: Any) -> None:
    """By `nccl` with two accelerators; with one by `recipe_gloo`: NCCL takes no two members on one device."""
    engine = engine_for("cuda", accelerators)
    broadcast(engine, versions=3)
    bulky = replace(engine, bulk_mebibytes=BULK, settings=engine.settings | BUCKET)
    note(**broadcast(bulky, versions=3))


def test_two_ranks_train_while_five_gigabytes_are_sent(
    three_accelerators: int, cluster: None, ray_dir: Path, note: Any
) -> None:
    """Two of them train, one receives. Relays would wait for the training's collectives, and these for them."""
    engine = engine_for("cuda", three_accelerators)
    settings = engine.settings | BUCKET | {"multi_sender": False}
    bulky = replace(engine, bulk_mebibytes=4 * BULK, settings=settings)
    note(**send_beside_training(bulky, str(ray_dir / "meeting"), width=4096, layers=16, versions=3))

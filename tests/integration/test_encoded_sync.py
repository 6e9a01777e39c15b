# SPDX-License-Identifier: Apache-2.0
"""Syncs of which only the changes travel, by the real publisher over both engines: and when everything does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_fleet import Engine, Fleet, Trainer, bits, few_changes
from nccl_on_cpu import for_a_while

DEADLINES = {"timeout_s": 30.0, "connect_timeout_s": 15.0}
NCCL = Engine(
    "nccl",
    "recipe.async_engine.weights.nccl_engine",
    {**DEADLINES, "multi_sender": False},
    is_nccl=True,
    encodes=True,
)
GLOO = Engine("recipe_gloo", "recipe.laptop.transfer.gloo_engine", DEADLINES, encodes=True)


@pytest.fixture(scope="module", autouse=True)
def nccl(cluster: None) -> Iterator[None]:
    with for_a_while():
        yield


@pytest.fixture(params=[NCCL, GLOO], ids=["nccl", "recipe_gloo"])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    trainer = Trainer(request.param)
    fleet = Fleet(request.param, trainer, receivers=2)
    yield fleet
    fleet.stop()
    trainer.stop()


def publish(fleet: Fleet, version: int) -> dict[str, Any]:
    """Publish it; whoever serves then has every bit of it."""
    metrics = fleet.publisher.publish(version)
    expected = bits(few_changes(version))
    for replica in fleet.replicas:
        if replica.replica_rank in fleet.routed:
            assert replica.ask("loaded") == expected
            assert replica.ask("wrong_tensors") == []
    return metrics


def is_full(fleet: Fleet, version: int) -> bool:
    metrics = publish(fleet, version)
    assert metrics["weight_sync/full_bytes"] == sum(tensor.nbytes for tensor in few_changes(version).values())
    return metrics["weight_sync/changed_share"] == 1.0


def changed_share(one: int, other: int) -> float:
    before, after = few_changes(one), few_changes(other)
    changed = sum(int((bits_of(before[name]) != bits_of(after[name])).sum()) for name in before)
    return changed / sum(tensor.numel() for tensor in before.values())


def test_changes_alone_travel_until_somebody_lacks_the_version_before(fleet: Fleet) -> None:
    assert is_full(fleet, 0)
    assert publish(fleet, 1)["weight_sync/changed_share"] == pytest.approx(changed_share(0, 1))
    assert not is_full(fleet, 2)
    fleet.join()
    assert is_full(fleet, 3), "the one that joined has nothing yet"
    assert fleet.routed == [0, 1, 2]
    assert not is_full(fleet, 4)
    fleet.replicas[1].ask("meet", "die")
    # The third tensor of a stream of changes is one of those that changed: the sync breaks off in its middle.
    assert is_full(fleet, 5), "in the second attempt, to those that are left"
    assert fleet.routed == [0, 2]
    fleet.publisher.take_lost()
    assert not is_full(fleet, 6)
    fleet.replicas[2].ask("meet", "refuse")
    assert is_full(fleet, 7)
    assert fleet.routed == [0]
    assert is_full(fleet, 8), "the one that was left out lacks the version before"
    assert fleet.routed == [0, 2]
    assert not is_full(fleet, 9)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])

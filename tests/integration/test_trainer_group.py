# SPDX-License-Identifier: Apache-2.0
"""Training workers meet at a port that the machine gives to no connection in between."""

from __future__ import annotations

from pathlib import Path

import pytest
from verl.single_controller.ray import RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import get_master_addr_port

from recipe.async_engine.trainer.startup import TrainerGroup


def test_rendezvous_port_is_below_those_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def init(group: RayWorkerGroup, **_: object) -> None:
        asked.append(group._ray_master_port_range)

    # What verl does next with the range: it starts the workers, and asks on their first node.
    monkeypatch.setattr(RayWorkerGroup, "_init_with_resource_pool", init)
    TrainerGroup(resource_pool=RayResourcePool([1], use_gpu=False))
    _, port = get_master_addr_port._function(*asked)
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert 16_000 <= int(port) < min(32_000, lowest)

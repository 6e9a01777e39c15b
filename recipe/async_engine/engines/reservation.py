# SPDX-License-Identifier: Apache-2.0
"""Accelerators for the parts of a run, reserved before any of them starts.

Contract: groups that need more of one node are reserved before smaller ones, the trainer's before others of their size,
and each group before a later one is asked for. Ray spreads small groups over nodes, so parts that reserve side by side,
as verl's do, may leave no node whole for a large one, and wait for each other for ever. A group is never split over
nodes. What is not there in time is named, with what each node has free. Only the reservation has an order: what takes
long, starting the processes, is done side by side afterwards.

Shown by tests/integration/test_reservation.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.util import remove_placement_group
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from verl.plugin.platform import get_platform
from verl.single_controller.ray import RayResourcePool, RayWorkerGroup
from verl.utils.device import get_device_name
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from recipe.async_engine.actors.sockets import rendezvous_ports
from recipe.async_engine.config.placement import REPLICA_CPUS, Wanted
from recipe.async_engine.core.errors import NothingFree

FREE_S, POLL_S = 3.0, 0.05
"""How long, and how often, a replica that is started in a run looks for accelerators: Ray counts them a bit late."""


class Reservations:
    """See the module's contract. `pool` may be called from any thread."""

    def __init__(self) -> None:
        self._pools: dict[str, RayResourcePool] = {}

    def reserve(self, parts: Sequence[Wanted], timeout_s: float) -> None:
        """Reserve ``parts``, in this order; NothingFree if one is not there within ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        for part in parts:
            pool = _pool(part)
            if not _reserve(pool, part, deadline):
                raise NothingFree(
                    f"{_described(part)} were not free within {timeout_s:g} s ({part.setting}, and nine tenths of "
                    f"async_training.timeouts.startup); free are {_free()}"
                )
            self._pools[part.pool] = pool

    def pool(self, name: str, on_a_node: int = 0, groups: int = 0) -> RayResourcePool:
        """What was reserved under this name, once; what was not is reserved now, if it is free.

        Raises:
            NothingFree: it is not.
        """
        if (reserved := self._pools.pop(name, None)) is not None:
            return reserved
        part = Wanted(name, "a replica", "", on_a_node, groups, REPLICA_CPUS)
        pool = _pool(part)
        if not _reserve(pool, part, time.monotonic() + FREE_S):
            raise NothingFree(f"{_described(part)} are not free; free are {_free()}")
        return pool


class ReservedReplica(RolloutReplica):
    """A replica that takes what is reserved for it; without `reservations` it reserves by itself, as verl's do."""

    reservations: Reservations | None = None

    async def init_standalone(self) -> None:
        """As verl's (workers/rollout/replica.py:165), on the reserved accelerators."""
        if self.reservations is None:
            await super().init_standalone()
            return
        self.rollout_mode = RolloutMode.STANDALONE
        kind = "reward_" if self.is_reward_model else ""
        name = f"rollout_pool_{kind}{self.replica_rank}{self.name_suffix}"
        per_node, nodes = self.gpus_per_replica_node, self.nnodes
        self.resource_pool = await asyncio.to_thread(self.reservations.pool, name, per_node, nodes)
        group = RayWorkerGroup(
            resource_pool=self.resource_pool,
            ray_cls_with_init=self.get_ray_class_with_init_args(),
            bin_pack=False,
            name_prefix=f"rollout_{kind}standalone_{self.replica_rank}{self.name_suffix}",
            use_gpu=True,
            device_name=get_device_name(),
            master_port_range=rendezvous_ports(),
        )
        self.workers = group.workers
        await self.launch_servers()


def _pool(part: Wanted) -> RayResourcePool:
    return RayResourcePool([part.on_a_node] * part.groups, max_colocate_count=part.cpus, name_prefix=part.pool)


def _reserve(pool: RayResourcePool, part: Wanted, deadline: float) -> bool:
    """Give ``pool`` its placement groups, as verl's `get_placement_groups` does; False leaves nothing reserved."""
    bundle = {"CPU": part.cpus, get_platform().ray_resource_name(): 1}
    groups: list[PlacementGroup] = []
    try:
        for number, count in enumerate(pool.store):
            name = f"{part.pool}:{number}"
            groups.append(placement_group([bundle] * count, strategy="STRICT_PACK", name=name))
            if not _is_there(groups[-1], deadline):
                return False
        pool.pgs = groups
        return True
    finally:
        if pool.pgs is None:
            for group in groups:
                remove_placement_group(group)


def _is_there(group: PlacementGroup, deadline: float) -> bool:
    # Ray's own wait rounds its deadline down to whole seconds.
    while placement_group_table(group)["state"] != "CREATED":
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _described(part: Wanted) -> str:
    times = f", {part.groups} times" if part.groups > 1 else ""
    cpus = part.on_a_node * part.cpus
    return f"the {part.on_a_node} accelerators and {cpus} CPUs on one node{times} for {part.part}"


def _free() -> str:
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    free: dict[str, dict[str, Any]] = ray._private.state.available_resources_per_node()
    name = get_platform().ray_resource_name()
    rooms = [
        f"{addresses.get(node, node)}: {room.get(name, 0):g} accelerators and {room.get('CPU', 0):g} CPUs"
        for node, room in free.items()
    ]
    return "; ".join(rooms) or "none"

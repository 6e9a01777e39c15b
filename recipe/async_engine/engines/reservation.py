# SPDX-License-Identifier: Apache-2.0
"""Reserves accelerators for the trainer, the rollout replicas and the other components of a run before they start.

Contract: Ray placement groups are reserved one after the other, in decreasing order of the accelerators that they need
on one node. Among equals the trainer's group comes first. A placement group is never split over nodes. (In verl all
components reserve at the same time. Since Ray spreads small groups over nodes, there may be no whole node left for a
large group, and the components wait for each other for ever.) An error names the accelerators that were not free in
time, and those that are free on each node. The processes start concurrently after all reservations. Shown by
tests/integration/test_reservation.py.
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
from recipe.async_engine.core.deadlines import FREE_S
from recipe.async_engine.core.errors import NothingFree

POLL_S = 0.05


class Reservations:
    """The placement groups that are reserved for a run, by pool name. Any thread may call `pool`."""

    def __init__(self) -> None:
        self._pools: dict[str, RayResourcePool] = {}

    def reserve(self, parts: Sequence[Wanted], timeout_s: float) -> None:
        """Reserve accelerators for each of ``parts``, in this order.

        Raises:
            NothingFree: not all accelerators were free within ``timeout_s`` seconds.
        """
        deadline = time.monotonic() + timeout_s
        for part in parts:
            pool = _pool(part)
            if not _reserve(pool, part, deadline):
                raise NothingFree(
                    f"{_described(part)} were not free within {timeout_s:g} s ({part.setting}; the limit is nine "
                    f"tenths of async_training.timeouts.startup); available are {_free()}"
                )
            self._pools[part.pool] = pool

    def pool(self, name: str, on_a_node: int = 0, groups: int = 0) -> RayResourcePool:
        """Return the pool that was reserved as ``name``, or reserve one now if there is none.

        Each reserved pool is returned only once. A later call with its name reserves another one.

        ``groups`` is the number of placement groups, and ``on_a_node`` is the number of accelerators in each of them.

        Raises:
            NothingFree: a pool had to be reserved now, and not enough accelerators are free.
        """
        if (reserved := self._pools.pop(name, None)) is not None:
            return reserved
        part = Wanted(name, "a replica", "", on_a_node, groups, REPLICA_CPUS)
        pool = _pool(part)
        if not _reserve(pool, part, time.monotonic() + FREE_S):
            raise NothingFree(f"{_described(part)} are not free; available are {_free()}")
        return pool


class ReservedReplica(RolloutReplica):
    """A replica on accelerators from `reservations`. If that is None, the replica reserves them itself, as in verl."""

    reservations: Reservations | None = None

    async def init_standalone(self) -> None:
        """Start like verl's method (workers/rollout/replica.py:165), but on the reserved accelerators."""
        if self.reservations is None:
            await super().init_standalone()
            return
        self.rollout_mode = RolloutMode.STANDALONE
        kind = "reward_" if self.is_reward_model else ""
        name = f"rollout_pool_{kind}{self.replica_rank}{self.name_suffix}"
        per_node, nodes = self.gpus_per_replica_node, self.nnodes
        pool = await asyncio.to_thread(self.reservations.pool, name, per_node, nodes)
        await self._launch_on(pool, f"rollout_{kind}standalone")

    async def init_colocated(self, resource_pool: RayResourcePool) -> None:
        """Start a teacher's replica as verl does (replica.py:156).

        ``resource_pool`` is the replica's part of the teachers' pool.
        """
        self.rollout_mode = RolloutMode.COLOCATED
        await self._launch_on(resource_pool, "rollout_teacher_colocate")

    async def _launch_on(self, pool: RayResourcePool, prefix: str) -> None:
        self.resource_pool = pool
        group = RayWorkerGroup(
            resource_pool=pool,
            ray_cls_with_init=self.get_ray_class_with_init_args(),
            bin_pack=False,
            name_prefix=f"{prefix}_{self.replica_rank}{self.name_suffix}",
            use_gpu=True,
            device_name=get_device_name(),
            master_port_range=rendezvous_ports(),
        )
        self.workers = group.workers
        await self.launch_servers()


def _pool(part: Wanted) -> RayResourcePool:
    return RayResourcePool([part.on_a_node] * part.groups, max_colocate_count=part.cpus, name_prefix=part.pool)


def _reserve(pool: RayResourcePool, part: Wanted, deadline: float) -> bool:
    """Reserve the placement groups of ``pool``. If they are not all free in time, reserve none and return False."""
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
    # Poll, because Ray's own waiting function rounds its time limit down to whole seconds.
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

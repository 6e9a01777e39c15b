# SPDX-License-Identifier: Apache-2.0
"""Lists the accelerators and CPUs that each component of a run reserves, and checks that they fit on the nodes.

Contract: `wanted` lists what verl reserves for the trainer and for each server: groups of accelerators, each group on
one node, with a number of CPUs per accelerator. If `unplaceable` returns a component, no arrangement fits it on the
nodes together with the components listed before it. If `unplaceable` returns None, all components fit, provided that
each group size is a multiple of all smaller ones. Reserving them in the order of `wanted` (larger groups first) then
never blocks. Shown by tests/config/test_placement.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipe.async_engine.config.facts import NodeRoom
from recipe.async_engine.config.plan import hybrid_replicas, replica_size, rollout_accelerators, teachers
from recipe.async_engine.config.problems import lookup
from recipe.async_engine.config.sections import SHARED, Settings

# Number of CPUs that verl reserves with each accelerator (single_controller/ray/base.py:211,
# workers/rollout/replica.py:205).
TRAINER_CPUS, REPLICA_CPUS = 3, 2
TRAINER_POOL, TEACHER_POOL = "trainer_pool", "teacher_pool"


@dataclass(frozen=True, slots=True)
class Wanted:
    """The resources that one component of a run reserves: the trainer, or one server."""

    pool: str  # verl's name for the resource pool
    part: str  # name of the component, for messages
    setting: str  # the setting for the number of its accelerators
    on_a_node: int  # accelerators of one group; a group lies on one node
    groups: int  # number of groups
    cpus: int  # number of CPUs per accelerator


def replica_pool(number: int, kind: str = "") -> str:
    """Return verl's name for the resource pool of a replica.

    ``kind`` is "" for a rollout replica, "reward_" for a reward model's server and "servers_" for a log-prob server.
    """
    return f"rollout_pool_{number}_model_engine" if kind == "servers_" else f"rollout_pool_{kind}{number}"


def wanted(config: Mapping[str, Any], settings: Settings) -> list[Wanted]:
    """Return what each component of a run reserves, those with the largest groups first; in a tie the trainer first."""
    nodes, per_node = int(lookup(config, "trainer.nnodes")), int(lookup(config, "trainer.n_gpus_per_node"))
    setting = "trainer.n_gpus_per_node"
    parts = [Wanted(TRAINER_POOL, "the training ranks", setting, per_node, nodes, TRAINER_CPUS)]
    if settings.async_training.placement != SHARED:
        size, per_node = replica_size(config), settings.rollout.n_gpus_per_node
        count = rollout_accelerators(config, settings) // size
        # Hybrid replicas come first in the numbering, and reserve nothing: they use the trainer's accelerators.
        first = hybrid_replicas(config, settings)
        parts += _replicas("rollout replica", "rollout.n_gpus_per_node", "", count, size, per_node, first)
    if (servers := settings.servers).enabled:
        setting, count = "model_engine_server.n_gpus_per_node", servers.replicas + servers.reference_replicas
        parts += _replicas("log-prob server", setting, "servers_", count, servers.ranks, servers.n_gpus_per_node)
    section = "reward.reward_model"
    if lookup(config, f"{section}.enable") and lookup(config, f"{section}.enable_resource_pool"):
        size, setting = replica_size(config, f"{section}.rollout"), f"{section}.n_gpus_per_node"
        per_node = int(lookup(config, setting) or 0)
        count = per_node * int(lookup(config, f"{section}.nnodes") or 0) // size
        parts += _replicas("reward model's server", setting, "reward_", count, size, per_node)
    if teachers(config):
        setting, nodes = "distillation.n_gpus_per_node", int(lookup(config, "distillation.nnodes") or 0)
        per_node = int(lookup(config, setting) or 0)
        parts.append(Wanted(TEACHER_POOL, "the teachers' servers", setting, per_node, nodes, REPLICA_CPUS))
    return sorted(parts, key=lambda part: -part.on_a_node)


def _replicas(
    what: str, setting: str, kind: str, count: int, size: int, per_node: int, first: int = 0
) -> Iterator[Wanted]:
    on_a_node = min(per_node, size)
    # A rule refuses a configuration in which `on_a_node` is 0; here, only avoid a division by 0.
    for number in range(first, first + count if on_a_node else 0):
        pool = replica_pool(number, kind)
        yield Wanted(pool, f"{what} {number}", setting, on_a_node, size // on_a_node, REPLICA_CPUS)


def unplaceable(parts: Sequence[Wanted], rooms: Sequence[NodeRoom]) -> Wanted | None:
    """Return the first of ``parts`` that does not fit on the nodes together with those before it; None if all may fit.

    ``rooms`` are the nodes. Each part needs groups of accelerators and CPUs (`Wanted`). For each size that a group has,
    this counts how many groups of the size fit on the nodes, and how many the parts need. The result is exact if each
    size is a multiple of all smaller sizes. One more CPU is counted for the trainer's process.
    """
    groups = [(part.on_a_node, part.on_a_node * part.cpus) for part in parts for _ in range(part.groups)]
    groups.append((0, 1))
    owners = [part for part in parts for _ in range(part.groups)]
    first = []
    for unit in set(groups):
        room = sum(_times(unit, (node.accelerators, node.cpus)) for node in rooms)
        taken = itertools.accumulate(_times(unit, group) for group in groups)
        first += [index for index, count in enumerate(taken) if count > room][:1]
    # The last of `groups` is one CPU for the trainer's process, which belongs to no part. If all groups but this one
    # fit, return the last part.
    return owners[min(*first, len(owners) - 1)] if first else None


def _times(unit: tuple[int, int], room: tuple[int, float]) -> int:
    """Return how many groups of ``unit`` (accelerators, CPUs) fit into ``room``."""
    return int(min(have // need for need, have in zip(unit, room, strict=True) if need))

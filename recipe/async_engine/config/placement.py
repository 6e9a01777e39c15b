# SPDX-License-Identifier: Apache-2.0
"""Which accelerators and CPUs the parts of a run reserve, and whether nodes have room for all of them.

Contract: `wanted` lists what verl reserves: groups of accelerators, each on one node, with so many CPUs beside each
accelerator. `unplaceable` is exact: the part that it names fits in no arrangement, whatever else runs. What is reserved
in the order of `wanted`, larger groups first, cannot block itself where sizes divide each other.

Shown by tests/config/test_placement.py.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipe.async_engine.config.facts import NodeRoom
from recipe.async_engine.config.plan import replica_size, rollout_accelerators
from recipe.async_engine.config.sections import SHARED, Settings, lookup

# verl's, of each accelerator's bundle (single_controller/ray/base.py:214, workers/rollout/replica.py:185).
TRAINER_CPUS, REPLICA_CPUS = 3, 2
TRAINER_POOL = "trainer_pool"
MAX_ARRANGEMENTS = 20_000
"""Looked at before a placement counts as possible."""

_Group = tuple[int, int]
_Free = tuple[tuple[tuple[int, float], int], ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one part of a run reserves."""

    pool: str  # verl's name of its resource pool
    part: str  # in words
    setting: str  # what says how many accelerators
    on_a_node: int  # accelerators of a group, which lies on one node
    groups: int
    cpus: int  # beside each accelerator


def replica_pool(number: int, kind: str = "") -> str:
    """verl's name of the resource pool of a replica; ``kind``: "", "reward_" or, of log-prob servers, "servers_"."""
    return f"rollout_pool_{number}_model_engine" if kind == "servers_" else f"rollout_pool_{kind}{number}"


def wanted(config: Mapping[str, Any], settings: Settings) -> list[Wanted]:
    """What the parts of a valid configuration reserve, larger groups first, the trainer first among equals."""
    nodes, per_node = int(lookup(config, "trainer.nnodes")), int(lookup(config, "trainer.n_gpus_per_node"))
    setting = "trainer.n_gpus_per_node"
    parts = [Wanted(TRAINER_POOL, "the training ranks", setting, per_node, nodes, TRAINER_CPUS)]
    parts += [*_rollout(config, settings), *_servers(settings), *_reward_model(config)]
    return sorted(parts, key=lambda part: -part.on_a_node)


def _replicas(what: str, setting: str, kind: str, count: int, size: int, per_node: int) -> Iterator[Wanted]:
    on_a_node = min(per_node, size)
    # Of what a rule refuses there may be none.
    for number in range(count if on_a_node else 0):
        pool = replica_pool(number, kind)
        yield Wanted(pool, f"{what} {number}", setting, on_a_node, size // on_a_node, REPLICA_CPUS)


def _rollout(config: Mapping[str, Any], settings: Settings) -> Iterator[Wanted]:
    if settings.async_training.placement != SHARED:
        size, per_node = replica_size(config), settings.rollout.n_gpus_per_node
        count = rollout_accelerators(config, settings) // size
        yield from _replicas("rollout replica", "rollout.n_gpus_per_node", "", count, size, per_node)


def _servers(settings: Settings) -> Iterator[Wanted]:
    servers = settings.servers
    if servers.enabled:
        setting, count = "model_engine_server.n_gpus_per_node", servers.replicas + servers.reference_replicas
        yield from _replicas("log-prob server", setting, "servers_", count, servers.ranks, servers.n_gpus_per_node)


def _reward_model(config: Mapping[str, Any]) -> Iterator[Wanted]:
    section = "reward.reward_model"
    if lookup(config, f"{section}.enable") and lookup(config, f"{section}.enable_resource_pool"):
        per_node = int(lookup(config, f"{section}.n_gpus_per_node") or 0)
        size = replica_size(config, f"{section}.rollout")
        count = per_node * int(lookup(config, f"{section}.nnodes") or 0) // size
        setting = f"{section}.n_gpus_per_node"
        yield from _replicas("reward model's server", setting, "reward_", count, size, per_node)


def unplaceable(parts: Sequence[Wanted], rooms: Sequence[NodeRoom]) -> Wanted | None:
    """The first of ``parts`` that no arrangement has room for together with those before it; None if all may fit.

    The trainer's process takes a CPU beside them.
    """
    groups = [(part.on_a_node, part.on_a_node * part.cpus) for part in parts for _ in range(part.groups)]
    groups.append((0, 1))
    limit = _counted(groups, rooms)
    reached = _arranged(groups[:limit], rooms)
    if reached is None:
        reached = limit
    if reached is None:
        return None
    owners = [part for part in parts for _ in range(part.groups)]
    # Without a CPU for the trainer's process the last part takes one too many.
    return owners[min(reached, len(owners) - 1)]


def _counted(groups: Sequence[_Group], rooms: Sequence[NodeRoom]) -> int | None:
    """How many groups have room at most, in their order; None: all, as far as counting tells.

    A node has room for so many times a group, and a larger group takes the room of several: of sizes that divide each
    other this leaves nothing open.
    """
    first = []
    for unit in set(groups):
        room = sum(_times(unit, (node.accelerators, node.cpus)) for node in rooms)
        taken = itertools.accumulate(_times(unit, group) for group in groups)
        first += [index for index, count in enumerate(taken) if count > room][:1]
    return min(first, default=None)


def _times(unit: _Group, room: tuple[int, float]) -> int:
    """How many groups like ``unit`` fit beside each other."""
    return int(min(have // need for need, have in zip(unit, room, strict=True) if need))


def _arranged(groups: Sequence[_Group], rooms: Sequence[NodeRoom]) -> int | None:
    """How many groups the best arrangement has room for, in their order; None: all, or there are too many to try."""
    stack = [(0, tuple(sorted(Counter((room.accelerators, room.cpus) for room in rooms).items())))]
    seen: set[tuple[int, _Free]] = set()
    reached = 0
    while stack:
        index, free = stack.pop()
        if index == len(groups) or len(seen) > MAX_ARRANGEMENTS + len(groups):
            return None
        if (index, free) in seen:
            continue
        seen.add((index, free))
        reached = max(reached, index)
        accelerators, cpus = groups[index]
        fitting = [room for room, _ in free if room[0] >= accelerators and room[1] >= cpus]
        # The fullest node that has room is tried first: it is pushed last.
        for room in sorted(fitting, reverse=True):
            left = Counter(dict(free))
            left[room] -= 1
            left[room[0] - accelerators, room[1] - cpus] += 1
            stack.append((index + 1, tuple(sorted((+left).items()))))
    return reached

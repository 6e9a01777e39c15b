# SPDX-License-Identifier: Apache-2.0
"""The parts of a run reserve accelerators, and nodes without room for all of them are refused."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from test_config import JUDGE, OPD, REWARD_MODEL, SERVERS, TAUGHT, configured

from recipe.async_engine.config.facts import NodeRoom, Resources
from recipe.async_engine.config.placement import Wanted, unplaceable, wanted
from recipe.async_engine.config.sections import read_settings
from recipe.async_engine.config.validation import judge

ROOMY = 1000.0


def part(on_a_node: int, groups: int = 1, cpus: int = 2, name: str = "a part") -> Wanted:
    return Wanted(name, name, "some.setting", on_a_node, groups, cpus)


def rooms(*accelerators: int, cpus: float = ROOMY) -> list[NodeRoom]:
    return [NodeRoom(count, cpus) for count in accelerators]


def fits_somehow(groups: Sequence[int], nodes: Sequence[int]) -> bool:
    """Return whether the parts fit on the nodes, by trying every arrangement."""
    for places in itertools.product(range(len(nodes)), repeat=len(groups)):
        left = list(nodes)
        for size, node in zip(groups, places, strict=True):
            left[node] -= size
        if min(left) >= 0:
            return True
    return False


def test_parts_are_what_verl_reserves_larger_groups_first_and_the_trainer_before_its_equals() -> None:
    config = configured(
        {
            **SERVERS,
            **REWARD_MODEL,
            **TAUGHT,
            f"{OPD}.nnodes": 3,
            "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
            "model_engine_server.n_gpus_per_node": 8,
            "model_engine_server.replicas": 2,
            "trainer.n_gpus_per_node": 4,
        }
    )
    parts = wanted(config, read_settings(config)[0])
    assert [(item.pool, item.on_a_node, item.groups, item.cpus) for item in parts] == [
        ("trainer_pool", 4, 1, 3),
        ("rollout_pool_0_model_engine", 4, 1, 2),
        ("rollout_pool_1_model_engine", 4, 1, 2),
        ("rollout_pool_0", 2, 1, 2),
        ("rollout_pool_1", 2, 1, 2),
        ("rollout_pool_reward_0", 2, 1, 2),
        ("teacher_pool", 2, 3, 2),
    ]


def test_standalone_replicas_are_numbered_after_those_on_the_trainers_accelerators() -> None:
    elastic = {
        "async_training.placement": "elastic",
        "trainer.n_gpus_per_node": 4,
        "rollout.n_gpus_per_node": 6,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
    }
    config = configured(elastic)
    parts = wanted(config, read_settings(config)[0])
    assert [item.pool for item in parts] == ["trainer_pool", "rollout_pool_2", "rollout_pool_3", "rollout_pool_4"]


@pytest.mark.parametrize(
    ("change", "servers"),
    [
        ({f"{JUDGE}.nnodes": 2, f"{JUDGE}.n_gpus_per_node": 4}, 4),
        ({f"{JUDGE}.nnodes": None}, 0),
        ({f"{JUDGE}.n_gpus_per_node": 0}, 0),
        ({f"{JUDGE}.n_gpus_per_node": None}, 0),
    ],
)
def test_a_reward_model_has_as_many_servers_as_its_accelerators_divide_into(
    change: dict[str, Any], servers: int
) -> None:
    config = configured(REWARD_MODEL | change)
    parts = wanted(config, read_settings(config)[0])
    assert sum(item.pool.startswith("rollout_pool_reward_") for item in parts) == servers


def test_nodes_are_compared_one_by_one_and_not_in_sum() -> None:
    trainer = part(8, groups=2, name="the training ranks")
    assert unplaceable([trainer], rooms(8, 8)) is None
    assert unplaceable([trainer], rooms(4, 4, 4, 4)) is trainer
    assert unplaceable([trainer, small := part(1)], rooms(8, 8)) is small
    assert unplaceable([trainer, part(1)], rooms(8, 8, 1)) is None


def test_cpus_count_too_and_the_trainers_process_takes_one_beside_them() -> None:
    assert unplaceable([part(2)], rooms(2, cpus=5)) is None
    assert unplaceable([lacking := part(2)], rooms(2, cpus=4)) is lacking
    assert unplaceable([part(2)], [NodeRoom(2, 4), NodeRoom(0, 1)]) is None
    assert unplaceable([lacking := part(2, cpus=3)], rooms(2, cpus=5)) is lacking


def test_the_first_fitting_node_is_not_taken_where_another_leaves_room_for_the_rest() -> None:
    assert unplaceable([part(6), part(5), part(4), part(3), part(2)], rooms(10, 10)) is None
    assert unplaceable([part(4), part(4), part(3), part(2), part(2)], rooms(10, 5)) is None


def test_only_what_fits_in_no_arrangement_is_refused() -> None:
    draw = random.Random(1)
    for _ in range(300):
        nodes = [draw.randint(1, 8) for _ in range(draw.randint(1, 4))]
        sizes = sorted((draw.randint(1, 6) for _ in range(draw.randint(1, 5))), reverse=True)
        parts = [part(size) for size in sizes]
        named = unplaceable(parts, rooms(*nodes))
        assert named is None or not fits_somehow(sizes[: [one is named for one in parts].index(True) + 1], nodes)


def test_a_thousand_replicas_are_judged_at_once() -> None:
    parts = [part(8, groups=64, cpus=3), *(part(2) for _ in range(1000))]
    assert unplaceable(parts, rooms(*[8] * 314)) is None
    assert unplaceable(parts, rooms(*[8] * 313)) is parts[1 + 4 * (313 - 64)]


@pytest.mark.parametrize(
    ("nodes", "change", "setting"),
    [
        (rooms(4, 4), {}, None),
        (rooms(4, 4), {"trainer.nnodes": 2, "rollout.n_gpus_per_node": 2}, "rollout.n_gpus_per_node"),
        (rooms(2, 2, 2, 2), {}, "trainer.n_gpus_per_node"),
        (rooms(4, 2, 2), {}, None),
        (rooms(4, 2, 2), {"actor_rollout_ref.rollout.tensor_model_parallel_size": 4}, "rollout.n_gpus_per_node"),
        (rooms(4, 4, cpus=12), {}, None),
        (rooms(4, 4, cpus=11), {}, "trainer.n_gpus_per_node"),
    ],
)
def test_a_placement_that_can_never_be_met_is_refused_by_the_setting_of_its_part(
    nodes: list[NodeRoom], change: dict[str, int], setting: str | None
) -> None:
    available = Resources(8 if setting is None or change == {} else 100, nodes=tuple(nodes))
    problems = judge(configured(change), dataset_rows=500, available=available)[0]
    assert [problem.setting for problem in problems] == ([setting] if setting else [])
    if setting:
        assert "on one node" in str(problems[0]) and f"with {nodes[0].accelerators} accelerators" in str(problems[0])


def test_a_replica_over_several_nodes_fills_them() -> None:
    size = {"actor_rollout_ref.rollout.tensor_model_parallel_size": 6}
    refused = judge(configured(size | {"rollout.nnodes": 3, "rollout.n_gpus_per_node": 4}))[0]
    assert [problem.setting for problem in refused] == ["rollout.n_gpus_per_node"]
    assert "a divisor of a replica's 6 accelerators" in str(refused[0])
    assert judge(configured(size | {"rollout.nnodes": 2, "rollout.n_gpus_per_node": 3}))[0] == []

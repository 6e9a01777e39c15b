# SPDX-License-Identifier: Apache-2.0
"""Parts of a run whose trainer needs nodes whole get their accelerators on a real Ray of two nodes with eight each."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from omegaconf import OmegaConf
from ray.util import remove_placement_group
from ray_nodes import Loopback, closing
from surroundings import ray_folder
from test_config import configured
from verl.single_controller.ray import RayResourcePool

from recipe.async_engine.actors.replacement import clear_replica
from recipe.async_engine.config.placement import Wanted, wanted
from recipe.async_engine.config.sections import read_settings
from recipe.async_engine.core.errors import NothingFree
from recipe.async_engine.engines.reservation import Reservations
from recipe.async_engine.trainer.startup import Startup

TRAINER = {"trainer.nnodes": 1, "trainer.n_gpus_per_node": 8}
# Eight replicas of one accelerator.
ROLLOUT = {"rollout.n_gpus_per_node": 8, "actor_rollout_ref.rollout.tensor_model_parallel_size": 1}
SOON_S = 30.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two nodes with eight logical accelerators each."""
    ray.shutdown()
    with ray_folder() as folder, closing(Loopback(folder, loses_nodes=False)) as nodes:
        for _ in range(2):
            nodes.add(accelerators=8, cpus=40)
        ray.init(address=nodes.ray_address, log_to_driver=False)
        yield
        ray.shutdown()


@pytest.fixture
def groups(cluster: None) -> Iterator[list[Any]]:
    """Pools whose accelerators are given back after a test, which begins when all are free."""
    pools: list[Any] = []
    yield pools
    for pool in pools:
        for group in pool.pgs or ():
            remove_placement_group(group)
    deadline = time.monotonic() + 4 * SOON_S
    while ray.available_resources().get("GPU") != 16:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def settings() -> tuple[dict[str, Any], Any]:
    config = configured({**TRAINER, **ROLLOUT})
    return config, read_settings(config)[0]


def test_verls_own_order_leaves_no_node_whole_for_a_trainer_that_comes_later(groups: list[Any]) -> None:
    """What this is all for: small groups that are reserved first are spread over both nodes."""
    trainer, *replicas = [RayResourcePool([part.on_a_node], max_colocate_count=2) for part in wanted(*settings())]
    for replica in replicas:
        replica.get_placement_groups(device_name="cpu")
        groups.append(replica)
    waits = threading.Thread(target=trainer.get_placement_groups, daemon=True)
    waits.start()
    waits.join(2.0)
    assert waits.is_alive(), "it found eight free accelerators on one node"
    for replica in groups:
        for group in replica.pgs:
            remove_placement_group(group)
    groups[:] = [trainer]
    waits.join(SOON_S)
    assert not waits.is_alive()


class DelayedTrainer(Startup):
    """Starts nothing but placement: replicas take their accelerators at once, the trainer's workers theirs later."""

    def __init__(self, taken: list[Any]) -> None:
        config, self_settings = settings()
        self.config = OmegaConf.create(config)
        self.plan = SimpleNamespace(settings=self_settings, hybrid_replicas=0)
        self.timeouts = SimpleNamespace(startup=SOON_S, weight_sync=SOON_S)
        self.taken, self.rollout_is_placed = taken, threading.Event()

    def start_training(self) -> None:
        assert self.rollout_is_placed.wait(SOON_S)
        pool = self.reservations.pool("trainer_pool")
        self.taken.append(pool)
        pool.get_placement_groups(device_name="cpu")

    def _start_rollout(self, hybrid: Any) -> None:
        replicas = [self.reservations.pool(f"rollout_pool_{number}", 1, 1) for number in range(8)]
        self.taken.extend(replicas)
        for pool in replicas:
            pool.get_placement_groups(device_name="cpu")
        self.rollout_is_placed.set()

    def use_rollout(self, rollout: Any, hybrid: Any) -> None: ...


def test_a_trainer_that_comes_later_than_small_replicas_has_its_node_whole(groups: list[Any]) -> None:
    trainer = DelayedTrainer(groups)
    trainer.init_workers()
    assert len(groups) == 9 and all(pool.pgs for pool in groups)
    assert nodes_of(groups[-1]).isdisjoint(set.union(*map(nodes_of, groups[:-1])))


def nodes_of(pool: RayResourcePool) -> set[str]:
    table = ray.util.placement_group_table
    return {node for group in pool.pgs for node in table(group)["bundles_to_node_id"].values()}


def test_what_does_not_fit_is_named_with_what_each_node_has_free_and_keeps_nothing(groups: list[Any]) -> None:
    reservations = Reservations()
    parts = [Wanted("trainer_pool", "the training ranks", "trainer.n_gpus_per_node", 6, 3, 3)]
    with pytest.raises(NothingFree) as raised:
        reservations.reserve(parts, timeout_s=1.0)
    said = str(raised.value)
    assert said.startswith("the 6 accelerators and 18 CPUs on one node, 3 times for the training ranks were not free")
    assert "trainer.n_gpus_per_node" in said and "async_training.timeouts.startup" in said
    assert said.count(" accelerators and ") == 3


def test_a_replica_that_is_started_in_a_run_is_never_split_over_nodes(
    groups: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's own reservation of a replica may be: its strategy is PACK."""
    monkeypatch.setattr("recipe.async_engine.engines.reservation.FREE_S", 1.0)
    reservations = Reservations()
    groups.extend(reservations.pool(f"rollout_pool_{number}", 5, 1) for number in range(2))
    with pytest.raises(NothingFree, match=r"the 4 accelerators and 8 CPUs on one node for a replica are not free"):
        reservations.pool("rollout_pool_2", 4, 1)
    # Nothing waits for it any more: what is free now is for others.
    clear_replica(SimpleNamespace(servers=[], workers=[], resource_pool=groups.pop()))
    groups.append(reservations.pool("rollout_pool_3", 4, 1))
    assert len(nodes_of(groups[-1])) == 1

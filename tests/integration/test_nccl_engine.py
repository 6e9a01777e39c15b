# SPDX-License-Identifier: Apache-2.0
"""verl's own checkpoint engine `nccl` under our publisher, over gloo, and the same scenarios with `recipe_gloo`.

What is verl's and Ray's runs as it is; nccl_on_cpu.py says what stands in for cupy and for the device.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import ray
from broadcast import broadcast, engine_for
from engine_fleet import Engine, Fleet, Replica, Trainer, bits, make_weights
from nccl_on_cpu import for_a_while
from ray.exceptions import RayActorError
from verl.checkpoint_engine.base import CheckpointEngineRegistry

from recipe.async_engine.core.errors import SettingError
from recipe.async_engine.weights import publisher
from recipe.async_engine.weights.publisher import PublishFailed

DEADLINES = {"timeout_s": 30.0, "connect_timeout_s": 15.0}
RELAYS = Engine("nccl", "recipe.async_engine.weights.nccl_engine", DEADLINES, is_nccl=True)
OURS = replace(RELAYS, settings={**DEADLINES, "multi_sender": False})
GLOO = Engine("recipe_gloo", "recipe.laptop.transfer.gloo_engine", DEADLINES)
VERLS = Engine("nccl", None, is_nccl=True)
ENGINES = pytest.mark.parametrize("engine", [OURS, GLOO], ids=["nccl", "recipe_gloo"])
# Far below the deadlines, and far above what it takes on a busy machine.
SOON_S = 12.0

FleetOf = Callable[..., Fleet]


@pytest.fixture(scope="module", autouse=True)
def nccl(cluster: None) -> Iterator[None]:
    with for_a_while():
        yield


@pytest.fixture(scope="module")
def trainer_of() -> Iterator[Callable[[Engine], Trainer]]:
    """The trainer of the fleets with an engine: whatever happened to their replicas, it sends to the next ones."""
    trainers: dict[int, Trainer] = {}
    yield lambda engine: trainers.setdefault(id(engine), Trainer(engine))
    for trainer in trainers.values():
        trainer.stop()


@pytest.fixture
def fleet_of(trainer_of: Callable[[Engine], Trainer]) -> Iterator[FleetOf]:
    fleets: list[Fleet] = []

    def start(engine: Engine, receivers: int = 2, **settings: float) -> Fleet:
        fleets.append(Fleet(engine, trainer_of(engine), receivers, **settings))
        return fleets[-1]

    yield start
    for fleet in fleets:
        fleet.stop()


def publish(
    fleet: Fleet, version: int, to: list[Replica] | None = None, transfers: int = 1, whole: bool = True
) -> None:
    """Publish it, and see that those that serve hold it, and that no transfer gave anybody anything else.

    ``whole``: every trainer rank went through all weights in each of the transfers, those that failed included.
    """
    before = fleet.publisher.transfers
    fleet.publisher.publish(version)
    assert fleet.publisher.transfers - before == transfers
    expected = make_weights(version)
    holders = fleet.replicas if to is None else to
    for replica in holders:
        assert replica.ask("loaded") == bits(expected)
        assert replica.ask("wrong_tensors") == []
    assert fleet.routed == [replica.replica_rank for replica in holders]
    gone_through = [names for rank in fleet.trainer.ask("consumed_names") for names in rank]
    assert list(expected) in gone_through
    assert not whole or all(names == list(expected) for names in gone_through)


def see_nothing_left_of_rendezvous() -> None:
    """Ray ends an actor a moment after it was told to."""
    until = time.monotonic() + SOON_S
    while ray.util.list_named_actors(all_namespaces=True):
        assert time.monotonic() < until, "an actor by which members met would outlive the run"
        time.sleep(0.05)


@pytest.mark.parametrize("engine", [OURS, RELAYS, GLOO], ids=["nccl", "relays", "recipe_gloo"])
def test_weights_arrive_bit_for_bit_in_one_sync_after_another(fleet_of: FleetOf, engine: Engine) -> None:
    fleet = fleet_of(engine)
    groups = set()
    for version in (1, 2, 3):
        publish(fleet, version)
        for member in (*fleet.trainer.ask("buffers"), *[replica.ask("buffers") for replica in fleet.replicas]):
            assert member == [None, None], "buckets stay on the device between syncs"
        groups.add(fleet.replicas[0].ask("group"))
    assert len(groups) == 1, "a group is kept as long as its members stay"
    see_nothing_left_of_rendezvous()


@ENGINES
def test_replicas_join_and_leave_between_syncs(fleet_of: FleetOf, engine: Engine) -> None:
    fleet = fleet_of(engine)
    publish(fleet, 1)
    fleet.join()
    publish(fleet, 2)
    first, *others = fleet.replicas
    fleet.leave(first)
    publish(fleet, 3, to=others)
    assert first.ask("loaded") == bits(make_weights(2))


@ENGINES
def test_replica_that_died_between_syncs_is_left_out(fleet_of: FleetOf, engine: Engine) -> None:
    fleet = fleet_of(engine, receivers=3)
    publish(fleet, 1)
    first, second, third = fleet.replicas
    ray.kill(second.receiver)
    with pytest.raises(RayActorError):
        while True:
            second.ask("pid")
    publish(fleet, 2, to=[first, third])


@ENGINES
def test_replica_that_dies_in_a_transfer_costs_the_others_no_deadline(fleet_of: FleetOf, engine: Engine) -> None:
    fleet = fleet_of(engine, receivers=3)
    publish(fleet, 1)
    first, second, third = fleet.replicas
    second.ask("meet", "die")
    started = time.monotonic()
    publish(fleet, 2, to=[first, third], transfers=2)
    assert time.monotonic() - started < SOON_S
    fleet.publisher.take_lost()
    publish(fleet, 3, to=[first, third, fleet.join()])


@ENGINES
def test_replica_that_refuses_its_weights_costs_the_others_no_deadline(fleet_of: FleetOf, engine: Engine) -> None:
    fleet = fleet_of(engine)
    first, second = fleet.replicas
    second.ask("meet", "refuse")
    started = time.monotonic()
    publish(fleet, 1, to=[first], transfers=2)
    assert time.monotonic() - started < SOON_S
    publish(fleet, 2)


@ENGINES
def test_trainer_that_fails_once_sends_again_and_the_replicas_know_why(
    fleet_of: FleetOf, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = fleet_of(engine)
    # The one that sends: had each rank a failure of its own, the slower one's would be left for the second attempt.
    ray.get(fleet.trainer.ranks[0].fail_at.remote("layer.3"), timeout=SOON_S)
    started = time.monotonic()
    publish(fleet, 1, transfers=2, whole=False)
    assert time.monotonic() - started < SOON_S
    first_attempt = next(record.getMessage() for record in caplog.records if "attempt 1" in record.getMessage())
    of_replicas = first_attempt.split("replica ")[1:]
    assert len(of_replicas) == 2
    assert all("ValueError: no such shard" in said for said in of_replicas), first_attempt


def test_replica_that_dies_before_it_joins_costs_the_others_the_deadline_of_joining(fleet_of: FleetOf) -> None:
    fleet = fleet_of(replace(OURS, settings=OURS.settings | {"connect_timeout_s": 6.0}))
    first, second = fleet.replicas
    second.ask("meet", "die before joining")
    publish(fleet, 1, to=[first], transfers=2)


@pytest.mark.slow
def test_replica_that_stands_still_costs_the_others_the_deadline_of_a_sync(
    fleet_of: FleetOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(publisher, "PING_S", 2.0)
    fleet = fleet_of(replace(OURS, settings={"timeout_s": 5.0}), timeout_s=8.0)
    first, second = fleet.replicas
    stopped = second.ask("pid")
    second.ask("meet", "stand still")
    try:
        publish(fleet, 1, to=[first], transfers=2)
    finally:
        os.kill(stopped, signal.SIGKILL)
    assert "it was not over within timeout_s=5" in caplog.text


@pytest.mark.parametrize("setting", ["timeout_s", "connect_timeout_s"])
def test_deadline_has_to_be_above_zero(setting: str) -> None:
    OURS.load()
    with pytest.raises(SettingError, match=f"engine_kwargs.nccl.{setting}"):
        CheckpointEngineRegistry.new("nccl", bucket_size=1, **{setting: 0})


def test_verls_own_class_is_given_what_its_manager_gives(fleet_of: FleetOf) -> None:
    """Without `finalize` the group that is to be made again would be there still."""
    fleet = fleet_of(replace(VERLS, settings={"rebuild_group": True, "group_name": "rebuilt"}))
    publish(fleet, 1)
    fleet.join()
    publish(fleet, 2)


@pytest.mark.slow
def test_replica_that_dies_under_verls_own_class_ends_the_run_by_name(
    fleet_of: FleetOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sender waits on the device for ever, so that its process answers nothing."""
    fleet = fleet_of(replace(VERLS, settings={"group_name": "lost"}))
    publish(fleet, 1)
    monkeypatch.setattr(publisher, "PING_S", 3.0)
    fleet.publisher.known.timeout_s = 3.0
    fleet.replicas[1].ask("meet", "die")
    with pytest.raises(PublishFailed, match="could not send version 2: no answer within 6 s"):
        fleet.publisher.publish(2)


def test_what_is_measured_on_accelerators_arrives_bit_for_bit_here() -> None:
    """As tests/gpu does, over gloo."""
    engine = replace(
        engine_for("cpu", accelerators=0), bulk_mebibytes=32, settings=DEADLINES | {"bucket_size": 8 << 20}
    )
    assert broadcast(engine, versions=2)["engine"] == "nccl"

# SPDX-License-Identifier: Apache-2.0
"""Weight syncs over accelerators, as to their order: nobody waits in a circle, whoever comes late, stops or dies.

What runs is real down to Ray's group of NCCL; cuda_order.py stands in for the accelerators, and order_fleet.py says
what does for training and generation.
"""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
from circle_watch import CircleOfWaits, Watch
from cuda_order import AT_ONCE, LATE, MIXED
from device_modules import end_contexts, installed
from order_fleet import DIE, FREEZE, STOP_DEVICE, TRAIN, Fault, Process
from order_fleet import LATE as COMES_LATE
from order_replicas import SOON_S, OrderFleet, Shape, TrainingStands
from order_servers import on_host
from ray.exceptions import ActorDiedError

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.weights import publisher, transfer_group

SCENARIOS, QUICK, QUICK_WAITING = 500, 40, 3
SHORT_S, PING_S = 1.2, 0.6
JOINING = ("prepare", "init_process_group")


@pytest.fixture(scope="module", autouse=True)
def modules() -> Iterator[None]:
    # Engines that failed look for what they have left behind, among all that this process has imported.
    gc.freeze()
    with installed(), on_host():
        yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def short_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (publisher, transfer_group):
        monkeypatch.setattr(module, "PING_S", PING_S)


@contextmanager
def fleet_of(shape: Shape) -> Iterator[OrderFleet]:
    """It is seen to end, with all of its threads."""
    before = set(threading.enumerate())
    fleet = OrderFleet(shape)
    try:
        with Watch(fleet.world).watching():
            yield fleet
            if fleet.world.failure is None:
                fleet.end()
                see_threads_end(before, fleet)
                end_contexts()
    finally:
        fleet.ended.set()
        fleet.world.fail(Ended())
        fleet.training.end(0)


class Ended(Exception):
    """Of the scenario."""


def see_threads_end(before: set[threading.Thread], fleet: OrderFleet) -> None:
    """But those that wait for a member that never joined a group, which stay, as the engine's docstring says."""
    until = time.monotonic() + SOON_S
    while left := [thread.name for thread in set(threading.enumerate()) - before if thread.name != "circle-watch"]:
        if set(left) == {"join-nccl-group"} and fleet.was_lost:
            return
        assert time.monotonic() < until, left
        time.sleep(0.01)


# Relays


def test_relays_beside_training_are_a_circle_that_is_named_within_a_second() -> None:
    with fleet_of(Shape(ranks=2, nodes=1, beside=True, relays=True)) as fleet:
        with pytest.raises(RecipeError, match="a circle of waits"):
            fleet.publish()
        circle = fleet.world.failure
        assert isinstance(circle, CircleOfWaits) and circle.after_s < 1.0
        assert {link.member for link in circle.links} == {"trainer 0", "trainer 1"}
        assert "all-gather" in str(circle) and "of weights" in str(circle)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(ranks=2, nodes=1, beside=True),
        Shape(ranks=2, nodes=1, beside=False, relays=True),
        Shape(ranks=2, nodes=2, beside=True, relays=True),
        Shape(ranks=2, server=2),
        Shape(ranks=2, server=2, beside=False, relays=True, in_turn=True),
    ],
    ids=["without relays", "relays while training stands", "no rank on the sender's node", "server", "server, in turn"],
)
def test_what_is_no_circle_passes(shape: Shape) -> None:
    with fleet_of(shape) as fleet:
        for _ in range(2):
            fleet.publish()
        assert fleet.wrong == [] and fleet.routed == fleet.replicas


def test_ranks_of_a_log_prob_server_that_come_late_to_a_group_are_in_no_circle_with_their_batches() -> None:
    with fleet_of(Shape(ranks=1, server=2, in_turn=True)) as fleet:
        for _ in range(2):
            fleet.servers[0].processes[1].fault = Fault(COMES_LATE, "init_process_group")
            fleet.servers[0].processes[1].passed.clear()
            fleet.publish()
            fleet.trainers[0].engine.reset()  # so that a group is made for the next version too
        assert fleet.servers[0].scored > 0 and fleet.servers[0].wrong == []


# Beside training

OF_A_SYNC = ("prepare", "init_process_group", "send_snapshot", "reset")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_sender_beside_training_waits_for_nothing_that_training_has_queued_nor_the_reverse(ranks: int) -> None:
    with fleet_of(Shape(ranks=ranks)) as fleet:
        for rank in fleet.trainers:
            rank.waits_for_device = False
        for _ in range(2):
            fleet.publish()
        assert fleet.training.steps > 4 * ranks, "nothing was trained beside"
        sender = fleet.processes[0].device.name
        behind = {
            (call, other): count
            for (member, call, other), count in fleet.world.stood_behind.items()
            if member == sender and TRAIN in (call, other) and {call, other} & {*OF_A_SYNC}
        }
        assert behind == {}
        trainers = [process.device.name for process in fleet.processes]
        waits = {
            (member, call, what): count
            for (member, call, what), count in fleet.world.waits.items()
            if member in trainers and call in (*OF_A_SYNC, "finalize") and what.startswith("device")
        }
        assert waits == {}


# Scenarios


@dataclass(frozen=True)
class Scenario:
    shape: Shape
    versions: int
    fault: Fault | None
    at_version: int
    who: int
    """By number among the members, of which the trainer's ranks come first."""

    @property
    def stops(self) -> bool:
        return self.fault is not None and self.fault.kind in (FREEZE, STOP_DEVICE)


def scenario_of(seed: int) -> Scenario:
    draw = random.Random(seed)
    ranks = draw.choice([1, 2, 4])
    beside = draw.random() < 0.6
    shape = Shape(
        ranks=ranks,
        nodes=draw.choice([1, 2]) if ranks > 1 else 1,
        receivers=tuple(draw.choice([1, 1, 2]) for _ in range(draw.randint(1, 3))),
        beside=beside,
        relays=not beside and draw.random() < 0.5,
        at_swap=draw.choice(["keep", "interrupt"]),
        pace=draw.choice([LATE, LATE, MIXED, AT_ONCE]),
        in_turn=draw.random() < 0.3,
        seed=seed,
    )
    versions = draw.choice([1, 1, 2, 3])
    shape = replace(shape, server=draw.choice([0, 0, 1, 2]))
    kind = draw.choice([None, None, COMES_LATE, COMES_LATE, DIE, DIE, DIE, draw.choice([FREEZE, STOP_DEVICE, DIE])])
    who = draw.randrange(ranks + sum(shape.receivers) + shape.server)
    fault, place = None, ""
    if kind is not None:
        own = ["tensor", "tensor", "step"] if who < ranks else ["stage", "tensor", "tensor", "swap"]
        place = draw.choice([*own, *own, *JOINING, "finalize"])
        fault = Fault(kind, place, draw.randint(0, 6) if place in ("tensor", "step") else 0)
    if kind in (FREEZE, STOP_DEVICE) or (kind == DIE and (who < ranks or place in JOINING)):
        # It has to pass: training's collectives with a rank that is lost have none.
        shape = replace(shape, deadline_s=SHORT_S)
    return Scenario(shape, versions, fault, draw.randint(1, versions), who)


def hurt(fleet: OrderFleet, scenario: Scenario) -> Process:
    process = fleet.all_processes[scenario.who]
    process.fault, process.passed = scenario.fault, {}
    fleet.hurt = process
    return process


def play(scenario: Scenario) -> None:
    with fleet_of(scenario.shape) as fleet:
        for version in range(1, scenario.versions + 1):
            if version == scenario.at_version and scenario.fault is not None:
                hurt(fleet, scenario)
            before = set(fleet.routed)
            error: Exception | None = None
            try:
                fleet.publish()
            except (RecipeError, TrainingStands, ActorDiedError, TimeoutError) as found:
                error = found
            assert not isinstance(fleet.world.failure, CircleOfWaits), fleet.world.failure
            see_outcome(fleet, scenario, error, before if version > 1 else set(fleet.replicas))
            if error is not None:
                return
            fleet.publisher.take_lost()


def see_outcome(fleet: OrderFleet, scenario: Scenario, error: Exception | None, before: set[object]) -> None:
    """The books of one version: everybody has it, or somebody was hurt, and whoever is left has one version."""
    assert fleet.wrong == [] and all(server.wrong == [] for server in fleet.servers)
    lost = fleet.was_lost
    if not lost:
        assert error is None and set(fleet.routed) == before, error
    is_trainer = scenario.who < scenario.shape.ranks
    if error is not None:
        assert error.__cause__ is not None or isinstance(error, TrainingStands | ActorDiedError | TimeoutError), error
        assert is_trainer or scenario.stops or len(before) == 1, error
    elif lost and not scenario.stops:
        hurt_ones = {replica for replica in fleet.replicas if fleet.hurt in replica.processes}
        assert set(fleet.routed) >= before - hurt_ones
    expected = fleet.version if error is None else fleet.version - 1
    found = fleet.answers_of_live()
    assert set(found.values()) <= {expected}, (found, expected)
    assert found or error is not None or scenario.stops


def quick_ones() -> set[int]:
    """Of those in which a deadline has to pass, a few."""
    waiting = [seed for seed in range(SCENARIOS) if scenario_of(seed).shape.deadline_s == SHORT_S]
    return {
        *waiting[:QUICK_WAITING],
        *[seed for seed in range(SCENARIOS) if seed not in waiting][: QUICK - QUICK_WAITING],
    }


QUICK_ONES = quick_ones()


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=[] if seed in QUICK_ONES else pytest.mark.slow) for seed in range(SCENARIOS)],
)
def test_nobody_waits_in_a_circle_and_the_books_close(seed: int) -> None:
    play(scenario_of(seed))

# SPDX-License-Identifier: Apache-2.0
"""Something goes wrong at each place of a weight sync, one at a time: what was whole goes on answering, and only that.

sync_faults.py has the processes. The checkpoint engines are ours, through shared memory and through gloo, and verl's
`NCCLCheckpointEngine` with our deadlines, over gloo. After each fault: no answer ever came from a mix of versions, the
version is announced where it is whole and nowhere else, the publisher's record is the truth, the next sync brings
everyone a whole version, and no thread or shared memory is left.

`make test` runs a part in which each fault and each place come up with some engine, the slow tests all of them.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Iterator

import pytest
from engine_fleet import Engine
from nccl_on_cpu import for_a_while
from sync_faults import (
    ASK_EVERY_S,
    BYTE,
    DELAY,
    DIE,
    LONG_S,
    MEMORY,
    SHORT_S,
    STALE,
    STOP,
    Fault,
    FaultyFleet,
    answer_of,
    token_of,
)

from recipe.async_engine.weights import publisher
from recipe.async_engine.weights.publisher import NoReplicaLeft, PublishFailed

GLOO = "recipe.laptop.transfer.gloo_engine"
ENGINES = {
    "shared memory": Engine("recipe_gloo", GLOO),
    "gloo": Engine("recipe_gloo", GLOO, {"shared_memory": False}),
    "nccl": Engine("nccl", "recipe.async_engine.weights.nccl_engine", is_nccl=True),
}
FRAMES = {"shared memory": 4, "gloo": 4, "nccl": 4}
HANDED = 3
LOADS = 2
SOON_S = 20.0

ALWAYS = 99
EMPTY_HANDED = [(DIE, 1), (STOP, 1), (DELAY, 1), (MEMORY, 1), (MEMORY, ALWAYS)]
CARRYING = [*EMPTY_HANDED, (BYTE, 1), (BYTE, ALWAYS), (STALE, 1), (STALE, ALWAYS)]
JOIN = ("prepare", "init_process_group", "half joined", "init_process_group done")
AFTER = ("finalize",)
IN_SWAP = ("pause", "swap", "swapped", "swap done", "resume", "resumed")
IN_ENGINE = ("complete", "completed", *IN_SWAP)

Case = tuple[str, Fault]


def faults_at(places: list[tuple[str, int]], kinds: list[tuple[str, int]]) -> Iterator[Fault]:
    for (place, number), (kind, times) in itertools.product(places, kinds):
        yield Fault(kind, place, number, times)


def cases_of(engine: str) -> list[Case]:
    """All faults with an engine; those behind the receiving engine with one of the three only."""
    frames = [("frame", number) for number in range(FRAMES[engine])]
    steps = [(place, 0) for place in (*JOIN, *AFTER)]
    of_both = [*faults_at(frames, CARRYING), *faults_at(steps, EMPTY_HANDED)]
    cases = [(who, fault) for who in ("sender", "worker") for fault in of_both]
    # What is read of the last frame is the same in each version; the version itself is in the header, which is sent.
    last = ("frame", FRAMES[engine] - 1) if engine != "nccl" else None
    cases = [
        (who, fault)
        for who, fault in cases
        if (who, fault.kind, (fault.place, fault.number)) != ("worker", STALE, last)
    ]
    cases += [("sender", Fault(STALE, "call", 0, times)) for times in (1, ALWAYS)]
    if engine == "shared memory":
        handed = faults_at([("handed", number) for number in range(HANDED)], EMPTY_HANDED)
        cases += [("worker", fault) for fault in handed]
        in_engine = [
            *faults_at([("load", number) for number in range(LOADS)], CARRYING),
            *faults_at([(place, 0) for place in ("begin_staging", *IN_ENGINE)], EMPTY_HANDED),
            *faults_at([("begin_staging", 0)], [(STALE, 1), (STALE, ALWAYS)]),
        ]
        cases += [("server", fault) for fault in in_engine]
    return cases


def name_of(engine: str, who: str, fault: Fault) -> str:
    times = "" if fault.times == 1 else " always"
    return f"{engine}: {fault.kind}{times} at {fault.place} {fault.number} of the {who}"


ALL = [(engine, who, fault) for engine in ENGINES for who, fault in cases_of(engine)]


def deadline_of(fault: Fault) -> float:
    """Short where it has to pass."""
    joins = fault.place in JOIN and fault.kind != DELAY
    return SHORT_S if joins or fault.kind in (DIE, STOP) else LONG_S


def a_part_of_all() -> set[int]:
    """Numbers of cases in which every engine meets every kind of fault, and every place comes up."""
    part, seen = set[int](), set[tuple[str, str] | str]()
    order = list(range(len(ALL)))
    random.Random(3).shuffle(order)
    for number in order:
        engine, who, fault = ALL[number]
        # What has to pass a deadline, or two, costs seconds: once for all.
        waits = fault.kind == STOP or (deadline_of(fault) == SHORT_S and fault.place in JOIN)
        new = {STOP} if waits else {(engine, fault.kind), fault.place}
        if (waits and (who == "sender" or fault.kind != STOP)) or new <= seen:
            continue
        part.add(number)
        seen |= new
    return part


PART = a_part_of_all()


@pytest.fixture(scope="module", autouse=True)
def nccl(cluster: None) -> Iterator[None]:
    ping = publisher.PING_S
    with for_a_while():
        yield
    publisher.PING_S = ping


@pytest.fixture(scope="module")
def fleet_of() -> Iterator[Callable[[str], FaultyFleet]]:
    """The fleet with an engine, at least one version of whose weights has been published."""
    fleets: dict[str, FaultyFleet] = {}

    def of(engine: str) -> FaultyFleet:
        if engine not in fleets:
            fleets[engine] = FaultyFleet(ENGINES[engine])
            publish_in_order(fleets[engine])
        return fleets[engine]

    yield of
    for fleet in fleets.values():
        fleet.stop()


def publish_in_order(fleet: FaultyFleet) -> None:
    """Publish the next version, without a fault: everyone has it."""
    fleet.plant("sender", None, LONG_S)
    before = fleet.publisher.transfers
    error, _ = fleet.publish()
    assert error is None and fleet.publisher.transfers == before + 1, error
    assert fleet.routed == fleet.replicas
    see_record_is_true(fleet)


def see_record_is_true(fleet: FaultyFleet) -> None:
    """Who is routed to has the version that was announced last, whole, and answers with it."""
    assert fleet.publisher.live_replicas == len(fleet.routed)
    for record in fleet.publisher.known.records:
        if not fleet.is_up(record.replica.server):
            continue
        held, is_whole = answer_of(record.replica.server.held.remote())
        answer = answer_of(record.replica.server.ask.remote())
        if record.routed:
            assert is_whole and held == fleet.announced
            assert answer is not None and answer.version == fleet.announced
        if answer is not None:
            assert answer.token == token_of(answer.version)


def see_answers_are_whole(fleet: FaultyFleet, old: int, times: dict[str, float]) -> None:
    """No answer was of a mix; the old version answered during the transfer, and the new one not before it was due."""
    for place, replica in enumerate(fleet.replicas):
        if not fleet.is_up(replica.server):
            continue
        answers = answer_of(replica.server.take_answers.remote())
        for answer in answers:
            assert answer.submitted == answer.version and answer.token == token_of(answer.version), answer
            assert answer.version <= old or answer.at > times.get("announced", float("inf"))
        if place == 0 and times["staged"] - times["began"] > 10 * ASK_EVERY_S:
            meanwhile = [answer for answer in answers if times["began"] < answer.at < times["staged"]]
            assert meanwhile and {answer.version for answer in meanwhile} == {old}


def see_outcome(fleet: FaultyFleet, who: str, fault: Fault, error: BaseException | None, transfers: int) -> None:
    """What must become of a sync with this fault."""
    first = fleet.replicas[:1]
    lasts = fault.times == ALWAYS or fault.kind in (DIE, STOP)
    if fault.kind == DELAY or fault.place in AFTER:
        assert error is None and transfers == 1 and fleet.routed == fleet.replicas
    elif who == "sender" and lasts:
        assert isinstance(error, PublishFailed | NoReplicaLeft), error
        assert fleet.routed == fleet.replicas
    elif who == "sender":
        assert error is None and transfers == 2 and fleet.routed == fleet.replicas
    elif lasts or fault.place in IN_SWAP:
        assert error is None and fleet.routed == first
    else:
        assert error is None and fleet.routed in (first, fleet.replicas)


def see_nothing_left(fleet: FaultyFleet) -> None:
    """Threads that wait for a member that never joined a group of NCCL's stay, as its docstring says.

    They do at all members, from the case that left them there to the fleet's end.
    """
    until = time.monotonic() + SOON_S
    while True:
        left = [answer_of(member.left.remote()) for member in fleet.members]
        threads = [name for of_member in left for name in of_member["threads"] if name != "join-nccl-group"]
        segments = fleet.segments
        living = {str(replica.replica_rank) for replica in fleet.replicas}
        sockets = living & set(os.listdir(fleet.folder.name))
        held = any(of_member["mappings"] > 1 or of_member["buffers"] for of_member in left)
        if not threads and not segments and not sockets and not held:
            return
        assert time.monotonic() < until, (left, segments, sockets)
        time.sleep(0.05)


def play(fleet: FaultyFleet, who: str, fault: Fault) -> None:
    old, before = fleet.announced, fleet.publisher.transfers
    if fault.place == "half joined":
        # A group that is kept is not joined.
        answer_of(fleet.trainer.execute_checkpoint_engine.remote("reset"))
    harmed = fleet.plant(who, fault, deadline_of(fault))
    for replica in fleet.replicas:
        answer_of(replica.server.take_answers.remote())
    error, times = fleet.publish()
    assert (fleet.announced == old) == (error is not None)
    see_outcome(fleet, who, fault, error, fleet.publisher.transfers - before)
    see_record_is_true(fleet)
    # What stood still goes on, into the next sync, and changes nothing there.
    fleet.processes[harmed].go_on()
    see_answers_are_whole(fleet, old, times)
    ended = fleet.replace_trainer() if who == "sender" and fault.kind in (DIE, STOP) else []
    if fault.place in AFTER and fault.kind in (DIE, STOP) and who != "sender":
        fleet.publish()
    ended += fleet.replace_lost()
    publish_in_order(fleet)
    for actor in ended:
        fleet.end(actor)
    if ended:
        # Who had waited for one of these has failed by now, and the next sync gives back what that held.
        publish_in_order(fleet)
    see_nothing_left(fleet)


def test_each_engine_has_as_many_frames_as_are_harmed(fleet_of: Callable[[str], FaultyFleet]) -> None:
    for engine in ENGINES:
        fleet = fleet_of(engine)
        publish_in_order(fleet)
        passed = {}
        for member in (fleet.trainer, fleet.replicas[1].worker, fleet.replicas[1].server):
            passed |= answer_of(member.frames.remote())
        assert (passed["frame"], passed["handed"], passed["load"]) == (FRAMES[engine], HANDED, LOADS)


@pytest.mark.parametrize(
    ("engine", "who", "fault"),
    [
        pytest.param(*case, id=name_of(*case), marks=[] if number in PART else pytest.mark.slow)
        for number, case in enumerate(ALL)
    ],
)
def test_a_fault_costs_no_more_than_its_place(
    fleet_of: Callable[[str], FaultyFleet], engine: str, who: str, fault: Fault
) -> None:
    play(fleet_of(engine), who, fault)

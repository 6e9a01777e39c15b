# SPDX-License-Identifier: Apache-2.0
"""Each rule of the model of order for several devices (nccl_order.py), and what its watch finds (circle_watch.py)."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Any

import pytest
from circle_watch import CONFIRM_S, CircleOfWaits, Watch, stuck_nodes
from cuda_order import BLOCKING, NON_BLOCKING, Device, Op, Stream, Wait, World
from hypothesis import given
from hypothesis import strategies as st
from nccl_order import Communicator, MisuseError, UniqueId
from order_machine import SOON_S, Machine, Threads, group_of, pair, stands_still


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def threads() -> Threads:
    return Threads()


# Collectives


def test_communicator_is_there_when_all_have_come(threads: Threads) -> None:
    world, unique = World(), UniqueId("group")
    first = threads.start(partial(Communicator, Device(world, "rank 0"), unique, 2, 0))
    assert stands_still(first)
    threads.start(partial(Communicator, Device(world, "rank 1"), unique, 2, 1))
    threads.join()
    assert threads.errors == []


def test_collective_holds_its_stream_until_all_members_have_launched_it(threads: Threads) -> None:
    devices, [group] = pair(World(), "group")
    group[0].launch(devices[0].default, ("all-reduce",))
    host = threads.start(devices[0].synchronize)
    assert stands_still(host)
    group[1].launch(devices[1].default, ("all-reduce",))
    threads.join()


def test_collective_waits_until_all_members_have_come_to_it(threads: Threads) -> None:
    devices, [group] = pair(World(), "group")
    done: list[str] = []
    devices[1].default.work("before", lambda: done.append("before"))
    for rank, device in enumerate(devices):
        group[rank].launch(device.default, ("all-reduce",), lambda memory: done.extend(memory.values()), f"of {rank}")
    devices[0].synchronize()
    assert done == ["before", "of 0", "of 1"]


def test_collectives_belong_together_by_their_order_and_must_match() -> None:
    devices, [group] = pair(World(), "group")
    group[0].launch(devices[0].default, ("broadcast", 4))
    with pytest.raises(MisuseError, match=r"rank 1 of broadcast 0 of group: \('all-reduce', 4\)"):
        group[1].launch(devices[1].default, ("all-reduce", 4))


def test_collectives_of_one_communicator_follow_each_other_on_whatever_streams() -> None:
    devices, [group] = pair(World(), "group")
    done: list[str] = []
    for rank, device in enumerate(devices):
        streams = [Stream(device, NON_BLOCKING) for _ in range(2)]
        for stream, name in zip(streams, "ab", strict=True):
            group[rank].launch(stream, (name,), lambda _, name=name: done.append(name))
    devices[0].streams[-1].synchronize()
    assert done == ["a", "b"]


def run_in_opposite_order(world: World, threads: Threads) -> None:
    """Two ranks launch collectives of two communicators, each on a stream of its own, in opposite orders."""
    devices, groups = pair(world, "a", "b")

    def host(rank: int) -> None:
        with world.call(devices[rank], "train"):
            order = groups if rank == 0 else groups[::-1]
            for group in order:
                group[rank].launch(Stream(devices[rank], NON_BLOCKING), ("all-reduce",))
            devices[rank].synchronize()

    with Watch(world).watching():
        for rank in range(2):
            threads.start(partial(host, rank))
        threads.join()


def test_two_communicators_in_opposite_order_pass_where_a_device_has_room_for_both(threads: Threads) -> None:
    run_in_opposite_order(World(), threads)
    assert threads.errors == []


def test_two_communicators_in_opposite_order_are_a_circle_where_a_device_takes_them_in_turn(threads: Threads) -> None:
    run_in_opposite_order(World(in_turn=True), threads)
    assert [type(error) for error in threads.errors] == [CircleOfWaits] * 2


def test_abort_ends_what_waits_without_its_effect_and_the_others_wait_on(threads: Threads) -> None:
    devices, [group] = pair(World(), "group")
    done: list[Any] = []
    group[0].launch(devices[0].default, ("all-reduce",), done.append)
    first = threads.start(devices[0].synchronize)
    assert stands_still(first) and group[0].waits
    group[0].abort()
    first.join(SOON_S)
    assert not first.is_alive() and not group[0].waits
    group[1].launch(devices[1].default, ("all-reduce",), done.append)
    second = threads.start(devices[1].synchronize)
    assert stands_still(second)
    group[1].abort()
    threads.join()
    assert done == []
    with pytest.raises(RuntimeError, match="invalid argument"):
        group[0].launch(devices[0].default, ("all-reduce",))


@pytest.mark.parametrize("state", ["stopped", "gone"])
def test_member_that_stopped_or_died_holds_the_others_until_they_abort(threads: Threads, state: str) -> None:
    world = World()
    devices, [group] = pair(world, "group")
    for rank, device in enumerate(devices):
        group[rank].launch(device.default, ("all-reduce",))
    devices[1].set(**{state: True})
    with Watch(world).watching():
        host = threads.start(devices[0].synchronize)
        host.join(0.5)
        assert host.is_alive(), "a fault is no circle of waits"
        group[0].abort()
        threads.join()
    assert threads.errors == []


# The watch


class Relay:
    """A rank whose training stands behind a broadcast that rank 0 launches when its own training has gone on."""

    def __init__(self, threads: Threads) -> None:
        self.world = World()
        self.devices, (self.weights, self.training) = pair(self.world, "weights", "training")
        self.streams = [Stream(device, BLOCKING) for device in self.devices]
        self.threads = threads

    def relay(self) -> None:
        with self.world.call(self.devices[1], "relay"):
            self.weights[1].launch(self.streams[1], ("broadcast",))
        with self.world.call(self.devices[1], "train"):
            self.training[1].launch(self.devices[1].default, ("all-gather",))
            self.devices[1].synchronize()

    def send(self, beside: Callable[[], None] = lambda: None) -> None:
        with self.world.call(self.devices[0], "send"):
            context = copy_context()
            self.threads.start(lambda: context.run(beside))
            self.training[0].launch(self.devices[0].default, ("all-gather",))
            self.devices[0].synchronize()
            self.weights[0].launch(self.streams[0], ("broadcast",))

    def stands_still(self) -> bool:
        """For long enough to see a circle, if there is one."""
        time.sleep(3 * CONFIRM_S)
        return self.world.failure is None


def test_circle_through_hosts_streams_and_collectives_is_named_within_a_second(threads: Threads) -> None:
    machine = Relay(threads)
    with Watch(machine.world).watching():
        for host in (machine.relay, machine.send):
            threads.start(host)
        threads.join()
    circle = machine.world.failure
    assert isinstance(circle, CircleOfWaits) and threads.errors == [circle] * 2 and circle.after_s < 1.0
    named = {(link.member, link.where) for link in circle.links}
    assert named == {("rank 0", "send"), ("rank 0", "legacy default stream"), *RELAY_STREAMS}
    assert "rank 1, blocking stream 1, waits for rank 0 to launch broadcast 0 of weights" in str(circle)


RELAY_STREAMS = {("rank 1", "legacy default stream"), ("rank 1", "blocking stream 1")}


@pytest.mark.parametrize("fault", ["a member has left", "a member has died"])
def test_what_waits_for_a_fault_to_be_noticed_is_no_circle(threads: Threads, fault: str) -> None:
    machine = Relay(threads)
    machine.devices[1].default.work("before")
    if fault == "a member has left":
        machine.weights[0].abort()
    with Watch(machine.world).watching():
        for host in (machine.relay, machine.send):
            threads.start(host)
        if fault == "a member has died":
            machine.devices[0].set(gone=True)
        assert machine.stands_still()
        for communicator in (machine.weights[1], *machine.training):
            communicator.abort()
        threads.join()


def test_call_that_has_another_thread_at_work_is_in_no_circle(threads: Threads) -> None:
    machine = Relay(threads)
    other = Device(machine.world, "rank 2")
    other.default.work("long")
    other.set(stopped=True)
    with Watch(machine.world).watching():
        threads.start(machine.relay)
        threads.start(partial(machine.send, other.synchronize))
        assert machine.stands_still()
        other.set(stopped=False)
        threads.join()
    assert isinstance(machine.world.failure, CircleOfWaits)


def test_host_that_may_still_launch_is_no_circle(threads: Threads) -> None:
    world = World()
    devices, [group] = pair(world, "group")
    with Watch(world).watching(), world.call(devices[1], "train"):
        group[0].launch(devices[0].default, ("all-reduce",))

        def wait() -> None:
            with world.call(devices[0], "train"):
                devices[0].synchronize()

        host = threads.start(wait)
        host.join(0.5)
        assert host.is_alive()
        group[1].launch(devices[1].default, ("all-reduce",))
        threads.join()
    assert threads.errors == []


def test_work_that_stood_behind_another_calls_is_counted(machine: Machine) -> None:
    with machine.world.call(machine.device, "train"):
        machine.work(machine.default, "compute")
    with machine.world.call(machine.device, "send"):
        machine.work(machine.free, "copy")
        machine.free.synchronize()
        assert not machine.world.stood_behind
        machine.work(machine.blocking, "broadcast")
        assert machine.world.stood_behind["rank 0", "send", "train"] == 1
        machine.device.synchronize()
    assert machine.world.stood_behind["rank 0", "send", "train"] == 2
    assert machine.world.waits == {("rank 0", "send", "stream"): 1, ("rank 0", "send", "device"): 1}


@given(
    programs=st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=8), min_size=2, max_size=3),
    in_turn=st.booleans(),
)
def test_watch_finds_what_can_never_go_on_and_nothing_else(
    programs: list[list[tuple[int, int]]], in_turn: bool
) -> None:
    """Ranks launch collectives of three communicators on streams, each in its own order, and wait for their device."""
    counts = [[[group for group, _ in program].count(group) for group in range(3)] for program in programs]
    whole = [min(of_group) for of_group in zip(*counts, strict=True)]
    world = World(in_turn=in_turn)
    devices = [Device(world, f"rank {rank}") for rank in range(len(programs))]
    groups = [group_of(devices, f"group {number}") for number in range(3)]
    for rank, (device, program) in enumerate(zip(devices, programs, strict=True)):
        streams = [device.default, Stream(device, BLOCKING), Stream(device, NON_BLOCKING), Stream(device, NON_BLOCKING)]
        left = list(whole)
        for group, place in program:
            if left[group]:
                left[group] -= 1
                groups[group][rank].launch(streams[place], ("all-reduce",))
    ops = [op for device in devices for stream in device.streams for op in all_before(stream.last)]
    for device in devices:
        with world.call(device, "train") as call:
            pass
        world.calls.append(call)
        call.waits.append(Wait(call, "device", device.undone()))
    found = {node for node in stuck_nodes(world) if isinstance(node, Op)}
    assert found == set(never_done(ops))


def all_before(op: Op | None) -> list[Op]:
    found, todo = dict[Op, None](), [op] if op is not None else []
    while todo:
        if (last := todo.pop()) not in found:
            found[last] = None
            todo += last.needs
    return list(found)


def never_done(ops: list[Op]) -> list[Op]:
    """By doing whatever can be done, until nothing can."""
    left = dict.fromkeys(ops)
    while True:
        ready = [
            op
            for op in left
            if op.meeting is not None
            and not any(need in left for other in op.meeting.ops.values() for need in other.needs)
        ]
        if not ready:
            return list(left)
        for op in ready:
            del left[op]

# SPDX-License-Identifier: Apache-2.0
"""Each rule of the model of order for one device and its host (cuda_order.py)."""

from __future__ import annotations

from functools import partial

import pytest
from cuda_order import AT_ONCE, MIXED, Device, Event, Gone, World
from hypothesis import given
from hypothesis import strategies as st
from order_machine import Machine, Threads, pair, stands_still


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def threads() -> Threads:
    return Threads()


# Streams


def test_launch_returns_before_the_work_is_done(machine: Machine) -> None:
    machine.work(machine.default, "a")
    assert machine.done == []
    machine.device.synchronize()
    assert machine.done == ["a"]


@pytest.mark.parametrize("pace", [AT_ONCE, MIXED])
def test_another_pace_does_work_sooner_and_in_no_other_order(pace: str) -> None:
    machine = Machine(pace=pace)
    for number in range(20):
        machine.work(machine.free, str(number))
    assert machine.done == [str(number) for number in range(len(machine.done))] and machine.done


def test_stream_works_in_the_order_of_its_launches(machine: Machine) -> None:
    for name in "abc":
        machine.work(machine.free, name)
    machine.free.synchronize()
    assert machine.done == ["a", "b", "c"]


def test_streams_are_in_no_order(machine: Machine) -> None:
    for stream, name in ((machine.free, "a"), (machine.blocking, "b"), (machine.other_free, "c")):
        machine.work(stream, name)
    machine.other_free.synchronize()
    machine.blocking.synchronize()
    assert machine.done == ["c", "b"]


def test_blocking_streams_are_in_no_order_with_each_other(machine: Machine) -> None:
    machine.work(machine.blocking, "a")
    machine.work(machine.other_blocking, "b")
    machine.other_blocking.synchronize()
    assert machine.done == ["b"]


def test_legacy_default_stream_waits_for_blocking_streams(machine: Machine) -> None:
    machine.work(machine.blocking, "a")
    machine.work(machine.default, "b")
    machine.default.synchronize()
    assert machine.done == ["a", "b"]


def test_blocking_streams_wait_for_the_legacy_default_stream(machine: Machine) -> None:
    machine.work(machine.default, "a")
    machine.work(machine.blocking, "b")
    machine.blocking.synchronize()
    assert machine.done == ["a", "b"]


def test_legacy_default_stream_and_non_blocking_streams_do_not_wait_for_each_other(machine: Machine) -> None:
    machine.work(machine.free, "a")
    machine.work(machine.default, "b")
    machine.work(machine.free, "c")
    machine.default.synchronize()
    assert machine.done == ["b"]
    machine.work(machine.default, "d")
    machine.free.synchronize()
    assert machine.done == ["b", "a", "c"]


def test_legacy_default_stream_of_one_process_says_nothing_to_another_process(machine: Machine) -> None:
    other = Device(machine.world, "rank 1")
    machine.work(machine.blocking, "a")
    machine.work(other.default, "b")
    other.synchronize()
    assert machine.done == ["b"]


# Events


def test_stream_waits_for_what_the_event_has_captured_and_no_more(machine: Machine) -> None:
    event = Event(machine.device)
    machine.work(machine.free, "a")
    event.record(machine.free)
    machine.work(machine.free, "b")
    machine.other_free.wait_event(event)
    machine.work(machine.other_free, "c")
    machine.other_free.synchronize()
    assert machine.done == ["a", "c"]


def test_event_that_is_recorded_again_changes_no_wait_before(machine: Machine) -> None:
    event = Event(machine.device)
    event.record(machine.free)
    machine.other_free.wait_event(event)
    machine.work(machine.free, "a")
    event.record(machine.free)
    machine.work(machine.other_free, "b")
    machine.other_free.synchronize()
    assert machine.done == ["b"]
    event.synchronize()
    assert machine.done == ["b", "a"]


def test_work_launched_before_a_wait_does_not_wait(machine: Machine) -> None:
    event = Event(machine.device)
    machine.work(machine.other_free, "a")
    event.record(machine.other_free)
    early = machine.work(machine.free, "b")
    machine.free.wait_event(event)
    machine.world.wait(machine.device, [early], "b")
    assert machine.done == ["b"]
    machine.free.synchronize()
    assert machine.done == ["b", "a"], "a stream that waits for an event is not at its end before"


def test_wait_of_the_legacy_default_stream_holds_blocking_streams(machine: Machine) -> None:
    event = Event(machine.device)
    machine.work(machine.free, "a")
    event.record(machine.free)
    machine.default.wait_event(event)
    machine.work(machine.blocking, "b")
    machine.blocking.synchronize()
    assert machine.done == ["a", "b"]


def test_event_that_was_never_recorded_is_waited_for_by_nobody(machine: Machine) -> None:
    event = Event(machine.device)
    machine.free.wait_event(event)
    event.synchronize()
    assert event.query()


def test_host_that_waits_for_an_event_waits_for_nothing_after_it(machine: Machine) -> None:
    event = Event(machine.device)
    machine.work(machine.free, "a")
    event.record(machine.free)
    machine.work(machine.free, "b")
    event.synchronize()
    assert machine.done == ["a"]


def test_who_asks_an_event_does_not_wait_and_gets_a_yes_in_the_end(machine: Machine) -> None:
    event = Event(machine.device)
    machine.work(machine.free, "a")
    event.record(machine.free)
    assert not event.query()
    assert event.query() and machine.free.query() and machine.done == ["a"]


# Hosts


def test_host_that_waits_for_a_stream_waits_for_no_other(machine: Machine) -> None:
    machine.work(machine.free, "a")
    machine.work(machine.other_free, "b")
    machine.other_free.synchronize()
    assert machine.done == ["b"]


def test_host_that_waits_for_the_device_waits_for_all_streams(machine: Machine) -> None:
    machine.work(machine.free, "a")
    machine.work(machine.blocking, "b")
    machine.device.synchronize()
    assert sorted(machine.done) == ["a", "b"]


def test_giving_memory_back_waits_for_all_streams(machine: Machine) -> None:
    machine.work(machine.free, "a")
    machine.device.free()
    assert machine.done == ["a"]


@pytest.mark.parametrize(
    ("pageable", "non_blocking", "returns_at_once"),
    [(False, True, True), (False, False, False), (True, True, False), (True, False, False)],
)
def test_only_a_pinned_copy_that_need_not_block_returns_at_once(
    machine: Machine, pageable: bool, non_blocking: bool, returns_at_once: bool
) -> None:
    machine.work(machine.free, "before")
    machine.free.copy("copy", lambda: machine.done.append("copy"), pageable, non_blocking)
    assert machine.done == ([] if returns_at_once else ["before", "copy"])


def test_device_that_stands_still_holds_its_host_and_goes_on(machine: Machine, threads: Threads) -> None:
    machine.work(machine.free, "a")
    machine.device.set(stopped=True)
    host = threads.start(machine.device.synchronize)
    assert stands_still(host) and machine.done == []
    machine.device.set(stopped=False)
    threads.join()
    assert machine.done == ["a"]


def test_process_that_stands_still_asks_for_nothing_while_its_device_goes_on(threads: Threads) -> None:
    devices, [group] = pair(World(), "group")
    group[0].launch(devices[0].default, ("all-reduce",))
    devices[0].set(frozen=True)
    host = threads.start(partial(devices[0].default.work, "a"))
    assert stands_still(host)
    group[1].launch(devices[1].default, ("all-reduce",))
    devices[1].synchronize()
    devices[0].set(frozen=False)
    threads.join()


def test_threads_of_a_process_that_died_end(machine: Machine, threads: Threads) -> None:
    machine.work(machine.free, "a")
    machine.device.set(stopped=True)
    threads.start(machine.device.synchronize)
    machine.device.set(gone=True)
    threads.join()
    assert [type(error) for error in threads.errors] == [Gone] and machine.done == []


# All programs

Step = tuple[str, int, int]
STEPS = st.lists(st.tuples(st.sampled_from(["work", "record", "wait"]), st.integers(0, 4), st.integers(0, 1)))


@given(steps=STEPS, waits=st.permutations(range(5)), seed=st.integers(0, 99))
def test_whatever_is_launched_is_done_in_an_order_that_the_rules_allow(
    steps: list[Step], waits: list[int], seed: int
) -> None:
    machine = Machine(pace=MIXED, seed=seed)
    device, events = machine.device, [Event(machine.device) for _ in range(2)]
    before = dict[str, set[str]]()
    launched = dict[int, list[str]]()
    captured, due = dict[int, set[str]](), dict[int, set[str]]()
    for number, (what, place, event) in enumerate(steps):
        stream, name = device.streams[place], f"{number}"
        if what == "record":
            events[event].record(stream)
            captured[event] = set(launched.get(place, [])) | due.get(place, set()) | synchronised(launched, place, due)
        elif what == "wait":
            stream.wait_event(events[event])
            due[place] = due.get(place, set()) | captured.get(event, set())
        else:
            machine.work(stream, name)
            before[name] = set(launched.get(place, [])) | due.get(place, set()) | synchronised(launched, place, due)
            launched.setdefault(place, []).append(name)
    for place in waits:
        device.streams[place].synchronize()
        assert set(launched.get(place, [])) <= set(machine.done)
    for name, needed in before.items():
        assert needed <= set(machine.done[: machine.done.index(name)])


def synchronised(launched: dict[int, list[str]], place: int, due: dict[int, set[str]]) -> set[str]:
    """What the legacy default stream, the first, and the blocking ones, the next two, have of each other."""
    others = {0: [1, 2], 1: [0], 2: [0]}.get(place, [])
    found = {name for other in others for name in launched.get(other, [])}
    return found | (due.get(0, set()) if place in (1, 2) else set())

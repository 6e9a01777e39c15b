# SPDX-License-Identifier: Apache-2.0
"""The checkpoint engine `recipe_gloo` between real processes on loopback: what arrives, what is kept, what fails when.

Every test of a fleet runs twice: with buckets in shared memory, and with buckets sent through gloo.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from gloo_fleet import BUCKET_BYTES, Fleet, Member, can_contain, check_received, make_weights

from recipe.async_engine.core.errors import SettingError
from recipe.laptop.transfer.gloo_engine import GlooCheckpointEngine

# Longer than `Member.outcome` waits: who waits for this deadline has not noticed a closed connection.
NEVER_S = 600.0


@pytest.fixture(params=["shared_memory", "gloo"])
def fleet(request: pytest.FixtureRequest) -> Iterator[Any]:
    started: list[Fleet] = []

    def start(receivers: int, actors: int = 1, **settings: Any) -> Fleet:
        shared = request.param == "shared_memory"
        started.append(Fleet(receivers, actors, shared_memory=shared, **settings))
        return started[-1]

    yield start
    for one in started:
        one.stop()


def test_every_tensor_arrives_bit_for_bit_at_every_receiver(fleet: Any) -> None:
    members = fleet(receivers=2)
    members.connect()
    (metrics,) = members.sync(seed=1, version=1)
    sent = sum(tensor.nbytes for tensor in make_weights(1).values())
    assert metrics["weight_sync/bytes"] == sent
    assert metrics["weight_sync/tensors"] == len(make_weights(1))
    assert metrics["weight_sync/seconds"] > 0
    assert metrics["weight_sync/gb_per_s"] == pytest.approx(sent / 1e9 / metrics["weight_sync/seconds"])


def test_group_is_kept_between_syncs_and_the_manager_need_not_ask_again(fleet: Any) -> None:
    members = fleet(receivers=2)
    first = members.connect()
    members.sync(seed=1, version=1)
    second = members.connect()
    members.sync(seed=2, version=2)
    assert len(set(first)) == 1
    assert second == first
    members.sync(seed=3, version=3)


def test_members_that_see_different_hosts_do_not_share_memory() -> None:
    metadata = [
        {"group": None, "domain": domain, "endpoint": ["127.0.0.1", 1], "segments": "/proc/1/fd/1"}
        for domain in ("host a", "host b")
    ]
    apart, _ = GlooCheckpointEngine.build_topology(1, 1, metadata)
    metadata[1]["domain"] = "host a"
    together, _ = GlooCheckpointEngine.build_topology(1, 1, metadata)
    assert apart["segments"] == [None]
    assert together["segments"] == ["/proc/1/fd/1"]


@pytest.mark.skipif(not can_contain(), reason="this user may make no process namespaces")
def test_what_is_in_another_container_of_the_same_host_gets_its_weights_through_gloo() -> None:
    """Its boot and its user are those of the others, but it could not open their memory."""
    fleet = Fleet(receivers=1)
    try:
        fleet.connect()
        fleet.sync(seed=1)
        assert [member.call("shares_memory") for member in (fleet.sender, *fleet.receivers)] == [True, True]
        fleet.receivers.append(Member(contained=True))
        fleet.connect()
        fleet.sync(seed=2)
        assert not any(receiver.call("shares_memory") for receiver in fleet.receivers)
        fleet.receivers.pop().stop()
        fleet.connect()
        fleet.sync(seed=3)
        assert fleet.receivers[0].call("shares_memory")
    finally:
        fleet.stop()


def test_change_of_members_makes_a_fresh_group(fleet: Any) -> None:
    members = fleet(receivers=2)
    first = members.connect()
    members.sync(seed=1)
    left = members.receivers.pop()
    second = members.connect()
    members.sync(seed=2)
    members.receivers.append(left)
    third = members.connect()
    members.sync(seed=3)
    assert len({first[0], second[0], third[0]}) == 3


def test_trainer_ranks_outside_the_group_still_go_through_their_weights(fleet: Any) -> None:
    members = fleet(receivers=1, actors=2)
    members.connect()
    metrics, seen = members.sync(seed=4, version=4)
    assert metrics["weight_sync/tensors"] == len(make_weights(4))
    assert seen == list(make_weights(4))


def test_killed_receiver_fails_the_sender_at_once_and_a_fresh_group_works(fleet: Any) -> None:
    members = fleet(receivers=2, timeout_s=NEVER_S)
    members.connect()
    members.receivers[1].start("receive", version=1, die_after=1)
    members.receivers[0].start("receive", version=1)
    members.sender.start("send", seed=1, version=1, fail_at=None, outside=False)
    sent, error = members.sender.outcome()
    received, receiver_error = members.receivers[0].outcome()
    assert not sent and "WeightStreamError" in error
    assert not received and "WeightStreamError" in receiver_error and "version 1" in receiver_error
    # The other trainer ranks gather each weight together with this one, so it must not stop half-way.
    assert members.sender.call("consumed_names") == list(make_weights(1))
    members.receivers.pop().stop()
    members.receivers.append(Member(**members.settings))
    members.connect()
    members.sync(seed=2, version=2)


def test_receiver_killed_while_the_others_work_on_a_frame_fails_them_at_once(fleet: Any) -> None:
    members = fleet(receivers=2, timeout_s=NEVER_S)
    members.connect()
    members.receivers[0].start("receive", version=1, pause_s=1.5)
    members.receivers[1].start("receive", version=1, pause_s=20.0)
    members.sender.start("send", seed=1, version=1, fail_at=None, outside=False)
    time.sleep(0.7)
    os.kill(members.receivers[1].process.pid, signal.SIGKILL)
    outcomes = [members.receivers[0].outcome(), members.sender.outcome()]
    assert all(not good and "WeightStreamError" in error for good, error in outcomes)


def test_stalled_receiver_costs_the_sender_no_more_than_its_deadline(fleet: Any) -> None:
    members = fleet(receivers=1, timeout_s=3.0)
    members.connect()
    members.sync(seed=1, version=1)
    # A stopped process keeps its connections open: only the deadline ends the wait for it.
    os.kill(members.receivers[0].process.pid, signal.SIGSTOP)
    started = time.monotonic()
    members.sender.start("send", seed=2, version=2, fail_at=None, outside=False)
    good, answer = members.sender.outcome()
    assert not good and "WeightStreamError" in answer and "version 2" in answer
    assert time.monotonic() - started > 2.5
    os.kill(members.receivers[0].process.pid, signal.SIGCONT)
    members.connect()
    members.sync(seed=5, version=5)


def test_sender_returns_only_after_the_slowest_receiver(fleet: Any) -> None:
    members = fleet(receivers=2)
    members.connect()
    members.start_sync(seed=1, version=1, pause_s=1.0)
    started = time.monotonic()
    good, answer = members.sender.outcome()
    assert good, answer
    assert time.monotonic() - started > 0.8
    for receiver in members.receivers:
        check_received(receiver.outcome()[1], seed=1)


def test_receiver_without_a_sender_fails_at_its_deadline(fleet: Any) -> None:
    members = fleet(receivers=1, timeout_s=1.0)
    members.connect()
    started = time.monotonic()
    members.receivers[0].start("receive", version=1)
    good, answer = members.receivers[0].outcome()
    assert not good and "version 1" in answer
    assert time.monotonic() - started > 0.9
    assert members.receivers[0].call("topology_epoch") is None
    members.connect()
    members.sync(seed=1, version=1)


def test_event_loop_runs_while_a_receiver_waits(fleet: Any) -> None:
    members = fleet(receivers=1)
    members.connect()
    members.receivers[0].start("receive", version=1)
    time.sleep(0.5)  # the receiver waits for a sender that is late
    members.sender.start("send", seed=1, version=1, fail_at=None, outside=False)
    assert members.sender.outcome()[0]
    good, answer = members.receivers[0].outcome()
    assert good and answer["ticks"] > 20


def test_wrong_version_is_refused_by_name_and_both_sides_start_over(fleet: Any) -> None:
    members = fleet(receivers=1)
    members.connect()
    members.receivers[0].start("receive", version=8)
    members.sender.start("send", seed=1, version=7, fail_at=None, outside=False)
    received, error = members.receivers[0].outcome()
    sent, _ = members.sender.outcome()
    assert not received and "sends version 7" in error and "take version 8" in error
    assert not sent
    members.connect()
    members.sync(seed=2, version=8)


def test_failure_of_the_senders_weights_is_told_to_the_receivers(fleet: Any) -> None:
    members = fleet(receivers=2)
    members.connect()
    members.start_sync(seed=1, version=1, fail_at=6)
    sent, error = members.sender.outcome()
    assert not sent and error == "ValueError: no such shard"
    for receiver in members.receivers:
        good, answer = receiver.outcome()
        assert not good and "no such shard" in answer and "version 1" in answer
    members.connect()
    members.sync(seed=2, version=2)


def test_consumer_that_stops_early_fails_the_sender_and_a_fresh_group_works(fleet: Any) -> None:
    members = fleet(receivers=1)
    members.connect()
    members.start_sync(seed=1, version=1, stop_after=1)
    good, _ = members.receivers[0].outcome()
    sent, error = members.sender.outcome()
    assert good and not sent and "WeightStreamError" in error
    members.connect()
    members.sync(seed=2, version=2)


def test_missing_member_fails_the_others_within_the_connect_timeout(fleet: Any) -> None:
    members = fleet(receivers=2, connect_timeout_s=1.0)
    metadata = [member.call("prepare") for member in [members.sender, *members.receivers]]
    sender_kwargs, _ = GlooCheckpointEngine.build_topology(1, 2, metadata)
    members.sender.start("init_process_group", **{name: values[0] for name, values in sender_kwargs.items()})
    good, answer = members.sender.outcome()
    assert not good and "connect_timeout_s=1" in answer
    members.connect()
    members.sync(seed=1)


def test_members_listen_on_their_own_address_only(fleet: Any) -> None:
    members = fleet(receivers=1)
    members.connect()
    members.sync(seed=1)
    for member in (members.sender, members.receivers[0]):
        connections = psutil.Process(member.process.pid).net_connections(kind="inet")
        listening = [one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN]
        assert listening and set(listening) == {"127.0.0.1"}


@pytest.mark.parametrize("settings", [{"timeout_s": 0}, {"connect_timeout_s": -1}])
def test_deadlines_must_be_positive(settings: dict[str, float]) -> None:
    with pytest.raises(SettingError, match=next(iter(settings))):
        GlooCheckpointEngine(BUCKET_BYTES, **settings)

# SPDX-License-Identifier: Apache-2.0
"""The publisher of hybrid replicas: what happens between two turns, or when they are lent, and in which order."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from remote_fakes import Handle
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from recipe.async_engine.actors.replacement import Replacements, Restarts
from recipe.async_engine.config.sections import Weights
from recipe.async_engine.core.errors import EngineDied
from recipe.async_engine.weights.hybrid_publisher import CannotRestart, HybridPublisher
from recipe.async_engine.weights.publisher import NoReplicaLeft, PublishFailed, StagedVersion
from recipe.async_engine.weights.transfer_group import ChecksumMismatch


class Engine:
    """A replica on the trainer's accelerators."""

    def __init__(self, rank: int, journal: list[Any]) -> None:
        self.replica_rank = rank
        self.server_address = f"server-{rank}"
        self.server_handle = Handle(self)
        self.workers: list[Any] = []
        self.servers = [Handle(self)]
        self.journal = journal
        self.alive = True

    async def _do(self, what: str) -> None:
        if not self.alive:
            raise ActorDiedError()
        self.journal.append((what, self.replica_rank))

    def check_engine(self) -> None:
        if not self.alive:
            raise EngineDied("the engine died")

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        await self._do("refuse" if reject_request else "hold")

    async def sleep(self) -> None:
        await self._do("sleep")

    async def resume_generation(self) -> None:
        await self._do("open")

    def give_back_waiting(self) -> None:
        self.journal.append(("spread", self.replica_rank))

    def leave_routing(self) -> None:
        self.journal.append(("leave", self.replica_rank))


class Ranks:
    """The trainer's worker group: each rank loads the engine beside it."""

    def __init__(self, journal: list[Any]) -> None:
        self.journal = journal
        self.error: BaseException | None = None
        self.checksums = ["the same", "the same"]

    def update_weights(self, global_steps: int, mode: str) -> list[Any]:
        async def load(rank: int) -> str:
            if self.error is not None and rank == 1:
                raise self.error
            self.journal.append((f"load {global_steps} {mode}", rank))
            return self.checksums[rank]

        return [load(rank) for rank in range(2)]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the replicas whose servers were ended by force."""
    numbers: list[int] = []
    monkeypatch.setattr(
        "recipe.async_engine.weights.hybrid_publisher.end_servers",
        lambda replica, timeout_s: numbers.append(replica.replica_rank),
    )
    return numbers


class Turn:
    def __init__(self) -> None:
        self.journal: list[Any] = []
        self.engines = [Engine(rank, self.journal) for rank in range(2)]
        self.ranks = Ranks(self.journal)
        self.balancer = GlobalRequestLoadBalancer({})
        config = SimpleNamespace(backend="naive", custom_backend_module=None)
        self.publisher = HybridPublisher(config, self.ranks, self.engines, Handle(self.balancer), 5.0, Weights())

    @property
    def woken(self) -> bool:
        return ("open", 0) in self.journal

    @property
    def routed(self) -> list[str]:
        return sorted(self.balancer.get_all_servers())


def test_engines_generate_when_every_rank_has_handed_over_the_version() -> None:
    turn = Turn()
    turn.publisher.wake(3)
    events = [event for event, _ in turn.journal]
    assert events == ["load 3 naive", "load 3 naive", "open", "open"]
    assert turn.routed == ["server-0", "server-1"]


def test_a_turn_ends_with_refusals_before_the_engines_give_up_their_memory() -> None:
    turn = Turn()
    turn.publisher.wake(0)
    turn.journal.clear()
    assert turn.publisher.sleep() >= 0
    assert [event for event, _ in turn.journal] == ["refuse", "refuse", "sleep", "sleep"]
    # They stay in routing: a request that comes now is refused and waits for its turn.
    assert turn.routed == ["server-0", "server-1"]


def test_a_dead_engine_leaves_routing_and_the_last_one_ends_the_run() -> None:
    turn = Turn()
    turn.publisher.wake(0)
    turn.engines[0].alive = False
    turn.publisher.find_dead()
    assert turn.routed == ["server-1"] and turn.publisher.live_replicas == 1
    turn.engines[1].alive = False
    with pytest.raises(NoReplicaLeft, match="no rollout replica is alive"):
        turn.publisher.resume(StagedVersion(1))


def test_a_rank_that_cannot_load_its_engine_ends_the_run_with_the_cause() -> None:
    turn = Turn()
    turn.ranks.error = ActorDiedError()
    with pytest.raises(PublishFailed, match="version 1 did not reach every replica") as failed:
        turn.publisher.wake(1)
    assert isinstance(failed.value.__cause__, ActorDiedError)
    assert not turn.woken


def test_engines_with_different_weights_end_the_run_before_they_generate() -> None:
    turn = Turn()
    turn.ranks.checksums[1] = "torn"
    with pytest.raises(ChecksumMismatch, match=r"different weights of version 1: \['the same', 'torn'\]"):
        turn.publisher.wake(1)
    assert not turn.woken


def test_ranks_whose_copies_may_drift_go_on_with_the_first_ones_checksum_and_are_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    turn = Turn()
    turn.publisher.ranks_agree = False
    for version, second in enumerate(("the same", "drifted", "drifted further"), start=1):
        turn.ranks.checksums[1] = second
        turn.publisher.wake(version)
        assert turn.publisher.checksum == "the same"
        assert turn.woken
    (told,) = [record.getMessage() for record in caplog.records if "different sets of weights" in record.getMessage()]
    assert told.startswith("version 2: the trainer's 2 ranks passed on 2 different sets")


def test_an_engine_that_does_not_stop_in_time_is_given_up(ended: list[int]) -> None:
    turn = Turn()
    turn.publisher.wake(0)
    turn.publisher.known.timeout_s = 0.05

    async def hang(reject_request: bool = False) -> None:
        await asyncio.get_running_loop().create_future()

    turn.engines[0].abort_all_requests = hang
    turn.publisher.sleep()
    assert ended == [0] and [record.replica.replica_rank for record in turn.publisher.known.present] == [1]


def test_a_dead_engine_is_started_again_before_the_next_wake_up(ended: list[int]) -> None:
    turn = Turn()
    started, restarts = [], Restarts(1)

    def restart(lost: Any) -> Engine:
        turn.journal.append(("restart", lost.replica_rank))
        started.append(Engine(lost.replica_rank, turn.journal))
        started[-1].server_address = "server-1-again"
        return started[-1]

    turn.publisher.restart_lost(restart, restarts)
    turn.publisher.wake(1)
    assert restarts.begun == 0
    turn.engines[1].alive = False
    turn.publisher.sleep()
    turn.journal.clear()
    turn.publisher.wake(2)
    assert turn.journal[0] == ("restart", 1)
    assert turn.routed == ["server-0", "server-1-again"]
    assert restarts.begun == 1
    started[0].alive = False
    with pytest.raises(PublishFailed, match=r"replica 1 died \(.*the engine died\).*max_replica_restarts=1"):
        turn.publisher.wake(3)


def test_standalone_and_hybrid_replicas_have_one_budget() -> None:
    turn, restarts = Turn(), Restarts(1)
    replacements = Replacements(restarts, 5.0, lambda lost: None)
    replacements.begin("a standalone replica", "lost", lambda: "new")
    turn.publisher.restart_lost(lambda lost: pytest.fail("it was started"), restarts)
    turn.engines[0].alive = False
    with pytest.raises(CannotRestart, match="after 1 restarts"):
        turn.publisher.wake(1)


def test_a_replica_that_does_not_start_again_ends_the_run_with_both_causes() -> None:
    turn = Turn()
    turn.engines[0].alive = False

    def restart(lost: Any) -> Engine:
        raise TimeoutError("no memory")

    turn.publisher.restart_lost(restart, Restarts(1))
    with pytest.raises(PublishFailed, match=r"replica 0 died .*could not be started again: no memory"):
        turn.publisher.wake(1)


def test_engines_are_in_routing_beside_others_only_while_they_are_awake(ended: list[int]) -> None:
    turn = Turn()
    turn.publisher.wake(5)
    assert turn.routed == ["server-0", "server-1"]
    turn.journal.clear()
    standalone = Engine(7, turn.journal)
    turn.balancer._request_id_to_server["a conversation"] = "server-0"
    turn.publisher.spread([standalone.server_handle])
    assert turn.journal == [("spread", 7)]
    assert not turn.balancer._request_id_to_server
    turn.journal.clear()
    turn.publisher.sleep(others_serve=True)
    assert turn.routed == [] and turn.publisher.live_replicas == 0
    assert [event for event, _ in turn.journal] == ["refuse", "refuse", "sleep", "sleep"]
    assert ended == []
    # An engine that does not give its memory back is ended, because the trainer needs the memory.
    turn.publisher.wake(6)
    turn.engines[1].alive = False
    turn.publisher.sleep(others_serve=True)
    assert ended == [1]
    turn.publisher.restart_lost(lambda lost: Engine(lost.replica_rank, turn.journal), Restarts(0))
    with pytest.raises(CannotRestart, match="max_replica_restarts=0"):
        turn.publisher.wake(7)

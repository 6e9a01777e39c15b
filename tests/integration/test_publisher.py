# SPDX-License-Identifier: Apache-2.0
"""What the publisher announces, retries and takes out of routing; replicas and worker groups are faked below it."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from ray.exceptions import ActorDiedError
from remote_fakes import Handle
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from recipe.async_engine.actors.replacement import Replacements, Restarts
from recipe.async_engine.config.sections import Weights
from recipe.async_engine.core.errors import WeightLoadError, WeightStreamError
from recipe.async_engine.weights import publisher as module
from recipe.async_engine.weights.checksum import CHECKSUM, VERSION
from recipe.async_engine.weights.publisher import NoReplicaLeft, PublishFailed, WeightPublisher
from recipe.async_engine.weights.snapshot import Wire
from recipe.async_engine.weights.transfer_group import ChecksumMismatch, TransferGroup

INTERRUPT = Weights(publish="inline", at_swap="interrupt")
BESIDE = replace(INTERRUPT, publish="beside")


class Replica:
    """A replica of one worker and one server; ``loads`` is the script of its loads: an error, or a checksum."""

    def __init__(self, rank: int, journal: list[Any], *loads: Any) -> None:
        self.replica_rank = rank
        self.server_address = f"server-{rank}"
        self.journal = journal
        self.loads = list(loads)
        self.alive = True
        self.answers = True
        self.resumes: list[Any] = []
        self.swaps: list[Any] = []
        take = SimpleNamespace(remote=self.update)
        self.workers = [
            SimpleNamespace(__ray_call__=SimpleNamespace(remote=self.ping), stage_weights=take, update_weights=take)
        ]
        self.servers = [SimpleNamespace(is_there=SimpleNamespace(remote=self.ping))]
        self.server_handle = Handle(self)

    def note(self, what: str) -> None:
        self.journal.append((what, self.replica_rank))

    async def ping(self, *_: Any) -> None:
        if not self.alive:
            raise ActorDiedError()
        if not self.answers:
            await asyncio.get_running_loop().create_future()

    async def update(self, version: int) -> str:
        step = self.loads.pop(0) if self.loads else None
        if step == "die":
            self.alive = False
            raise ActorDiedError()
        if step == "hang":
            self.alive = False
            await asyncio.get_running_loop().create_future()
        if isinstance(step, BaseException):
            raise step
        self.note(f"commit {version}")
        return step or f"checksum of {version}"

    async def abort_all_requests(self) -> None:
        if not self.alive:
            raise ActorDiedError()
        self.note("pause")

    async def hold_requests(self) -> None:
        self.note("hold")

    async def release_kv_cache(self) -> None:
        self.note("release")

    async def resume_kv_cache(self) -> None: ...

    def swap(self, version: int, checksum: str) -> None:
        if self.swaps:
            raise self.swaps.pop(0)
        assert checksum == f"checksum of {version}"
        self.note(f"swap {version}")

    async def resume_generation(self) -> None:
        if self.resumes:
            raise self.resumes.pop(0)
        self.note("resume")

    def leave_routing(self) -> None:
        self.note("leave")

    def wide_parameters(self) -> list[str]:
        return ["model.layers.3.mlp.gate.weight"] if self.replica_rank else []


class WorkerGroup:
    """Runs each worker's part; the trainer's group has one sender."""

    told: ClassVar[list[str]] = []
    """What engines were told, a group at a time."""

    def __init__(self, worker_handles: list[Any], **settings: Any) -> None:
        self.workers = worker_handles
        self.world_size = len(worker_handles)

    def execute_checkpoint_engine(self, method: list[str], **arguments: Any) -> list[Any]:
        self.told.append(method[0])
        return [asyncio.sleep(0, result={}) for _ in method]

    def update_weights(self, global_steps: int, mode: str | None = None) -> list[Any]:
        return [worker.update(global_steps) for worker in self.workers]

    def snapshot_weights(self, version: int, wire: Wire) -> list[Any]:
        return [worker.copy(version, wire) for worker in self.workers]

    def send_snapshot(self, version: int) -> list[Any]:
        return [worker.send(version) for worker in self.workers]


class Sender:
    """Trainer rank 0. In a collective transfer it fails whenever a receiver does: ``fails`` says when."""

    def __init__(self) -> None:
        self.fails: list[BaseException | None] = []
        self.sends: list[int] = []
        self.copies: list[Any] = []
        self.copy_error: Exception | None = None

    async def copy(self, version: int, wire: Wire) -> None:
        if self.copy_error is not None:
            raise self.copy_error
        self.copies.append((version, wire))

    async def send(self, version: int) -> dict[str, float]:
        assert self.copies[-1][0] == version
        return await self.update(version)

    async def update(self, version: int) -> dict[str, Any]:
        error = self.fails.pop(0) if self.fails else None
        if error is not None:
            raise error
        version = self.sends.pop(0) if self.sends else version
        return {"bytes": 100.0 + version, CHECKSUM: f"checksum of {version}", VERSION: version}


class Topology:
    @staticmethod
    def build_topology(trainers: int, receivers: int, metadata: list[Any]) -> tuple[dict, dict]:
        return {}, {}


class Fleet:
    """A publisher with its replicas, balancer and trainer."""

    def __init__(self, *scripts: tuple[Any, ...], timeout_s: float = 5.0, weights: Weights = INTERRUPT) -> None:
        self.journal: list[Any] = []
        self.replicas = [Replica(rank, self.journal, *script) for rank, script in enumerate(scripts)]
        self.balancer = GlobalRequestLoadBalancer({})
        self.sender = Sender()
        config = SimpleNamespace(backend="recipe_gloo", custom_backend_module="recipe.laptop.transfer.gloo_engine")
        self.publisher = WeightPublisher(
            config,
            WorkerGroup([self.sender]),
            self.replicas,
            Handle(self.balancer),
            timeout_s,
            weights,
            torch.bfloat16,
        )
        self.publisher.backend_cls = Topology

    def publish(self, version: int) -> dict[str, float]:
        self.publisher.snapshot(version)
        staged = self.publisher.stage(version)
        self.publisher.swap(staged)
        self.journal.append(("announce", version))
        return self.publisher.resume(staged)

    @property
    def routed(self) -> list[str]:
        return sorted(self.balancer.get_all_servers())

    @property
    def left(self) -> list[int]:
        return [rank for event, rank in self.journal if event == "leave"]

    def when(self, what: str) -> list[int]:
        return [place for place, (event, _) in enumerate(self.journal) if event == what]


@pytest.fixture(autouse=True)
def seam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RayWorkerGroup", WorkerGroup)
    monkeypatch.setattr(WorkerGroup, "told", [])
    monkeypatch.setattr(module, "PING_S", 0.2)


def in_order(fleet: Fleet, *events: str) -> bool:
    """Whether all of one kind have happened before the first of the next kind, on both replicas."""
    places = [fleet.when(event) for event in events]
    assert all(len(found) == 2 for event, found in zip(events, places, strict=True) if event != "announce")
    return all(max(these) < min(those) for these, those in itertools.pairwise(places))


def test_generation_pauses_when_every_replica_has_the_version_and_resumes_when_it_is_announced() -> None:
    fleet = Fleet((), ())
    metrics = fleet.publish(0)
    assert in_order(fleet, "commit 0", "pause", "swap 0", "announce", "resume")
    assert fleet.when("release") == []
    assert fleet.routed == ["server-0", "server-1"]
    assert fleet.publisher.live_replicas == 2
    assert metrics["bytes"] == 100.0
    assert not {CHECKSUM, VERSION} & metrics.keys()
    assert metrics["fully_async/weight_sync/generation_paused_seconds"] <= metrics["fully_async/weight_sync/seconds"]
    assert fleet.publisher.seconds == metrics["fully_async/weight_sync/seconds"]


def test_generation_pauses_before_weights_are_loaded_in_place() -> None:
    fleet = Fleet((), (), weights=Weights(staging="none", at_swap="interrupt"))
    fleet.publish(0)
    assert in_order(fleet, "pause", "commit 0", "announce", "resume")
    assert fleet.when("swap 0") == []
    assert len(fleet.when("release")) == 2
    assert fleet.routed == ["server-0", "server-1"]


def test_requests_are_held_where_the_version_came_and_interrupted_where_it_did_not() -> None:
    broken = RuntimeError("out of memory")
    fleet = Fleet((), (None, broken, broken), weights=Weights(at_swap="keep"))
    fleet.publish(0)
    assert in_order(fleet, "hold", "swap 0", "announce", "resume")
    fleet.journal.clear()
    fleet.publish(1)
    assert [rank for what, rank in fleet.journal if what == "hold"] == [0]
    assert [rank for what, rank in fleet.journal if what == "pause"] == [1], "it will not resume with what it holds"
    assert fleet.routed == ["server-0"]


def test_failed_transfer_leaves_everyone_generating_with_the_old_version() -> None:
    fleet = Fleet((), ())
    fleet.publish(0)
    before = list(fleet.journal)
    fleet.sender.fails = [ActorDiedError(), ActorDiedError()]
    with pytest.raises(PublishFailed):
        fleet.publish(1)
    assert {what for what, _ in fleet.journal[len(before) :]} <= {"commit 1"}, "nothing was paused or swapped"
    assert fleet.routed == ["server-0", "server-1"]


def test_replica_that_cannot_swap_is_given_up() -> None:
    fleet = Fleet((), ())
    fleet.publish(0)
    fleet.replicas[0].swaps = [RuntimeError("torn")]
    fleet.publish(1)
    assert fleet.routed == ["server-1"]
    assert [replica.replica_rank for replica in fleet.publisher.take_lost()] == [0]


def test_replica_is_routed_to_only_after_its_first_commit_and_once() -> None:
    fleet = Fleet((), ())
    assert fleet.routed == []
    fleet.publish(0)
    fleet.balancer.acquire_server("request")
    fleet.publish(1)
    assert fleet.balancer.get_total_inflight() == 1, "a routed server is not entered anew"


def test_dead_receiver_is_left_out_of_the_retry_and_of_routing() -> None:
    fleet = Fleet((None, "die"), ())
    fleet.publish(0)
    fleet.sender.fails = [RuntimeError("peer is gone")]
    fleet.publish(1)
    assert fleet.routed == ["server-1"]
    assert fleet.publisher.live_replicas == 1
    assert fleet.left == [0], "its server may live, with requests that wait at it"
    fleet.publish(2)
    assert fleet.left == [0], "it is told once"
    assert [rank for event, rank in fleet.journal if event == "commit 2"] == [1]


def test_receiver_that_never_answers_counts_as_dead_within_the_deadline() -> None:
    fleet = Fleet((None, "hang"), (), timeout_s=0.2)
    fleet.publish(0)
    metrics = fleet.publish(1)
    assert fleet.routed == ["server-1"]
    assert 0.2 < metrics["fully_async/weight_sync/seconds"] < 5


def test_replica_that_fails_to_load_twice_is_quarantined_and_comes_back_with_its_next_load() -> None:
    broken = RuntimeError("out of memory")
    fleet = Fleet((None, broken, broken), ())
    fleet.publish(0)
    fleet.publish(1)
    assert fleet.routed == ["server-1"]
    assert ("leave", 0) in fleet.journal
    assert fleet.journal.index(("leave", 0)) < fleet.when("announce")[1]
    fleet.publish(2)
    assert fleet.routed == ["server-0", "server-1"]
    assert fleet.publisher.live_replicas == 2


def test_engine_that_refuses_its_weights_does_not_end_the_sync_of_the_others() -> None:
    fleet = Fleet((None, WeightLoadError("bad shape"), WeightLoadError("bad shape")), ())
    fleet.publish(0)
    fleet.sender.fails = [RuntimeError("receiver 0 left the stream")]
    fleet.publish(1)
    assert fleet.routed == ["server-1"]
    assert ("leave", 0) in fleet.journal
    assert len(fleet.replicas[0].loads) == 1, "the retry is made without it"
    fleet.replicas[0].loads = []
    fleet.publish(2)
    assert fleet.routed == ["server-0", "server-1"]


def test_replica_with_other_weights_than_were_sent_loads_again_or_leaves_routing() -> None:
    fleet = Fleet((), ("torn",), (None, None, "torn", "torn"))
    fleet.publish(0)
    assert fleet.routed == ["server-0", "server-1", "server-2"]
    assert len([what for what, _ in fleet.journal if what == "commit 0"]) == 6, "all of them loaded twice"
    assert fleet.publisher.checksum == "checksum of 0"
    fleet.publish(1)
    assert fleet.routed == ["server-0", "server-1"]
    assert ("leave", 2) in fleet.journal


@pytest.mark.parametrize("others", [0, 1])
def test_run_ends_where_no_replica_has_what_the_trainer_sent(others: int) -> None:
    """Replicas that agree with each other are no better: the same wrong weights may have reached all of them."""
    fleet = Fleet(*[(None, "torn", "torn")] * (1 + others))
    fleet.publish(0)
    words = "replica 0: loaded weights of version 1 with the checksum torn; the trainer sent checksum of 1"
    with pytest.raises(NoReplicaLeft, match=words) as ended:
        fleet.publish(1)
    assert isinstance(ended.value.__cause__, ChecksumMismatch)
    assert ("announce", 1) not in fleet.journal
    assert fleet.publisher.checksum == "checksum of 0", "which they still hold"


def test_version_other_than_the_announced_one_is_not_taken() -> None:
    fleet = Fleet((), ())
    fleet.publish(0)
    fleet.sender.sends = [0]
    fleet.publish(1)
    assert len(fleet.when("commit 1")) == 4, "all of them loaded twice"
    fleet.sender.sends = [1, 1]
    with pytest.raises(PublishFailed, match="the trainer sent version 1 in place of version 2"):
        fleet.publish(2)


def test_replica_that_fails_each_transfer_for_all_is_left_out_of_a_third_one() -> None:
    broken, missed = MemoryError("no room"), WeightStreamError("a member is gone")
    fleet = Fleet((None, broken, broken), (None, missed, missed))
    fleet.publish(0)
    fleet.sender.fails = [missed, missed]
    fleet.publish(1)
    assert fleet.routed == ["server-1"]
    fleet.publish(2)
    assert fleet.routed == ["server-0", "server-1"]


def test_replica_that_cannot_join_is_left_out_of_a_third_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet((), ())
    executed = WorkerGroup.execute_checkpoint_engine
    joins = []

    async def no_room() -> None:
        raise MemoryError("no room for a bucket")

    def execute(self: WorkerGroup, method: list[str], **arguments: Any) -> list[Any]:
        calls = executed(self, method, **arguments)
        if method[0] == "prepare" and self.workers[0] is fleet.replicas[0].workers[0]:
            joins.append(len(calls))
            calls[0].close()
            calls[0] = no_room()
        return calls

    monkeypatch.setattr(WorkerGroup, "execute_checkpoint_engine", execute)
    fleet.publish(0)
    assert joins == [2, 2]
    assert fleet.routed == ["server-1"]


def test_load_that_fails_once_succeeds_on_the_retry() -> None:
    fleet = Fleet((RuntimeError("odd"),), ())
    fleet.publish(0)
    assert fleet.routed == ["server-0", "server-1"]
    assert ("leave", 0) not in fleet.journal


def test_replica_that_died_before_the_sync_takes_no_part_in_it() -> None:
    fleet = Fleet((), ())
    fleet.publish(0)
    fleet.replicas[0].alive = False
    fleet.publish(1)
    assert [rank for event, rank in fleet.journal if event == "commit 1"] == [1]
    assert fleet.routed == ["server-1"]


def test_run_ends_with_the_cause_when_no_replica_is_left() -> None:
    fleet = Fleet(("die",), ("die",))
    with pytest.raises(NoReplicaLeft, match="no rollout replica holds version 0: replica 0") as caught:
        fleet.publish(0)
    assert isinstance(caught.value.__cause__, ActorDiedError)
    assert fleet.when("announce") == []
    assert fleet.routed == []


def test_run_ends_when_every_replica_fails_to_load() -> None:
    broken = RuntimeError("out of memory")
    fleet = Fleet((broken, broken))
    with pytest.raises(NoReplicaLeft, match="out of memory"):
        fleet.publish(0)
    assert fleet.when("announce") == fleet.when("resume") == []


def test_engine_that_takes_no_weights_is_named_though_the_trainer_fails_with_it() -> None:
    too_large = WeightLoadError("tensor embedding has 260 MB")
    fleet = Fleet((too_large, too_large))
    fleet.sender.fails = [RuntimeError("a member is gone"), RuntimeError("a member is gone")]
    with pytest.raises(NoReplicaLeft, match="embedding has 260 MB") as caught:
        fleet.publish(0)
    assert caught.value.__cause__ is too_large
    assert fleet.when("announce") == fleet.when("resume") == []


def test_trainer_that_cannot_send_ends_the_run_by_name() -> None:
    fleet = Fleet((), ())
    fleet.sender.fails = [ActorDiedError(), ActorDiedError()]
    with pytest.raises(PublishFailed, match="could not send version 0") as caught:
        fleet.publish(0)
    assert isinstance(caught.value.__cause__, ActorDiedError)
    assert fleet.when("announce") == []


def test_group_that_cannot_connect_is_retried_without_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet((), ())
    connects = []

    async def connect(self: TransferGroup) -> list[BaseException]:
        connects.append(self._receivers.world_size)
        if len(connects) == 1:
            fleet.replicas[0].alive = False
            raise RuntimeError("rendezvous failed")
        return []

    monkeypatch.setattr(TransferGroup, "connect", connect)
    fleet.publish(0)
    assert connects == [2, 1]
    assert fleet.routed == ["server-1"]


def test_engines_are_finalized_after_every_transfer_failed_ones_too() -> None:
    fleet = Fleet((None, RuntimeError("odd")), ())
    transfer = [*["prepare"] * 2, *["init_process_group"] * 2, *["finalize"] * 2]
    fleet.publish(0)
    assert WorkerGroup.told == transfer
    fleet.publish(1)
    assert WorkerGroup.told == transfer * 3


def test_whoever_waits_for_a_member_that_failed_is_told_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet((WeightLoadError("bad shape"),), ())
    fleet.publisher.backend_cls = type("Engine", (Topology,), {"reset": None})
    sends = []

    async def send(version: int) -> dict[str, float]:
        sends.append(version)
        while len(sends) == 1:
            if "reset" in WorkerGroup.told:
                raise RuntimeError("left the group")
            await asyncio.sleep(0.01)
        return {CHECKSUM: f"checksum of {version}"}

    monkeypatch.setattr(fleet.sender, "update", send)
    metrics = fleet.publish(0)
    assert WorkerGroup.told.count("reset") == 2
    assert fleet.routed == ["server-1"]
    assert metrics["fully_async/weight_sync/seconds"] < fleet.publisher.known.timeout_s


def test_replica_that_cannot_resume_leaves_routing() -> None:
    fleet = Fleet((), ())
    fleet.publish(0)
    fleet.replicas[0].resumes = [ActorDiedError()]
    fleet.publish(1)
    assert fleet.routed == ["server-1"]


def test_run_ends_when_no_replica_can_resume() -> None:
    fleet = Fleet(())
    fleet.replicas[0].resumes = [ActorDiedError()]
    with pytest.raises(NoReplicaLeft):
        fleet.publish(0)
    assert fleet.routed == []


class LogProbServer(Replica):
    """It gets weights, and nothing of what a sync does to generation."""

    generates = False

    async def abort_all_requests(self) -> None: ...

    async def resume_generation(self) -> None: ...

    def refuse(self, version: int, reason: str) -> None:
        if not self.alive:
            raise ActorDiedError()
        self.note(f"refuse {version}: {reason}")


def with_server(*scripts: tuple[Any, ...], loads: tuple[Any, ...] = ()) -> tuple[Fleet, LogProbServer]:
    """Rollout replicas 0, 1, ... and log-prob server 9."""
    fleet = Fleet(*scripts)
    server = LogProbServer(9, fleet.journal, *loads)
    fleet.publisher.add_replicas([server])
    return fleet, server


def test_log_prob_server_gets_weights_and_is_never_routed_to() -> None:
    fleet, _ = with_server(())
    fleet.publish(0)
    assert ("commit 0", 9) in fleet.journal and ("commit 0", 0) in fleet.journal
    assert fleet.routed == ["server-0"]
    assert fleet.publisher.live_replicas == 1


def test_sync_is_not_repeated_for_a_log_prob_server_that_refuses_the_weights() -> None:
    fleet, _ = with_server((), loads=(WeightLoadError("no tensor a.b"),))
    fleet.publish(0)
    assert [event for event in fleet.journal if event[0] == "commit 0"] == [("commit 0", 0)]
    fleet.publish(1)
    assert ("commit 1", 9) in fleet.journal


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_log_prob_server_with_other_weights_is_told_so_and_neither_repeats_nor_ends_the_sync(replicas: int) -> None:
    fleet, server = with_server(*[()] * replicas, loads=("torn", "torn too"))
    worse = LogProbServer(8, fleet.journal, "torn otherwise")
    fleet.publisher.add_replicas([worse])
    fleet.publish(0)
    assert len(fleet.when("commit 0")) == replicas + 2, "once each"
    assert len(fleet.routed) == replicas and fleet.publisher.checksum == "checksum of 0"
    told = {rank: event for event, rank in fleet.journal if str(event).startswith("refuse")}
    assert told.keys() == {8, 9} and "version 0 with the checksum torn; the trainer sent checksum of 0" in told[9]
    fleet.publish(1)
    assert [rank for event, rank in fleet.journal if str(event).startswith("refuse 1")] == [9]
    server.alive = False
    fleet.publish(2)
    assert len(fleet.routed) == replicas


def test_log_prob_server_that_dies_as_it_is_told_is_given_up() -> None:
    fleet, server = with_server((), loads=("torn",))
    server.refuse = lambda version, reason: (_ for _ in ()).throw(ActorDiedError())
    fleet.publish(0)
    assert fleet.publisher.take_lost() == [server]


def test_a_replica_that_differs_from_the_trainer_leaves_routing() -> None:
    fleet, _ = with_server((), ("torn", "torn"))
    fleet.publish(0)
    assert fleet.routed == ["server-0"]


def test_dead_log_prob_server_takes_no_part_and_a_silent_one_none_until_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PING_S", 0.05)
    fleet, server = with_server(())
    server.answers = False
    fleet.publish(0)
    assert ("commit 0", 9) not in fleet.journal and fleet.routed == ["server-0"]
    server.answers = True
    fleet.publish(1)
    assert ("commit 1", 9) in fleet.journal
    server.alive = False
    fleet.publish(2)
    server.alive = True
    fleet.publish(3)
    assert ("commit 2", 9) not in fleet.journal and ("commit 3", 9) not in fleet.journal


def test_log_prob_servers_alone_do_not_keep_a_run_going() -> None:
    fleet, _ = with_server(("die",))
    with pytest.raises(NoReplicaLeft):
        fleet.publish(0)


@pytest.mark.parametrize("late_s", [0.5, 60.0])
def test_load_balancer_has_as_long_as_a_sync_and_one_that_does_not_answer_is_named(late_s: float) -> None:
    """At the first sync its process may still be importing; that took more than 10 s on a busy machine."""
    fleet = Fleet((), timeout_s=2.0)

    async def add_servers(servers: dict[str, Any]) -> None:
        await asyncio.sleep(late_s)
        fleet.balancer.add_servers(servers)

    fleet.publisher.known.load_balancer = SimpleNamespace(add_servers=SimpleNamespace(remote=add_servers))
    if late_s < fleet.publisher.known.timeout_s:
        fleet.publish(0)
        assert fleet.routed == ["server-0"]
    else:
        with pytest.raises(TimeoutError, match=r"load balancer did not answer within 2 s .*timeouts.weight_sync"):
            fleet.publish(0)


def test_beside_training_what_is_sent_is_a_copy_also_in_a_second_attempt() -> None:
    fleet = Fleet((), ("die",), weights=BESIDE)
    fleet.publish(0)
    assert fleet.sender.copies == [(0, Wire(torch.bfloat16, frozenset({"gate.weight"})))]
    assert [event for event in fleet.journal if event[0] == "commit 0"] == [("commit 0", 0)] * 2
    fleet.publish(1)
    assert [version for version, _ in fleet.sender.copies] == [0, 1]


def test_a_trainer_that_cannot_copy_its_weights_ends_the_publication_before_anything_is_asked_of_the_replicas() -> None:
    fleet = Fleet((), weights=BESIDE)
    fleet.sender.copy_error = MemoryError("cannot allocate 14 GB")
    with pytest.raises(PublishFailed, match="the trainer could not copy version 0: cannot allocate 14 GB"):
        fleet.publish(0)
    assert fleet.journal == []


def test_weights_that_are_loaded_in_place_travel_as_training_has_them() -> None:
    fleet = Fleet((), weights=replace(BESIDE, staging="none"))
    fleet.publish(0)
    assert fleet.sender.copies == [(0, Wire())]


def begun(replacements: Replacements) -> None:
    """Wait until what is being started is up."""
    for attempt in replacements._attempts:
        attempt.result.result(5)


def test_what_took_a_lost_ones_place_gets_weights_from_the_next_publication_on() -> None:
    restarts = Restarts(1)
    fleet, replacements = Fleet((), ("die",)), Replacements(restarts, 5.0, lambda lost: None)
    fleet.publisher.replace_lost(replacements, lambda: Replica(2, fleet.journal))
    fleet.publish(1)
    assert fleet.routed == ["server-0"]
    begun(replacements)
    fleet.publish(2)
    assert fleet.routed == ["server-0", "server-2"]
    assert restarts.begun == 1


def test_agent_loops_are_told_of_the_log_prob_servers_that_are_there() -> None:
    told: list[list[str]] = []
    fleet, replacements = Fleet(()), Replacements(Restarts(1), 5.0, lambda lost: None)
    fleet.publisher.replace_lost(replacements, lambda: pytest.fail("no rollout replica was lost"))
    first, second = LogProbServer(1, fleet.journal, "die"), LogProbServer(2, fleet.journal)
    fleet.publisher.use_servers(
        [first, second], lambda handles: told.append(sorted(handles)), lambda: LogProbServer(3, fleet.journal)
    )
    fleet.publish(1)
    begun(replacements)
    fleet.publish(2)
    fleet.publish(3)
    assert told == [["server-1", "server-2"], ["server-2"], ["server-2", "server-3"]]


def test_what_is_lost_and_not_replaced_stays_with_the_publisher() -> None:
    fleet = Fleet((), ("die",))
    fleet.publish(1)
    assert fleet.publisher.replicas == fleet.replicas

# SPDX-License-Identifier: Apache-2.0
"""Rollout replicas made of order_fleet.py's processes, their requests, and the fleet to which the publisher
publishes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial

from cuda_order import World
from engine_fleet import Publisher, group_of
from order_fleet import Actor, Process, RolloutRank, TrainerRank, Training, communicators, make_weights
from order_servers import Server
from ray.exceptions import ActorDiedError
from remote_fakes import Handle
from verl.workers.config import CheckpointEngineConfig
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from recipe.async_engine.config.sections import Weights

ASK_EVERY_S = 0.004
SOON_S = 10.0


@dataclass(frozen=True)
class Shape:
    """The members of a fleet; ``nodes``: of the trainer's ranks, ``receivers``: ranks of each receiver."""

    ranks: int = 2
    nodes: int = 1
    receivers: tuple[int, ...] = (1,)
    server: int = 0
    """Ranks of a log-prob server, besides the receivers that generate."""
    beside: bool = True
    relays: bool = False
    at_swap: str = "keep"
    pace: str = "late"
    in_turn: bool = False
    seed: int = 0
    deadline_s: float = 30.0


class Replica:
    """A rollout replica that gets requests repeatedly unless it is paused."""

    def __init__(self, fleet: OrderFleet, rank: int, ranks: int) -> None:
        self.replica_rank, self.server_address = rank, f"server-{rank}"
        self.fleet = fleet
        self.processes = [Process(fleet.world, f"replica {rank}.{place}", f"node {9 + rank}") for place in range(ranks)]
        shape = fleet.shape
        make = partial(RolloutRank, multi_sender=shape.relays, **fleet.deadlines)
        self.ranks: list[RolloutRank] = [
            process.call("make", partial(make, process)).result() for process in self.processes
        ]
        for process, member in zip(self.processes, self.ranks, strict=True):
            process.call("start", partial(self._start, member)).result()
        self.workers = [Actor(process, member) for process, member in zip(self.processes, self.ranks, strict=True)]
        self.server_handle = Actor(self.processes[0], self, threaded=True)
        self.servers = [self.server_handle]
        self.answers: list[int | None] = []
        self._gate, self._open = threading.Lock(), True
        self.asker = threading.Thread(target=self._keep_asking, name=f"asks replica {rank}", daemon=True)
        self.asker.start()

    @staticmethod
    def _start(member: RolloutRank) -> None:
        member.live.load_weights(list(make_weights(0).items()))
        member.process.device.synchronize()

    @property
    def lives(self) -> bool:
        return all(process.lives for process in self.processes)

    def ask(self) -> int | None:
        """Return the version with which all its ranks answer; None if they differ, or one has a mix."""
        calls = [
            process.call("generate", member.answer) for process, member in zip(self.processes, self.ranks, strict=True)
        ]
        found = {call.result(SOON_S) for call in calls}
        return found.pop() if len(found) == 1 else None

    def _keep_asking(self) -> None:
        while not self.fleet.ended.wait(ASK_EVERY_S):
            with self._gate:
                if not self._open:
                    continue
                allowed = set(self.fleet.may_answer)
                try:
                    found = self.ask()
                except (ActorDiedError, TimeoutError):
                    return
                except Exception as error:
                    self.fleet.wrong.append(f"replica {self.replica_rank}: {error!r}")
                    return
                self.answers.append(found)
                if found not in allowed | set(self.fleet.may_answer):
                    self.fleet.wrong.append(f"replica {self.replica_rank} answered with {found}, not {allowed}")

    # Calls of the publisher to a replica

    def is_there(self) -> None: ...

    def wide_parameters(self) -> list[str]:
        return []

    def leave_routing(self) -> None: ...

    def pause(self) -> None:
        with self._gate:
            self._open = False

    def go_on(self) -> None:
        with self._gate:
            self._open = True

    def swap(self, version: int, checksum: str) -> None:
        assert not self._open, "generation goes on during a swap"
        calls = [
            process.call("swap", partial(member.swap, version))
            for process, member in zip(self.processes, self.ranks, strict=True)
        ]
        for call in calls:
            call.result(self.fleet.shape.deadline_s)

    async def abort_all_requests(self) -> None:
        await self.server_handle.pause.remote()

    async def hold_requests(self) -> None:
        await self.server_handle.pause.remote()

    async def resume_generation(self) -> None:
        await self.server_handle.go_on.remote()


class TrainingStands(Exception):
    """A rank of the trainer does not reach the end of its step."""


class OrderFleet:
    """A trainer, its replicas and servers, and their publisher, in the model of order."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.world = World(shape.seed, shape.pace, shape.in_turn)
        self.deadlines = {"timeout_s": shape.deadline_s, "connect_timeout_s": shape.deadline_s}
        self.ended = threading.Event()
        self.may_answer: set[int] = {0}
        self.wrong: list[str] = []
        self.version = 0
        self.hurt: Process | None = None
        """The process in which a fault is planted."""
        settings = {**self.deadlines, "multi_sender": shape.relays}
        self.processes = [
            Process(self.world, f"trainer {rank}", f"node {rank * shape.nodes // shape.ranks}")
            for rank in range(shape.ranks)
        ]
        self.trainers: list[TrainerRank] = [
            process.call("make", partial(TrainerRank, process, rank, **settings)).result()
            for rank, process in enumerate(self.processes)
        ]
        for rank, group in zip(self.trainers, communicators(self.processes, "training"), strict=True):
            rank.group = group
        self.training = Training(self.trainers, shape.seed)
        config = CheckpointEngineConfig(backend="nccl", custom_backend_module="recipe.async_engine.weights.nccl_engine")
        actors = [Actor(process, rank) for process, rank in zip(self.processes, self.trainers, strict=True)]
        weights = Weights(publish="beside" if shape.beside else "inline", at_swap=shape.at_swap)
        balancer = Handle(GlobalRequestLoadBalancer({}))
        self.publisher = Publisher(config, group_of(actors), [], balancer, shape.deadline_s + 1.0, weights)
        self.replicas = [Replica(self, rank, ranks) for rank, ranks in enumerate(shape.receivers)]
        self.servers = (
            [Server(self.world, 99, shape.server, self.ended, multi_sender=shape.relays, **self.deadlines)]
            if shape.server
            else []
        )
        self.publisher.add_replicas([*self.replicas, *self.servers])

    @property
    def routed(self) -> list[Replica]:
        return [record.replica for record in self.publisher.known.records if record.routed]

    def publish(self) -> None:
        """Train to the next version, publish it, and check that every remaining member has all of it."""
        old, self.version = self.version, self.version + 1
        version = self.version
        self.training.go_on(2)
        if not self.training.halt(SOON_S if self.hurt is None else self.shape.deadline_s):
            raise TrainingStands(f"version {version} is not trained")
        for rank in self.trainers:
            rank.process.call("update", partial(rank.become, version)).result(SOON_S)
        self.publisher.snapshot(version)
        if self.shape.beside:
            self.training.go_on()
        staged = self.publisher.stage(version)
        for record in staged.holders:
            if record.generates and record.replica.lives:
                assert {rank.staged.version for rank in record.replica.ranks} == {version}
        self.may_answer.add(version)
        self.publisher.swap(staged)
        self.publisher.resume(staged)
        for replica in self.routed:
            if replica.lives:
                assert replica.ask() == version
        self.may_answer.discard(old)

    def answers_of_live(self) -> dict[int, int | None]:
        return {replica.replica_rank: replica.ask() for replica in self.replicas if replica.lives and replica._open}

    @property
    def was_lost(self) -> bool:
        """Return whether a process died or was frozen."""
        return any(process.lost for process in self.all_processes)

    @property
    def all_processes(self) -> list[Process]:
        return self.processes + [process for each in (*self.replicas, *self.servers) for process in each.processes]

    def end(self) -> None:
        """Check that everything that still runs ends by itself, so that nothing waits for a sync."""
        self.training.end(SOON_S)
        self.ended.set()
        for process in self.all_processes:
            process.device.set(frozen=False, stopped=False)
        drained = [
            process.call("end", process.device.synchronize) for process in self.all_processes if not process.device.gone
        ]
        for each in drained:
            each.result(SOON_S)
        for process in self.all_processes:
            process.loop.call_soon_threadsafe(process.loop.stop)

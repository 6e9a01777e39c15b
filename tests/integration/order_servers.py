# SPDX-License-Identifier: Apache-2.0
"""A log-prob server made of order_fleet.py's processes, whose ranks compute together while weights arrive.

The service with its queue, a rank's handling of weights, its adapter and its staged shards are real.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from cuda_order import Device, Gone
from device_tensors import CUDA, here, raw
from order_fleet import LAYERS, ON_DEVICE, Actor, Member, Process, communicators, gather, make_weights
from ray.exceptions import RayActorError

from recipe.async_engine.core.scoring import ScoringSettings
from recipe.async_engine.log_prob_servers import adapter
from recipe.async_engine.log_prob_servers.adapter import ModelEngineServerAdapter, WorkerSettings
from recipe.async_engine.log_prob_servers.service import EngineLost, ScoringService
from recipe.async_engine.log_prob_servers.worker import ModelEngineWorker
from recipe.async_engine.weights.staged import StagingRefused

SCORE_EVERY_S = 0.003


class HostGroup:
    """The gloo group in which the ranks of a server agree on the host."""

    def __init__(self, devices: list[Device], timeout_s: float) -> None:
        self.devices, self._timeout_s = devices, timeout_s
        self._barrier, self._said = threading.Barrier(len(devices)), dict[Device, Any]()

    def gather(self, verdicts: list[Any], verdict: Any) -> None:
        self._said[here()] = verdict
        self._barrier.wait(self._timeout_s)
        verdicts[:] = [self._said[device] for device in self.devices]
        self._barrier.wait(self._timeout_s)


on_host = partial(
    patch.object,
    adapter,
    "dist",
    SimpleNamespace(
        ProcessGroup=HostGroup,
        get_world_size=lambda group: len(group.devices),
        all_gather_object=lambda verdicts, verdict, group: group.gather(verdicts, verdict),
    ),
)


class Rows:
    """A rank's part of the model: its share of the rows of each tensor."""

    def __init__(self, process: Process, rank: int, ranks: int) -> None:
        self._process, self._rank, self._ranks = process, rank, ranks
        self.live = {
            name: ON_DEVICE.zeros_like(self.part(tensor), device=CUDA) for name, tensor in make_weights(0).items()
        }
        self._came: set[str] = set()

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.tensor_split(self._ranks)[self._rank]

    def accept(self, name: str, tensor: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if name not in self.live:
            raise StagingRefused(f"the model has no tensor {name}")
        self._process.at("tensor")
        self._came.add(name)
        return [(self.live[name], self.part(tensor))]

    def missing(self) -> list[str]:
        return [name for name in self.live if name not in self._came]

    def reset(self) -> None:
        self._came.clear()

    def is_of(self, version: int) -> bool:
        return all(
            torch.equal(raw(tensor), self.part(make_weights(version)[name])) for name, tensor in self.live.items()
        )


class ServerRank(Member, ModelEngineWorker):
    """One rank; each of its calls has a thread, as in Ray."""

    def __init__(self, process: Process, rank: int, group: HostGroup, **settings: Any) -> None:
        Member.__init__(self, process, **settings)
        self.checkpoint_engine = self.engine
        self.rows = Rows(process, rank, len(group.devices))
        self.server_adapter = object.__new__(ModelEngineServerAdapter)
        self.server_adapter.replica_rank = 0
        self.server_adapter._staged = adapter.StagedShards(self.rows, group)
        self._settings = WorkerSettings(None, timeout_s=settings["timeout_s"])
        self.communicator: Any = None

    async def execute_checkpoint_engine(self, method: str, *arguments: Any, **named: Any) -> Any:
        self.process.at(method)
        return await ModelEngineWorker.execute_checkpoint_engine(self, method, *arguments, **named)

    def _use_device(self) -> None: ...

    def _receive(self, version: int) -> str:
        self.process.at("stage")
        return super()._receive(version)

    async def promote(self, version: int) -> None:
        self.process.at("swap")
        await super().promote(version)

    async def _on_engine(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, copy_context().run, work)

    def compute(self, versions: Sequence[int]) -> bool:
        """Run a forward pass with layers gathered from all ranks; return whether the weights match the version."""
        found: list[bool] = []
        for _ in range(LAYERS):
            gather(self.process.device, self.communicator)
            self.process.device.default.work("compute")
        self.process.device.default.work("compute", lambda: found.append(all(map(self.rows.is_of, versions))))
        self.process.device.synchronize()
        return found[0]

    def start(self) -> None:
        for name, tensor in make_weights(0).items():
            self.rows.live[name].copy_(self.rows.part(tensor))
        self.process.device.synchronize()


class Server:
    """The service on its first rank's process, with a client that requests scores continuously."""

    generates = False

    def __init__(
        self, world: Any, rank: int, ranks: int, ended: threading.Event, timeout_s: float, **settings: Any
    ) -> None:
        self.replica_rank, self.server_address = rank, f"model_engine_{rank}"
        self.wrong: list[str] = []
        self.scored = 0
        self.lost: BaseException | None = None
        self._ended, self._timeout_s = ended, timeout_s
        self.processes = [Process(world, f"server {rank}.{place}", f"node {9 + rank}") for place in range(ranks)]
        group = HostGroup([process.device for process in self.processes], timeout_s)
        settings = {**settings, "timeout_s": timeout_s}
        self.ranks: list[ServerRank] = [
            process.call("make", partial(ServerRank, process, place, group, **settings)).result()
            for place, process in enumerate(self.processes)
        ]
        for member, made in zip(self.ranks, communicators(self.processes, f"server {rank}"), strict=True):
            member.communicator = made
            member.process.call("start", member.start).result()
        self._service = ScoringService(
            ScoringSettings(max_delay_s=0.0, holds_for_weights=ranks > 1), self, self._lose, live=0, ranks=ranks
        )
        self._loop = asyncio.new_event_loop()
        self.workers = [Actor(process, member) for process, member in zip(self.processes, self.ranks, strict=True)]
        self.server_handle = Actor(self.processes[0], self, threaded=True)
        self.servers = [self.server_handle]
        for member in self.ranks:
            member._server = self.server_handle
        threading.Thread(target=self._serve, name=f"serves {self.server_address}", daemon=True).start()

    def _lose(self, reason: BaseException) -> None:
        """End the server's process, after which nobody calls the ranks any more."""
        self.lost = reason
        for process in self.processes:
            process.die()

    def _serve(self) -> None:
        async def serve() -> None:
            self._service.run()
            while not self._ended.is_set() and self.lost is None:
                asking = asyncio.create_task(self._ask())
                while not asking.done() and not self._ended.is_set() and self.lost is None:
                    await asyncio.wait([asking], timeout=SCORE_EVERY_S)
                if not asking.cancel() and (error := asking.exception()) is not None and not self.was_hurt:
                    self.wrong.append(f"{self.server_address}: {error!r}")
            self._service._loop.cancel()

        self._loop.run_until_complete(serve())
        # The process has ended, so its tasks are cancelled.
        waiting = asyncio.all_tasks(self._loop)
        for task in waiting:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*waiting, return_exceptions=True))
        self._loop.close()

    @property
    def was_hurt(self) -> bool:
        return any(process.lost for process in self.processes)

    async def _ask(self) -> None:
        await asyncio.sleep(SCORE_EVERY_S)
        if self._service.live is None:
            return
        answer = await self._service.score(None, tokens=1, version=self._service.live, start=0)
        self.scored += 1
        if not answer.scores:
            self.wrong.append(f"{self.server_address} computed with other weights than version {answer.version}")

    # Calls of the service to its ranks

    async def score(self, sequences: Sequence[Any]) -> list[bool]:
        live = self._service.live
        return [all(await self._all("score", lambda rank: rank.compute([live])))] * len(sequences)

    async def promote(self, version: int) -> None:
        await self._all("promote", lambda rank: rank.promote(version))

    async def _all(self, name: str, work: Callable[[ServerRank], Any]) -> list[Any]:
        calls = [asyncio.wrap_future(rank.process.call(name, partial(work, rank))) for rank in self.ranks]
        try:
            return await asyncio.wait_for(asyncio.gather(*calls), self._timeout_s)
        except (TimeoutError, RayActorError) as error:
            raise EngineLost("a rank is gone") from error

    # Calls of ranks and publisher to the server

    def is_there(self) -> None: ...

    async def begin_load(self, version: int, timeout_s: float) -> None:
        await self._on_loop(self._service.begin_load(version, timeout_s))

    async def begin_join(self) -> None:
        await self._on_loop(self._service.begin_join())

    async def joined(self) -> None:
        await self._on_loop(self._does(self._service.joined))

    async def staged(self) -> None:
        await self._on_loop(self._does(self._service.staged))

    async def load_failed(self, reason: str) -> None:
        await self._on_loop(self._does(lambda: self._service.load_failed(reason)))

    async def refuse(self, version: int, reason: str) -> None:
        await self._on_loop(self._does(lambda: self._service.refuse(version, reason)))

    @staticmethod
    async def _does(work: Callable[[], None]) -> None:
        work()

    async def _on_loop(self, work: Any) -> None:
        try:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        except asyncio.CancelledError:
            raise Gone from None

    async def nothing(self, *_: Any) -> None: ...

    abort_all_requests = hold_requests = resume_generation = nothing

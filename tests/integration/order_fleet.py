# SPDX-License-Identifier: Apache-2.0
"""Trainer ranks that train, receivers that generate, and the weight publisher over them, in the model of order.

Every member is a process of device_modules.py. The publisher, the transfer group, the checkpoint engine with Ray's
group below it, the snapshot, the staging in the receivers, and all of a log-prob server's staging are real. Below them
are a model of a few tensors, and a training loop of collectives and kernels that keeps writing to the weights.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from cuda_order import NON_BLOCKING, Device, Event, Gone, Stream, World
from device_tensors import CUDA, Torch, current, raw
from nccl_order import Communicator, UniqueId
from ray.exceptions import ActorDiedError
from torch import nn

from recipe.async_engine.core.errors import WeightLoadError
from recipe.async_engine.engines.staged_model import StagedModel
from recipe.async_engine.weights.checksum import SummedSender
from recipe.async_engine.weights.snapshot import WeightSnapshot, Wire
from recipe.async_engine.weights.staged import Intake

BUCKET_BYTES = 4096
LAYERS = 3
ON_DEVICE = Torch()
TRAIN = "train"


@cache
def make_weights(version: int) -> dict[str, torch.Tensor]:
    """Return weights with a tensor larger than a bucket, and several buckets in all."""
    numbers = torch.Generator().manual_seed(version)
    return {
        "embed": torch.randn(100, 16, generator=numbers),
        "norm": torch.randn(16, generator=numbers).bfloat16(),
        **{f"layer_{number}": torch.randn(20, 16, generator=numbers) for number in range(LAYERS)},
        "counter": torch.tensor([version, 1 << 40]),
        "lm_head": torch.randn(30, 24, generator=numbers).bfloat16(),
    }


@dataclass(frozen=True)
class Fault:
    """An event of this ``kind`` at a member's ``number``-th passing of ``place`` (from 0), once."""

    kind: str
    place: str
    number: int = 0


DIE, FREEZE, STOP_DEVICE, LATE = "die", "freeze", "stop device", "late"
LATE_S = 0.05


class Process:
    """A process with one accelerator; each of its calls runs on a thread of its own."""

    def __init__(self, world: World, name: str, node: str) -> None:
        self.world = world
        self.device = Device(world, name, node)
        self.fault: Fault | None = None
        self.lost = False
        """Whether it has died or been frozen."""
        self.passed: dict[str, int] = {}
        self._open: set[Future[Any]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self._run_loop, name=f"loop of {name}", daemon=True).start()

    def _run_loop(self) -> None:
        self.loop.run_forever()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    @property
    def lives(self) -> bool:
        return not (self.device.gone or self.device.frozen or self.device.stopped)

    def at(self, place: str) -> None:
        """Pass a place, where a fault may be due."""
        number = self.passed.get(place, 0)
        self.passed[place] = number + 1
        fault = self.fault
        if fault is None or (fault.place, fault.number) != (place, number):
            return
        self.fault = None
        if fault.kind == LATE:
            time.sleep(LATE_S)
        elif fault.kind == DIE:
            self.die()
            raise Gone
        else:
            self.lost = True
            self.device.set(**{"frozen" if fault.kind == FREEZE else "stopped": True})
            self.stand()

    def stand(self) -> None:
        """Block while the process is frozen."""
        with self.world.changed:
            self.world.stand(self.device)

    def call(self, name: str, work: Callable[[], Any], on_loop: bool = False) -> Future[Any]:
        """Run ``work`` on a thread of its own, or on the process's event loop, as Ray runs coroutines."""
        outcome: Future[Any] = Future()
        self._open.add(outcome)
        if self.device.gone:
            self.die()
        elif on_loop:
            self.loop.call_soon_threadsafe(self._begin, name, work, outcome)
        else:
            thread = threading.Thread(target=self._do, args=(name, work, outcome), daemon=True)
            thread.name = f"{self.device.name}: {name}"
            thread.start()
        return outcome

    def _do(self, name: str, work: Callable[[], Any], outcome: Future[Any]) -> None:
        with self._reported(outcome), self.world.call(self.device, name):
            self.stand()
            result = work()
            result = asyncio.run(result) if asyncio.iscoroutine(result) else result
            self.stand()
            outcome.set_result(result)

    def _begin(self, name: str, work: Callable[[], Any], outcome: Future[Any]) -> None:
        """Start work on the loop; a function that is not a coroutine occupies the loop until it is done."""
        if not asyncio.iscoroutinefunction(getattr(work, "func", work)):
            self._do(name, work, outcome)
            return

        async def run() -> None:
            with self._reported(outcome), self.world.call(self.device, name):
                self.stand()
                outcome.set_result(await work())

        task = self.loop.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @contextmanager
    def _reported(self, outcome: Future[Any]) -> Iterator[None]:
        with suppress(Gone, InvalidStateError):
            try:
                yield
            except Exception as error:
                outcome.set_exception(error)
            finally:
                self._open.discard(outcome)

    def die(self) -> None:
        self.lost = True
        self.device.set(gone=True)
        for outcome in list(self._open):
            with suppress(InvalidStateError):
                outcome.set_exception(ActorDiedError())


class Actor:
    """Ray's handle on an object in a process; ``threaded``: for an actor whose calls have a thread each."""

    def __init__(self, process: Process, target: Any, threaded: bool = False) -> None:
        self.process, self.target, self.threaded = process, target, threaded

    def __getattr__(self, name: str) -> Any:
        if name == "__ray_call__":
            return Method(self, "ping", lambda work: None)
        if name.startswith("__"):
            raise AttributeError(name)
        return Method(self, name, getattr(self.target, name))


class Method:
    def __init__(self, actor: Actor, name: str, work: Callable[..., Any]) -> None:
        self._actor, self._name, self._work = actor, name, work

    def remote(self, *arguments: Any, **named: Any) -> asyncio.Future[Any]:
        name = named.get("method", self._name) if not arguments else arguments[0]
        name = name if self._name == "execute_checkpoint_engine" else self._name
        work = partial(self._work, *arguments, **named)
        return asyncio.wrap_future(self._actor.process.call(name, work, on_loop=not self._actor.threaded))


class Member:
    """Calls its engine as verl's workers do."""

    def __init__(self, process: Process, **settings: Any) -> None:
        from recipe.async_engine.weights.nccl_engine import BoundedNCCLCheckpointEngine

        self.process = process
        self.engine: Any = BoundedNCCLCheckpointEngine(BUCKET_BYTES, **settings)

    def execute_checkpoint_engine(self, method: str, *arguments: Any, **named: Any) -> Any:
        self.process.at(method)
        return getattr(self.engine, method)(*arguments, **named)


class TrainerRank(Member):
    """One trainer rank; each rank has the full weights, as after gathering."""

    def __init__(self, process: Process, rank: int, **settings: Any) -> None:
        super().__init__(process, is_master=rank == 0, **settings)
        if rank == 0:
            self.engine = SummedSender(self.engine)
        self.rank = rank
        self.waits_for_device = True
        """Whether training waits for the whole device; reading a tensor waits only for training's stream."""
        self.snapshot = WeightSnapshot(rank == 0)
        self.group: Communicator | None = None
        zeros = {name: ON_DEVICE.empty_like(tensor, device=CUDA) for name, tensor in make_weights(0).items()}
        self.weights: dict[str, torch.Tensor] = zeros

    async def update_weights(self, global_steps: int, mode: str) -> Any:
        return await self.engine.send_weights(self._gathered(), global_steps=global_steps) or {}

    def snapshot_weights(self, version: int, wire: Wire) -> None:
        self.snapshot.take(self._gathered, version, wire)

    async def send_snapshot(self, version: int) -> Any:
        with self.snapshot.stream(version) as weights:
            return await self.engine.send_weights(self._passing(weights), global_steps=version) or {}

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield weights like verl's engines: the ranks gather each one when it is requested."""
        for name, tensor in self.weights.items():
            self.process.at("tensor")
            self.all_gather()
            yield name, tensor

    def _passing(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for named in weights:
            self.process.at("tensor")
            yield named

    # Training

    def all_gather(self) -> None:
        gather(self.process.device, self.group)

    def become(self, version: int) -> None:
        """Apply the last update of a version."""
        for name, tensor in make_weights(version).items():
            into = raw(self.weights[name])
            self.process.device.default.work("update", partial(into.copy_, tensor))

    def step(self, number: int, seed: int) -> None:
        """Queue a step without waiting for the previous one; ranks have the same layers but their own pace."""
        self.process.at("step")
        alike, own = random.Random(f"{seed} {number}"), random.Random(f"{seed} {number} {self.rank}")
        for _ in range(alike.randint(1, LAYERS)):
            self.all_gather()
            name = own.choice(list(self.weights))
            into = raw(self.weights[name])
            self.process.device.default.work("compute", partial(into.fill_, own.randint(0, 99)))
            if own.random() < 0.2:
                time.sleep(own.random() * 0.002)
        if number % 3 == 2 or own.random() < 0.3:
            waits = self.process.device if self.waits_for_device else self.process.device.default
            waits.synchronize()


def gather(device: Device, group: Communicator | None) -> None:
    """Gather like torch's ProcessGroupNCCL: on a stream of the communicator's own, with events before and after."""
    assert group is not None
    if group not in STREAMS:
        STREAMS[group] = Stream(device, NON_BLOCKING)
    stream, compute = STREAMS[group], current("torch")
    before, after = Event(device), Event(device)
    before.record(compute)
    stream.wait_event(before)
    group.launch(stream, ("all-gather",))
    after.record(stream)
    compute.wait_event(after)


STREAMS: WeakKeyDictionary[Communicator, Stream] = WeakKeyDictionary()


class Training:
    """The ranks' training loop, which all of them halt and leave at the same step."""

    def __init__(self, ranks: list[TrainerRank], seed: int) -> None:
        self._ranks, self._seed = ranks, seed
        self._changed = threading.Condition()
        self._begun, self._queued = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
        self._until: int | None = 0
        self._ended = False
        for rank in ranks:
            rank.process.call(TRAIN, partial(self._run, rank))

    def _run(self, rank: TrainerRank) -> None:
        while True:
            with self._changed:
                self._queued[rank] = number = self._begun[rank]
                self._changed.notify_all()
                while self._until is not None and number >= self._until and not self._ended:
                    self._changed.wait()
                if self._ended:
                    return
                self._begun[rank] += 1
            rank.step(number, self._seed)

    def go_on(self, steps: int | None = None) -> None:
        """Train this many steps and halt, or train without end."""
        with self._changed:
            self._until = None if steps is None else max(self._begun.values()) + steps
            self._changed.notify_all()

    def halt(self, timeout_s: float) -> bool:
        """Stop between two steps, whose work may still be queued; return False if some rank does not get there."""
        with self._changed:
            if self._until is None:
                self._until = max(self._begun.values())
                self._changed.notify_all()
            living = [rank for rank in self._ranks if not rank.process.device.gone]
            return self._changed.wait_for(lambda: all(self._queued[rank] >= self._until for rank in living), timeout_s)

    def end(self, timeout_s: float) -> None:
        """End training at its present step; a rank that waits for a lost one stops waiting, as when a run ends."""
        lost = any(not rank.process.lives for rank in self._ranks) or not self.halt(timeout_s)
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if lost:
            for rank in self._ranks:
                if rank.group is not None:
                    rank.group.abort()

    @property
    def steps(self) -> int:
        return sum(self._queued.values())


class Model(nn.Module):
    """A module with the tensors of `make_weights`, on the device of the process that creates it."""

    def __init__(self) -> None:
        super().__init__()
        for name, tensor in make_weights(0).items():
            empty = ON_DEVICE.zeros_like(tensor, device=CUDA)
            if tensor.is_floating_point():
                self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
            else:
                self.register_buffer(name, empty)

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        for name, tensor in weights:
            getattr(self, name).copy_(tensor)
        return {name for name, _ in weights}


class RolloutRank(Member):
    """A rank of a rollout replica, which stages received weights beside the live ones."""

    def __init__(self, process: Process, **settings: Any) -> None:
        super().__init__(process, **settings)
        self.live = Model()
        self.staged = StagedModel(self.live, Model(), lambda model: None)

    async def stage_weights(self, global_steps: int) -> str:
        return await asyncio.to_thread(lambda: asyncio.run(self._stage(global_steps)))

    async def _stage(self, global_steps: int) -> str:
        intake = Intake(self.staged, global_steps)
        intake.begin()
        async for named in self._arriving(global_steps):
            intake.take([named])
        intake.end()
        if intake.problem is not None:
            raise WeightLoadError(intake.problem)
        return intake.checksum

    async def _arriving(self, version: int) -> AsyncIterator[tuple[str, torch.Tensor]]:
        self.process.at("stage")
        async for named in self.engine.receive_weights(global_steps=version):
            self.process.at("tensor")
            yield named

    def swap(self, version: int) -> None:
        self.process.at("swap")
        self.staged.swap(version)
        self.process.device.synchronize()

    def answer(self) -> int | None:
        """Return the version of the weights that compute now; None if they are a mix."""
        found: list[int | None] = []

        def generate() -> None:
            live = {name: raw(tensor) for name, tensor in self.live.state_dict(keep_vars=True).items()}
            version = int(live["counter"][0])
            whole = all(torch.equal(live[name], tensor) for name, tensor in make_weights(version).items())
            found.append(version if whole else None)

        self.process.device.default.work("generate", generate)
        self.process.device.default.synchronize()
        return found[0]


def communicators(processes: list[Process], name: str) -> list[Communicator]:
    """Return a communicator of all these processes."""
    unique = UniqueId(name)
    made = [
        process.call("join", partial(Communicator, process.device, unique, len(processes), rank))
        for rank, process in enumerate(processes)
    ]
    return [each.result() for each in made]

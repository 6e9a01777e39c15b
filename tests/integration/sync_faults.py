# SPDX-License-Identifier: Apache-2.0
"""A trainer and two rollout replicas with a fault at a given place of a weight sync.

Every process is a Ray actor. The publisher, the checkpoint engines, the weight workers, the sockets and shared memory
between worker and engine, the staging in the engine, the server with its gate, and the replica are real. vLLM is
replaced by a model of a few tensors: a request is answered with one token, the checksum of the weights that are live at
that moment. A fault is planted in one process, by name of its place.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
import zmq
from engine_fleet import ANSWER_S, Engine, Publisher, TrainerRank, group_of
from nccl_on_cpu import DEVICE
from remote_fakes import Handle
from torch import nn
from verl.workers.config import CheckpointEngineConfig
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.router import GlobalRequestLoadBalancer
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

from recipe.async_engine.config.sections import Weights
from recipe.async_engine.engines import staged_model
from recipe.async_engine.engines.vllm.adapter import DeadlineServerAdapter
from recipe.async_engine.engines.vllm.engine_extension import StagingExtension
from recipe.async_engine.engines.vllm.replica import GatedVLLMReplica
from recipe.async_engine.engines.vllm.server import GatedVLLMHttpServer
from recipe.async_engine.engines.weight_stream import DeadlineSocket, Staging
from recipe.async_engine.engines.weight_worker import RolloutWeightWorker
from recipe.async_engine.weights import publisher as publisher_module
from recipe.async_engine.weights.checksum import StreamChecksum, SummedSender
from recipe.laptop.transfer import gloo_engine
from recipe.laptop.transfer.transport import Transport

BUCKET_BYTES = 1 << 19
HANDED_MEGABYTES = 1
LONG_S, SHORT_S, PING_S = 40.0, 4.0, 3.0
DELAY_S = 0.4
ASK_EVERY_S = 0.02
BUFFERS = ("counter",)
OF_A_SYNC = ("leave-nccl-group", "join-nccl-group", "weight-staging")

DIE, STOP, DELAY, BYTE, STALE, MEMORY = "death", "stop", "delay", "wrong byte", "wrong version", "full memory"


@dataclass(frozen=True)
class Fault:
    """An event of this ``kind`` at the ``number``-th passing of a place in a sync (from 0), ``times`` times."""

    kind: str
    place: str
    number: int = 0
    times: int = 1


class Injector:
    """Triggers the fault of this process; stale content is what passed the place in the previous sync."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.passed: dict[str, int] = {}
        self.buffers: list[weakref.ref[Any]] = []
        self.segments: Path | None = None
        """File to which the names of new shared-memory segments are written."""
        self._content: dict[tuple[str, int], list[torch.Tensor]] = {}
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Start a transfer."""
        self.passed = {}

    def number(self, place: str) -> int:
        with self._lock:
            self.passed[place] = self.passed.get(place, 0) + 1
            return self.passed[place] - 1

    def at(self, place: str, number: int = 0) -> None:
        """Pass a place that carries no data."""
        if self._due(place, number, (DIE, STOP, DELAY, MEMORY)):
            self._happen(place)

    def carries(self, place: str, number: int, *content: torch.Tensor) -> None:
        """Pass ``content``, uint8 or int64, through a place, where it may be changed."""
        due = self._due(place, number, (BYTE, STALE))
        kind = self.fault.kind if self.fault is not None else ""
        before = self._content.get((place, number))
        if not due or kind == BYTE:
            self._content[place, number] = [tensor.clone() for tensor in content]
        if due and kind == BYTE:
            content[-1].view(-1)[content[-1].numel() // 3] ^= 4
        elif due:
            assert before is not None
            for tensor, old in zip(content, before, strict=True):
                tensor.copy_(old)

    def told(self, place: str, version: int) -> int:
        """Return the version that a place passes on, which may be made stale."""
        return version - 1 if self._due(place, 0, (STALE,)) else version

    def _due(self, place: str, number: int, kinds: tuple[str, ...]) -> bool:
        fault = self.fault
        if fault is None or (fault.place, fault.number) != (place, number) or fault.kind not in kinds:
            return False
        with self._lock:
            if fault.times == 0:
                return False
            self.fault = Fault(fault.kind, fault.place, fault.number, fault.times - 1)
        return True

    def _happen(self, place: str) -> None:
        kind = self.fault.kind if self.fault is not None else ""
        if kind == DELAY:
            time.sleep(DELAY_S)
        elif kind == MEMORY:
            raise MemoryError(f"no room at {place}")
        else:
            os.kill(os.getpid(), signal.SIGKILL if kind == DIE else signal.SIGSTOP)


HERE = Injector()
"""The injector of this process."""


@cache
def make_weights(version: int) -> dict[str, torch.Tensor]:
    """Return weights for four frames: a tensor that verl splits, two frames of several tensors, and the end."""
    random = torch.Generator().manual_seed(version)
    layers = {f"layer_{number}": torch.randn(250, 250, generator=random) for number in range(3)}
    return {
        "embed": torch.randn(700, 300, generator=random),
        **layers,
        "norm": torch.randn(300, generator=random).bfloat16(),
        "counter": torch.tensor([version, 1 << 40]),
        "lm_head": torch.randn(500, 250, generator=random).bfloat16(),
    }


def checksum_of(weights: dict[str, torch.Tensor]) -> str:
    checksum = StreamChecksum()
    for name, tensor in weights.items():
        checksum.add(name, tensor)
    return checksum.value()


def token_of(version: int) -> int:
    """Return the answer of a server that holds exactly the weights of a version."""
    return int(checksum_of(make_weights(version)), 16)


def plant_places() -> None:
    """Make the engines and the transfer from worker to engine pass this process's injector."""
    send, receive, group = Transport.send, Transport.receive, gloo_engine.GlooGroup

    def sending(self: Transport, frame: Any, deadline: Any, what: str) -> None:
        number = HERE.number("frame")
        HERE.at("frame", number)
        HERE.carries("frame", number, frame.header, _payload(frame.header.tolist(), frame.body))
        send(self, frame, deadline, what)

    def receiving(self: Transport, turn: int, reader: Any, deadline: Any) -> Any:
        HERE.at("frame", turn)
        header, body = receive(self, turn, reader, deadline)
        body = body.clone()  # shared memory is read-only
        HERE.carries("frame", turn, body[: header.payload_bytes or None])
        return header, body

    def half_joined(*arguments: Any) -> Any:
        HERE.at("half joined")
        return group(*arguments)

    Transport.send, Transport.receive = sending, receiving
    gloo_engine.GlooGroup = half_joined

    wait = DeadlineSocket._wait

    def waiting(self: DeadlineSocket, event: int) -> None:
        if event == zmq.POLLOUT:
            number = HERE.number("handed")
            if number == 0 and HERE.segments is not None:
                with HERE.segments.open("a") as file:
                    file.write(self.said["name"] + "\n")
            HERE.at("handed", number)
        wait(self, event)

    DeadlineSocket._wait = waiting

    take = Staging._take

    def taking(self: Staging, weights: Any, is_last: bool) -> None:
        number = HERE.number("load")
        HERE.carries("load", number, *[tensor.reshape(-1).view(torch.uint8) for _, tensor in weights])
        take(self, weights, is_last)

    Staging._take = taking
    load, complete, swap = (getattr(staged_model.StagedModel, name) for name in ("load", "complete", "swap"))

    def loading(self: Any, weights: Any) -> None:
        HERE.at("load", HERE.passed["load"] - 1)
        load(self, weights)

    def completing(self: Any, version: int, problem: str | None) -> None:
        HERE.at("complete")
        complete(self, version, problem)
        HERE.at("completed")

    def swapping(self: Any, version: int) -> None:
        HERE.at("swap")
        swap(self, version)
        HERE.at("swapped")

    staged_model.StagedModel.load = loading
    staged_model.StagedModel.complete, staged_model.StagedModel.swap = completing, swapping


def _payload(header: list[int], body: torch.Tensor) -> torch.Tensor:
    """Return a frame's tensors, or its text if it has none."""
    payload_bytes = header[4]
    return body[: payload_bytes or None]


def plant_places_of_nccl() -> None:
    """Plant places in verl's engine and in Ray's group below it."""
    from verl.checkpoint_engine import nccl_checkpoint_engine

    broadcast, collective = nccl_checkpoint_engine.BroadcastOperation._run, nccl_checkpoint_engine.collective

    def run(self: Any) -> None:
        number = HERE.number("frame")
        HERE.at("frame", number)
        if self.rank == 0:
            HERE.carries("frame", number, torch.from_numpy(self.bucket))
        broadcast(self)
        if self.rank > 0:
            DEVICE.synchronize()
            HERE.carries("frame", number, self.bucket)

    def barrier(name: str) -> None:
        HERE.at("half joined")
        collective.barrier(name)

    nccl_checkpoint_engine.BroadcastOperation._run = run
    nccl_checkpoint_engine.collective = SimpleNamespace(**{**vars(collective), "barrier": barrier})


class Faulty:
    """A member of a weight sync in which a fault can be planted; ``bare``: its checkpoint engine itself."""

    engine: Any = None
    bare: Any = None

    def meet(self, fault: Fault | None, deadline_s: float) -> None:
        HERE.fault = fault
        if self.bare is not None:
            self.bare._timeout_s = self.bare._connect_timeout_s = deadline_s

    def frames(self) -> dict[str, int]:
        """Return how often each place was passed in the last transfer."""
        return dict(HERE.passed)

    def pid(self) -> int:
        return os.getpid()

    def left(self) -> dict[str, Any]:
        """Return leftovers: threads of a sync, mappings of its memory, and nccl's buffers on the device."""
        threads = [thread.name for thread in threading.enumerate() if thread.name in OF_A_SYNC]
        maps = Path("/proc/self/maps").read_text().splitlines()
        mappings = [line for line in maps if "recipe-weights" in line or "verl_weights" in line]
        buffers = [buffer for buffer in HERE.buffers if buffer() is not None]
        return {"threads": threads, "mappings": len(mappings), "buffers": len(buffers)}

    def _engine_does(self, method: str, *arguments: Any, **named: Any) -> Any:
        HERE.at(method)
        answer = getattr(self.engine, method)(*arguments, **named)
        if method == "prepare":
            made = [getattr(self.bare, name, None) for name in ("send_buf", "recv_buf")]
            HERE.buffers += [weakref.ref(buffer) for buffer in made if buffer is not None]
        HERE.at(f"{method} done")
        return answer


def engine_of(engine: Engine, **settings: Any) -> Any:
    made = engine.new(bucket_size=BUCKET_BYTES, **settings)
    if not hasattr(Transport, "planted"):
        Transport.planted = True
        plant_places()
        if engine.is_nccl:
            plant_places_of_nccl()
    return made


class FaultyTrainer(Faulty, TrainerRank):
    """Trainer rank 0."""

    def __init__(self, engine: Engine) -> None:
        self.bare = engine_of(engine, is_master=True)
        self.engine = SummedSender(self.bare)
        self.names: list[list[str]] = []

    def execute_checkpoint_engine(self, method: str, *arguments: Any, **named: Any) -> Any:
        return self._engine_does(method, *arguments, **named)

    async def update_weights(self, global_steps: int, mode: str) -> Any:
        HERE.begin()
        HERE.at("call")
        return await super().update_weights(HERE.told("call", global_steps), mode)

    def _weights(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        yield from make_weights(version).items()


class FaultyWorker(Faulty, RolloutWeightWorker):
    """The weight worker of a replica."""

    def __init__(self, engine: Engine, server: ray.actor.ActorHandle, address: str) -> None:
        self.bare = self.engine = self.checkpoint_engine = engine_of(engine)
        self.server_adapter = adapter = object.__new__(DeadlineServerAdapter)
        adapter.config = SimpleNamespace(
            checkpoint_engine=SimpleNamespace(update_weights_bucket_megabytes=HANDED_MEGABYTES)
        )
        adapter.zmq_handle, adapter.use_shm = address, True
        HERE.segments = Path(address.removeprefix("ipc://")).parent / "segments"
        adapter._has_server, adapter.server_handle = True, server
        adapter.checksum = None

    def meet(self, fault: Fault | None, deadline_s: float) -> None:
        super().meet(fault, deadline_s)
        self.server_adapter._timeout_s = deadline_s

    def execute_checkpoint_engine(self, method: str, *arguments: Any, **named: Any) -> Any:
        return self._engine_does(method, *arguments, **named)

    async def stage_weights(self, global_steps: int) -> Any:
        HERE.begin()
        return await super().stage_weights(global_steps)


class Model(nn.Module):
    """A module with the tensors of `make_weights`."""

    def __init__(self) -> None:
        super().__init__()
        for name, tensor in make_weights(0).items():
            empty = torch.zeros_like(tensor)
            if name in BUFFERS:
                self.register_buffer(name, empty)
            else:
                self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        for name, tensor in weights:
            self.get_parameter(name).copy_(tensor)
        return {name for name, _ in weights}


class EngineWorker(StagingExtension):
    """vLLM's worker, as far as weights are concerned."""

    def __new__(cls, address: str) -> EngineWorker:
        return object.__new__(cls)

    def __init__(self, address: str) -> None:
        self.device = torch.device("cpu")
        self.model_runner = SimpleNamespace(requests={})
        self.live = Model()
        self._staged_model = staged_model.StagedModel(self.live, Model(), lambda model: None)
        self._address = address

    def _get_zmq_handle(self) -> str:
        return self._address

    def token(self) -> int:
        return int(checksum_of(dict(self.live.state_dict())), 16)


class FaultyEngine:
    """vLLM's engine: a request gets one token at once, `token_of` the live weights."""

    errored = False

    def __init__(self, worker: EngineWorker) -> None:
        self.worker = worker
        self.output_processor = SimpleNamespace(request_states={})
        self.engine_core, self.core_engines = self, (self,)

    async def generate(self, *, request_id: str, **_: Any) -> AsyncIterator[Any]:
        completion = SimpleNamespace(token_ids=[self.worker.token()], logprobs=None, finish_reason="stop")
        yield SimpleNamespace(
            outputs=[completion], num_cached_tokens=0, prompt_logprobs=None, prompt_token_ids=[1, 2], finished=True
        )

    async def _call_utility_async(self, method: str, *args: Any, engine: FaultyEngine) -> Any:
        return await getattr(engine, method)(*args)

    async def collective_rpc(self, method: str, timeout: None = None, args: tuple[Any, ...] = (), *_: Any) -> list[Any]:
        if method == "begin_staging":
            HERE.begin()
            HERE.at(method)
            args = (HERE.told(method, args[0]), *args[1:])
        return [getattr(self.worker, method)(*args)]

    async def pause_scheduler(self, *_: Any) -> None:
        HERE.at("pause")

    async def resume_generation(self) -> None:
        HERE.at("resume")

    async def reset_prefix_cache(self, *_: Any, **__: Any) -> bool:
        return True

    async def reset_encoder_cache(self) -> None: ...

    async def wake_up(self, tags: list[str] | None = None) -> None: ...


@dataclass(frozen=True)
class Answer:
    """The time of an answer (monotonic clock), the versions that it names, and its token."""

    at: float
    submitted: int | None
    version: int | None
    token: int


class FaultyServer(Faulty, GatedVLLMHttpServer):
    """A replica's server, which continuously sends requests to itself."""

    def __init__(self, address: str) -> None:
        if not hasattr(Transport, "planted"):
            Transport.planted = True
            plant_places()
        vLLMHttpServer._post_init = lambda self, devices: None
        settings = {"has_trainer": True, "first_weights_timeout_s": LONG_S, "pause_timeout_s": LONG_S}
        of_config: dict[str, Any] = {
            "load_format": "dummy",
            "custom": {"recipe": settings},
            "max_model_len": 16,
            "response_length": 8,
            "prompt_length": 8,
            "full_determinism": False,
            "enable_rollout_routing_replay": False,
            "mtp": None,
            "free_cache_engine": False,
        }
        self.config = SimpleNamespace(**of_config, get=of_config.get)
        self.model_config = SimpleNamespace(processor=None, lora_rank=0, lora={})
        self.worker = EngineWorker(address)
        self.engine = FaultyEngine(self.worker)
        self.rollout_mode = RolloutMode.STANDALONE
        self.global_steps = None
        self.node_rank = self.replica_rank = self._admitting = 0
        self._submission_paused = self._rejecting = False
        self._resume_event = asyncio.Event()
        self._resume_event.set()
        self._disaggregation_role, self._pd_decode_peers = None, []
        self._post_init("")
        self.answers: list[Answer] = []
        self._asking: asyncio.Task[None] | None = None

    def meet(self, fault: Fault | None, deadline_s: float) -> None:
        HERE.fault = fault

    async def ask(self) -> Answer | None:
        """Send a request to this server; return None if it is rejected."""
        output = await self.generate([1, 2], {}, f"{time.monotonic_ns()}")
        if not output.token_ids:
            return None
        extra = output.extra_fields
        return Answer(time.monotonic(), extra["submitted_version"], extra["global_steps"], output.token_ids[0])

    async def keep_asking(self) -> None:
        async def run() -> None:
            while True:
                if (answer := await self.ask()) is not None:
                    self.answers.append(answer)
                await asyncio.sleep(ASK_EVERY_S)

        if self._asking is None:
            self._asking = asyncio.create_task(run())

    async def take_answers(self) -> list[Answer]:
        """Return the answers since the last call; raise the error of a failed request."""
        if self._asking is not None and self._asking.done():
            self._asking.result()
        answers, self.answers = self.answers, []
        return answers

    async def held(self) -> tuple[int | None, bool]:
        """Return the version that it reports, and whether its weights are completely those of that version."""
        return self.global_steps, self.worker.token() == token_of(self.global_steps or 0)

    async def swap(self, version: int, checksum: str) -> None:
        await super().swap(version, checksum)
        HERE.at("swap done")

    async def open_submission_gate(self) -> None:
        await super().open_submission_gate()
        HERE.at("resumed")


class Replica(GatedVLLMReplica):
    """One weight worker, and the server beside it."""

    def __init__(self, engine: Engine, rank: int, folder: str) -> None:
        address = f"ipc://{folder}/{rank}"
        self.server = ray.remote(FaultyServer).options(num_cpus=0).remote(address)
        self.worker = ray.remote(FaultyWorker).options(num_cpus=0).remote(engine, self.server, address)
        self.replica_rank = rank
        self._server_address, self._server_handle = f"server-{rank}", self.server
        self.workers, self.servers = [self.worker], [self.server]

    async def release_kv_cache(self) -> None: ...

    resume_kv_cache = release_kv_cache


def answer_of(call: Any, timeout_s: float = ANSWER_S) -> Any:
    return ray.get(call, timeout=timeout_s)


class Process:
    """A member's process, known by its id, so that it can be continued and killed when it does not answer."""

    def __init__(self, actor: ray.actor.ActorHandle) -> None:
        self.actor = actor
        self.pid: int = answer_of(actor.pid.remote())

    @property
    def state(self) -> str:
        """ "alive", "stopped" or "gone"."""
        try:
            letter = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "gone"
        return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(letter, "alive")

    def go_on(self) -> None:
        if self.state == "stopped":
            os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        if self.state != "gone":
            os.kill(self.pid, signal.SIGKILL)
        until = time.monotonic() + ANSWER_S
        while self.state != "gone":
            assert time.monotonic() < until, f"process {self.pid} does not end"
            time.sleep(0.01)


class FaultyFleet:
    """A trainer, two replicas and their publisher, which persist from one case to the next."""

    def __init__(self, engine: Engine) -> None:
        engine.load()
        publisher_module.PING_S = PING_S
        self.engine = engine
        self.folder = tempfile.TemporaryDirectory(prefix="zmq", dir="/tmp")
        self.processes: dict[Any, Process] = {}
        self.version = -1
        self.announced = -1
        self.ranks = 0
        self.trainer = self._started(ray.remote(FaultyTrainer).options(num_cpus=0).remote(engine))
        config = CheckpointEngineConfig(backend=engine.backend, custom_backend_module=engine.module)
        balancer = Handle(GlobalRequestLoadBalancer({}))
        self.publisher = Publisher(config, group_of([self.trainer]), [], balancer, LONG_S, Weights(at_swap="interrupt"))
        self.replicas: list[Replica] = []
        self.join(2)

    def _started(self, actor: ray.actor.ActorHandle) -> ray.actor.ActorHandle:
        self.processes[actor] = Process(actor)
        return actor

    def join(self, count: int) -> None:
        new = [Replica(self.engine, self.ranks + place, self.folder.name) for place in range(count)]
        self.ranks += count
        for replica in new:
            self._started(replica.server)
            self._started(replica.worker)
            answer_of(replica.server.keep_asking.remote())
        self.replicas += new
        self.publisher.add_replicas(new)

    @property
    def segments(self) -> set[str]:
        """Return the shared memory between workers and engines that still exists."""
        names = (Path(self.folder.name) / "segments").read_text().split()
        return {name for name in names if Path("/dev/shm", name).exists()}

    def is_up(self, actor: ray.actor.ActorHandle) -> bool:
        return self.processes[actor].state == "alive"

    @property
    def routed(self) -> list[Replica]:
        return [record.replica for record in self.publisher.known.records if record.routed]

    @property
    def members(self) -> list[ray.actor.ActorHandle]:
        return [self.trainer, *(actor for replica in self.replicas for actor in (replica.worker, replica.server))]

    def plant(self, who: str, fault: Fault | None, deadline_s: float) -> ray.actor.ActorHandle:
        """Plant the fault in ``who`` ("sender", "worker" or "server" of the second replica), and none elsewhere."""
        actor = {"sender": self.trainer, "worker": self.replicas[1].worker, "server": self.replicas[1].server}[who]
        answer_of([member.meet.remote(fault if member is actor else None, deadline_s) for member in self.members])
        self.publisher.known.timeout_s = deadline_s + 1.0
        return actor

    def publish(self) -> tuple[BaseException | None, dict[str, float]]:
        """Publish the next version; return its error, and when its steps had ended (monotonic clock)."""
        self.version += 1
        times = {"began": time.monotonic()}
        try:
            staged = self.publisher.stage(self.version)
            times["staged"] = time.monotonic()
            self.publisher.swap(staged)
            self.announced, times["announced"] = self.version, time.monotonic()
            self.publisher.resume(staged)
        except Exception as error:
            times.setdefault("staged", time.monotonic())
            return error, times
        return None, times

    def end(self, actor: ray.actor.ActorHandle) -> None:
        self.processes.pop(actor).end()

    def replace_trainer(self) -> list[ray.actor.ActorHandle]:
        """Start a new trainer; return the actors of the old one, which must be ended."""
        before = self.trainer
        self.trainer = self._started(ray.remote(FaultyTrainer).options(num_cpus=0).remote(self.engine))
        self.publisher.actor_wg = group_of([self.trainer])
        return [before]

    def replace_lost(self) -> list[ray.actor.ActorHandle]:
        """Start new replicas in place of those given up; return the old actors, which must be ended."""
        lost = self.publisher.take_lost()
        self.replicas = [replica for replica in self.replicas if replica not in lost]
        self.join(len(lost))
        return [actor for replica in lost for actor in (replica.worker, replica.server)]

    def stop(self) -> None:
        for process in self.processes.values():
            process.end()
        self.folder.cleanup()

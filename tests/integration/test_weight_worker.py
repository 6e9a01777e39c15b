# SPDX-License-Identifier: Apache-2.0
"""Weights that are staged or loaded, fail or time out: the real sender, and a peer with the engine's own receiver."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
from handover import hand_over
from remote_fakes import Handle
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

from recipe.async_engine.core.errors import EngineDied, WeightLoadError
from recipe.async_engine.engines import weight_worker
from recipe.async_engine.engines.vllm.adapter import DeadlineServerAdapter
from recipe.async_engine.engines.weight_stream import DeadlineReceiver, DeadlineSocket, DeadlineWeightSender, Staging
from recipe.async_engine.weights.checksum import StreamChecksum
from recipe.async_engine.weights.staged import StagedWeights

SOON = 20.0


@pytest.fixture
def address() -> Iterator[str]:
    # zmq limits the path of a socket to 107 bytes; pytest's own folders are too deep.
    folder = tempfile.mkdtemp(prefix="zmq", dir="/tmp")
    yield f"ipc://{folder}/s"
    shutil.rmtree(folder, ignore_errors=True)


def make_weights() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    big = {f"layer.{n}": torch.randn(400, 400, generator=random) for n in range(4)}
    return {**big, "norm": torch.randn(7, generator=random).bfloat16(), "step": torch.tensor(3)}


async def stream(fail_after: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
    for place, item in enumerate(make_weights().items()):
        if place == fail_after:
            raise ConnectionError("the trainer is gone")
        yield item


class Server:
    """The rollout server beside the worker; its engine takes weights with verl's receiver."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.journal: list[Any] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.refusal: Exception | None = None
        self.engine_error: Exception | None = None
        self.silent: set[str] = set()
        self.released = threading.Event()
        self.staging: Staging | None = None
        self.dead = False

    async def begin_load(self, version: int) -> None:
        await self._answer("begin_load", version)

    async def clear_kv_cache(self) -> None:
        await self._answer("clear_kv_cache", None)

    async def loaded(self, checksum: str) -> None:
        self.checksum = checksum
        await self._answer("checksum", None)

    async def set_global_steps(self, version: int) -> None:
        await self._answer("commit", version)

    async def swap(self, version: int, checksum: str) -> None:
        await self._answer("swap", version)

    async def begin_staging(self, version: int, use_shm: bool, timeout_s: float) -> None:
        await self._answer("begin_staging", version)
        if "engine" not in self.silent:
            receiver = DeadlineReceiver(self.address, torch.device("cpu"), use_shm=use_shm, timeout_s=timeout_s)
            self.staging = Staging(Place(self), version, receiver, 0)

    async def staging_outcomes(self) -> list[str]:
        assert self.staging is not None
        return [self.staging.outcome]

    async def check_engine(self) -> None:
        if self.dead:
            raise EngineDied("the engine died")

    async def collective_rpc(self, method: str, **settings: Any) -> None:
        assert method == "update_weights_from_ipc"
        if self.refusal is not None:
            raise self.refusal
        if "engine" in self.silent:
            await asyncio.to_thread(self.released.wait, SOON)
            return
        await asyncio.to_thread(self._receive)
        self.journal.append(("loaded", None))

    def _receive(self) -> None:
        if self.engine_error is not None:
            socket = zmq.Context.instance().socket(zmq.REP)
            socket.connect(self.address)
            socket.recv_pyobj()
            socket.close(linger=0)
            raise self.engine_error
        receiver = BucketedWeightReceiver(self.address, torch.device("cpu"), use_shm=True)
        receiver.receive_weights(self._take)

    def _take(self, weights: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
        self.weights.update({name: tensor.clone() for name, tensor in weights})

    async def _answer(self, what: str, version: int | None) -> None:
        if what in self.silent:
            await asyncio.get_running_loop().create_future()
        self.journal.append((what, version))


class Place(StagedWeights):
    """The engine's staged weights, as far as they are not the same for every kind of model."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def _begin(self) -> None:
        self.server.weights.clear()

    def _load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        if self.server.engine_error is not None:
            # One of its own, since an error holds on to what it was raised with.
            raise type(self.server.engine_error)(*self.server.engine_error.args)
        self.server._take(weights, False)

    def _find_problem(self) -> str | None:
        missing = make_weights().keys() - self.server.weights.keys()
        return f"{sorted(missing)} never came" if missing else None

    def complete(self, version: int, problem: str | None = None) -> None:
        super().complete(version, problem)
        self.server.journal.append(("staged", version))

    def _swap(self) -> None:
        raise AssertionError("nothing here swaps")


def make_adapter(server: Server, timeout_s: float = SOON) -> DeadlineServerAdapter:
    adapter = object.__new__(DeadlineServerAdapter)
    adapter._timeout_s = timeout_s
    adapter.model_config = SimpleNamespace(lora_rank=0, lora={})
    adapter.config = SimpleNamespace(checkpoint_engine=SimpleNamespace(update_weights_bucket_megabytes=1))
    adapter.zmq_handle = server.address
    adapter.use_shm = True
    adapter._has_server = True
    adapter.server_handle = Handle(server)
    return adapter


def assert_complete(server: Server) -> None:
    expected = make_weights()
    assert server.weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(server.weights[name], tensor), name
        assert server.weights[name].dtype == tensor.dtype


async def test_load_closes_the_server_first_and_commits_last(address: str) -> None:
    server = Server(address)
    adapter = make_adapter(server)
    await adapter.update_weights(stream(), global_steps=4)
    assert [what for what, _ in server.journal] == ["begin_load", "loaded", "clear_kv_cache", "checksum", "commit"]
    assert (server.journal[0], server.journal[-1]) == (("begin_load", 4), ("commit", 4))
    assert_complete(server)
    arrived = StreamChecksum()
    for name, tensor in server.weights.items():
        arrived.add(name, tensor)
    assert server.checksum == adapter.checksum == arrived.value()


async def test_event_loop_goes_on_during_a_load(address: str) -> None:
    server = Server(address)
    server.silent = {"engine"}
    load = asyncio.create_task(make_adapter(server, timeout_s=2.0).update_weights(stream(), global_steps=4))
    turns = 0
    while not load.done() and turns < 5:
        await asyncio.wait({load}, timeout=0.01)
        turns += 1
    # Had the load kept the loop, it would have ended before the loop's next turns.
    assert not load.done()
    server.released.set()
    with pytest.raises(WeightLoadError):
        await load


async def test_engine_that_never_answers_fails_the_load_within_its_deadline(address: str) -> None:
    server = Server(address)
    server.silent = {"engine"}
    began = time.monotonic()
    with pytest.raises(WeightLoadError, match=r"accepted no weights for 0\.2 s"):
        await make_adapter(server, timeout_s=0.2).update_weights(stream(), global_steps=4)
    server.released.set()
    assert time.monotonic() - began < SOON / 2
    assert server.journal == [("begin_load", 4)], "nothing is committed"


async def test_engine_that_refuses_the_call_ends_the_load_at_once(address: str) -> None:
    server = Server(address)
    server.refusal = ValueError("the engine is dead")
    began = time.monotonic()
    with pytest.raises(WeightLoadError, match="ended the load: the engine is dead"):
        await make_adapter(server).update_weights(stream(), global_steps=4)
    assert time.monotonic() - began < SOON / 2
    assert server.journal == [("begin_load", 4)]


async def test_engine_that_fails_while_it_is_sent_to_ends_the_load_at_once(address: str) -> None:
    server = Server(address)
    server.engine_error = ValueError("no parameter named layer.0")
    began = time.monotonic()
    with pytest.raises(WeightLoadError, match=r"ended the load: no parameter named layer\.0"):
        await make_adapter(server).update_weights(stream(), global_steps=4)
    assert time.monotonic() - began < SOON / 2
    assert server.journal == [("begin_load", 4)]


@pytest.mark.parametrize("silent", ["begin_load", "clear_kv_cache", "commit"])
async def test_server_that_does_not_answer_fails_the_load_within_its_deadline(address: str, silent: str) -> None:
    server = Server(address)
    server.silent = {silent}
    with pytest.raises(WeightLoadError, match=r"rollout server did not .* within 2 s"):
        await make_adapter(server, timeout_s=2.0).update_weights(stream(), global_steps=4)
    assert ("commit", 4) not in server.journal


@pytest.mark.parametrize("fail_after", [0, 1, 4])
async def test_broken_stream_is_closed_for_the_engine_which_takes_the_next_load(address: str, fail_after: int) -> None:
    server = Server(address)
    adapter = make_adapter(server)
    with pytest.raises(ConnectionError, match="the trainer is gone"):
        await adapter.update_weights(stream(fail_after), global_steps=4)
    assert ("commit", 4) not in server.journal
    server.weights.clear()
    await asyncio.wait_for(adapter.update_weights(stream(), global_steps=5), SOON)
    assert server.journal[-1] == ("commit", 5)
    assert_complete(server)


async def test_tensor_that_does_not_fit_is_named_and_the_engine_takes_the_next_load(address: str) -> None:
    server = Server(address)
    adapter = make_adapter(server)

    async def too_large() -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        yield "norm", torch.zeros(8)
        yield "embedding", torch.zeros((1 << 18) + 1)

    with pytest.raises(WeightLoadError, match=r"embedding has 1048580 bytes.*update_weights_bucket_megabytes=1;"):
        await adapter.update_weights(too_large(), global_steps=4)
    assert ("commit", 4) not in server.journal
    server.weights.clear()
    await asyncio.wait_for(adapter.update_weights(stream(), global_steps=5), SOON)
    assert_complete(server)


def test_error_of_the_engine_ends_a_wait_at_once(address: str) -> None:
    socket = zmq.Context.instance().socket(zmq.REQ)
    socket.bind(address)
    errors: list[Exception] = []
    waiting = DeadlineSocket(socket, SOON, lambda: errors[0] if errors else None)
    timer = threading.Timer(0.05, errors.append, [ValueError("engine gone")])
    timer.start()
    began = time.monotonic()
    with pytest.raises(WeightLoadError, match="ended the load: engine gone"):
        waiting.recv()
    assert time.monotonic() - began < SOON / 2
    timer.join()
    waiting.close()


def test_sender_alone_gives_up_on_a_peer_that_never_connects(address: str) -> None:
    sender = DeadlineWeightSender(address, bucket_size_mb=1, use_shm=True, timeout_s=0.1, failure=lambda: None)
    with pytest.raises(WeightLoadError, match=r"accepted no weights for 0\.1 s"):
        asyncio.run(sender.async_send_weights(stream()))
    assert sender.socket is None
    assert sender.shm is None


async def test_staging_says_nothing_to_the_server_that_would_keep_it_from_answering(address: str) -> None:
    server = Server(address)
    adapter = make_adapter(server)
    taken = await adapter.stage_weights(stream(), 4)
    assert server.journal == [("begin_staging", 4), ("staged", 4)]
    assert_complete(server)
    arrived = StreamChecksum()
    for name, tensor in server.weights.items():
        arrived.add(name, tensor)
    assert taken == arrived.value()


async def test_engine_that_cannot_load_a_tensor_is_named_and_takes_the_next_weights(address: str) -> None:
    server = Server(address)
    server.engine_error = ValueError("no parameter named layer.0")
    adapter = make_adapter(server)
    with pytest.raises(WeightLoadError, match=r"did not load version 4: .*ValueError: no parameter named layer\.0"):
        await adapter.stage_weights(stream(), 4)
    server.engine_error = None
    await adapter.stage_weights(stream(), 5)
    assert server.journal[-1] == ("staged", 5)
    assert_complete(server)


@pytest.mark.parametrize("fail_after", [0, 1, 4])
async def test_broken_stream_stages_nothing_and_the_next_one_is_taken(address: str, fail_after: int) -> None:
    server = Server(address)
    adapter = make_adapter(server)
    with pytest.raises(ConnectionError, match="the trainer is gone"):
        await adapter.stage_weights(stream(fail_after), 4)
    assert ("staged", 4) not in server.journal
    await asyncio.wait_for(adapter.stage_weights(stream(), 5), SOON)
    assert server.journal[-1] == ("staged", 5)
    assert_complete(server)


def with_small_shared_memory(address: str, pipe: Any) -> None:
    """In a process of its own: /dev/shm has half of what the weights need at first, then enough."""
    ctypes.CDLL(None).unshare(0x00020000)  # mounts from here on are this process's
    mounts = (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", "size=500k", "small", "/dev/shm"])
    if any(subprocess.run(["mount", *mount], capture_output=True, check=False).returncode for mount in mounts):
        pipe.send(None)
        return
    server = Server(address)
    adapter = make_adapter(server)
    outcomes = []
    for version in (4, 5):
        try:
            asyncio.run(adapter.stage_weights(stream(), version))
            outcomes.append("staged")
        except WeightLoadError as error:
            outcomes.append(str(error))
        subprocess.run(["mount", "-o", "remount,size=8m", "/dev/shm"], check=True)
    pipe.send((outcomes, server.journal[-1]))


def test_shared_memory_that_is_full_is_named_and_the_next_weights_are_taken(address: str) -> None:
    """Writing to it would end the process, by SIGBUS."""
    context = multiprocessing.get_context("fork")
    pipe, far_end = context.Pipe()
    process = context.Process(target=with_small_shared_memory, args=(address, far_end), daemon=True)
    process.start()
    far_end.close()
    assert pipe.poll(3 * SOON)
    try:
        found = pipe.recv()
    except EOFError:
        process.join(SOON)
        pytest.fail(f"the process ended with {process.exitcode}")
    if found is None:
        pytest.skip("nothing can be mounted here")
    (refused, taken), last = found
    assert "/dev/shm has no room for a bucket of weights: No space left on device" in refused
    assert (taken, last) == ("staged", ("staged", 5))


async def test_stream_without_its_last_tensors_is_refused(address: str) -> None:
    async def shorter() -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        async for name, tensor in stream():
            if name != "norm":
                yield name, tensor

    server = Server(address)
    with pytest.raises(WeightLoadError, match=r"\['norm'\] never came"):
        await make_adapter(server).stage_weights(shorter(), 4)
    assert ("staged", 4) not in server.journal


async def test_engine_that_dies_while_it_is_sent_to_ends_the_staging(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_worker, "WATCH_S", 0.01)
    server = Server(address)
    server.silent, server.dead = {"engine"}, True
    began = time.monotonic()
    with pytest.raises(WeightLoadError, match="ended the load: the engine died"):
        await make_adapter(server).stage_weights(stream(), 4)
    assert time.monotonic() - began < SOON / 2


@pytest.mark.parametrize(
    ("silent", "words"), [("begin_staging", "did not begin to stage"), ("engine", "accepted no weights")]
)
async def test_staging_ends_within_its_deadline_where_nobody_answers(address: str, silent: str, words: str) -> None:
    server = Server(address)
    server.silent = {silent}
    with pytest.raises(WeightLoadError, match=words):
        await make_adapter(server, timeout_s=0.2).stage_weights(stream(), 4)
    assert ("staged", 4) not in server.journal


@pytest.mark.parametrize(("timeout_s", "words"), [(0.1, "sent nothing for 0.1 s"), (SOON, "took its place")])
def test_receiver_gives_up_on_a_sender_that_says_nothing_or_when_it_is_told_to(
    address: str, timeout_s: float, words: str
) -> None:
    socket = zmq.Context.instance().socket(zmq.REQ)
    socket.bind(address)
    receiver = DeadlineReceiver(address, torch.device("cpu"), use_shm=True, timeout_s=timeout_s)
    staging = Staging(Place(Server(address)), 4, receiver, 0)
    if timeout_s < SOON:
        staging._thread.join(SOON)
    assert staging.stop(SOON / 2) and words in staging.outcome
    socket.close(linger=0)


def test_what_is_measured_on_accelerators_hands_over_bit_for_bit_here(address: str) -> None:
    """As tests/gpu does, with shared memory in place of CUDA IPC."""
    folder = address.removeprefix("ipc://").rpartition("/")[0]
    assert hand_over("cpu", mebibytes=40, folder=folder)["seconds"] > 0

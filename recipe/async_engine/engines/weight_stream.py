# SPDX-License-Identifier: Apache-2.0
"""The stream of weights from a weight worker or a trainer rank to the processes of an engine on the same node.

A weight worker is the actor that receives the weights for one of a replica's accelerators. If the replica is on the
trainer's accelerators, the trainer ranks send the stream. The sender and the receiver are verl's; they use a socket,
and shared memory or CUDA IPC. Contract: neither of them waits for the other longer than its deadline. After an error
the receiver reads the stream to its end, so that the sender does not block, and `Staging.outcome` reports the error.
"""

import contextlib
import os
import threading
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Generator
from importlib.metadata import PackageNotFoundError
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import ray
import torch
import verl
import zmq
from verl.plugin.platform import get_platform
from verl.utils.import_utils import load_module

from recipe.async_engine.core.errors import WeightLoadError
from recipe.async_engine.weights.staged import Intake, StagedWeights, StagingRefused
from recipe.async_engine.weights.staged import NamedTensors as Bucket

try:
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver, BucketedWeightSender
except PackageNotFoundError:
    # verl's package `vllm_rollout` cannot be imported without vLLM. Import its module `bucketed_weight_transfer`, which
    # does not need vLLM, from the module's file.
    _file = Path(verl.__file__).parent / "workers/rollout/vllm_rollout/bucketed_weight_transfer.py"
    _transfer: Any = load_module(str(_file), "recipe_bucketed_weight_transfer")
    BucketedWeightReceiver, BucketedWeightSender = _transfer.BucketedWeightReceiver, _transfer.BucketedWeightSender

LOOK_MS = 100
"""Milliseconds between two checks for a failure, while a call on a socket waits for the other side."""

UNDER_WAY, COMPLETE = "under way", "complete: "
"""Outcomes that `Staging` reports. `COMPLETE` is followed by the checksum of the staged weights. Any other text is an
error message.
"""

Failure = Callable[[], Exception | None]
NamedTensors = Generator[tuple[str, torch.Tensor], None, None] | AsyncGenerator[tuple[str, torch.Tensor], None]


class DeadlineSocket:
    """A zmq REQ socket that raises WeightLoadError if the peer is silent for ``timeout_s`` seconds or the engine fails.

    ``failure`` returns the error of the engine, or None while the engine works.
    """

    def __init__(self, socket: zmq.Socket[bytes], timeout_s: float, failure: Failure) -> None:
        self._socket = socket
        self._timeout_s = timeout_s
        self._failure = failure
        self.may_send = True
        self.said: Any = None
        """The message of the last `send_pyobj` call, even if it could not be sent."""
        socket.setsockopt(zmq.LINGER, 0)

    def send_pyobj(self, obj: Any) -> None:
        self.said = obj
        # The socket becomes writable when the engine connects.
        self._wait(zmq.POLLOUT)
        self._socket.send_pyobj(obj, zmq.NOBLOCK)
        self.may_send = False

    def recv(self) -> bytes:
        self._wait(zmq.POLLIN)
        self.may_send = True
        return self._socket.recv(zmq.NOBLOCK)

    def _wait(self, event: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not self._socket.poll(LOOK_MS, event):
            if (error := self._failure()) is not None:
                raise WeightLoadError(f"the rollout engine failed and ended the load: {error}")
            if time.monotonic() > deadline:
                raise WeightLoadError(f"the rollout engine accepted no weights for {self._timeout_s:g} s")

    def close(self) -> None:
        self._socket.close()


class DeadlineWeightSender(BucketedWeightSender):
    """verl's sender of weights through shared memory or CUDA IPC, with deadlines and checks of memory.

    With shared memory, each tensor must fit into one bucket, the buffer through which weights are sent. The memory is
    allocated in /dev/shm before tensors are written to it. Otherwise Linux would kill this process (SIGBUS) at a write
    when /dev/shm is full.

    If the stream of weights breaks, the engine's worker still gets the last message of the protocol, because it would
    otherwise wait for the next bucket for ever. The broken version is not committed.
    """

    socket: Any
    shm: Any

    def __init__(self, *args: Any, timeout_s: float, failure: Failure, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timeout_s = timeout_s
        self._failure = failure
        self._reserved = 0

    def _init_socket(self) -> None:
        super()._init_socket()
        self.socket = DeadlineSocket(self.socket, self._timeout_s, self._failure)

    def _init_buffer(self) -> None:
        try:
            super()._init_buffer()
        except Exception:
            # Remove the shared-memory segment, because verl leaks it if the engine has not received the segment's name
            # (bucketed_weight_transfer.py:185).
            if isinstance(self.socket.said, dict):
                with contextlib.suppress(OSError):
                    segment = SharedMemory(self.socket.said["name"])
                    segment.close()
                    segment.unlink()
            raise

    async def async_send_weights(self, weights: NamedTensors) -> None:
        await super().async_send_weights(self._closing_on_error(weights))

    async def _closing_on_error(self, weights: NamedTensors) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        from verl.workers.rollout.utils import ensure_async_iterator

        try:
            async for name, tensor in ensure_async_iterator(weights):
                if self.use_shm and tensor.nbytes > self.bucket_size:
                    raise WeightLoadError(
                        f"tensor {name} has {tensor.nbytes} bytes, more than fit into "
                        f"checkpoint_engine.update_weights_bucket_megabytes={self.bucket_size_mb}; raise this setting"
                    )
                self._reserve(tensor.nbytes + tensor.element_size())
                yield name, tensor
        except Exception:
            if self.socket is not None and self.socket.may_send:
                with contextlib.suppress(WeightLoadError, zmq.ZMQError):
                    self.socket.send_pyobj({"bucket_meta": {}, "is_last": True})
                    self.socket.recv()
            raise

    def _reserve(self, nbytes: int) -> None:
        """Allocate ``nbytes`` more bytes of shared memory, or what is left of the bucket if that is less."""
        more = min(nbytes, self.bucket_size - self._reserved)
        if self.shm is None or more <= 0:
            return
        try:
            os.posix_fallocate(self.shm._fd, self._reserved, more)
        except OSError as error:
            raise WeightLoadError(
                f"/dev/shm has no room for a bucket of weights: {error.strerror} (allocated {self._reserved >> 20} of "
                f"{self.bucket_size_mb} MiB); lower checkpoint_engine.update_weights_bucket_megabytes, or make "
                "/dev/shm larger (docker run --shm-size)"
            ) from error
        self._reserved += more


def part_id(node_rank: int) -> str:
    """Return an id for the name of the socket between weight workers and engines.

    On one host the id is different for each run and each node rank. verl uses Ray's job id (vllm_rollout.py:141), which
    is the same in all runs that start Ray themselves, and on all node ranks of a replica. Two such runs or node ranks
    on one host would load each other's weights.
    """
    context = ray.get_runtime_context()
    return f"{context.get_job_id()}-{zlib.crc32(context.gcs_address.encode()):08x}-{node_rank}"


def socket_address(replica_rank: int, node_rank: int) -> str:
    """Return the address of the socket to an engine's process, with the placeholder ``{rank}`` for the process's number
    on its node.
    """
    return f"ipc:///tmp/rl-colocate-zmq-{part_id(node_rank)}-replica-{replica_rank}-rank-{{rank}}.sock"


class PatientSocket:
    """A zmq REP socket. Receiving raises StagingRefused after ``timeout_s`` seconds, or when ``stopped`` is set."""

    def __init__(self, socket: zmq.Socket[bytes], timeout_s: float, stopped: threading.Event) -> None:
        self._socket, self._timeout_s, self._stopped = socket, timeout_s, stopped
        socket.setsockopt(zmq.LINGER, 0)
        self.send, self.close = socket.send, socket.close

    def recv_pyobj(self) -> Any:
        deadline = time.monotonic() + self._timeout_s
        while not self._socket.poll(LOOK_MS):
            if self._stopped.is_set():
                raise StagingRefused("this stream of weights was ended, because another stream took its place")
            if time.monotonic() > deadline:
                raise StagingRefused(f"the sender of the weights sent nothing for {self._timeout_s:g} s")
        return self._socket.recv_pyobj()


class DeadlineReceiver(BucketedWeightReceiver):
    """verl's receiver of weights, which gives up after ``timeout_s`` seconds without a message, or after `stop`."""

    socket: Any

    def __init__(self, *args: Any, timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timeout_s = timeout_s
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    def _init_socket(self) -> None:
        super()._init_socket()
        self.socket = PatientSocket(self.socket, self._timeout_s, self._stopped)


class Staging:
    """Receives one stream of weights into the staging area ``staged``, on its own thread."""

    def __init__(self, staged: StagedWeights, version: int, receiver: DeadlineReceiver, device: Any) -> None:
        self._receiver, self._device = receiver, device
        self._intake = Intake(staged, version)
        self._thread = threading.Thread(target=self._run, name="weight-staging", daemon=True)
        self._thread.start()

    @property
    def outcome(self) -> str:
        """State of the stream: `UNDER_WAY`, `COMPLETE` with the checksum of the staged weights, or an error message."""
        if self._thread.is_alive():
            return UNDER_WAY
        return self._intake.problem or COMPLETE + self._intake.checksum

    def stop(self, timeout_s: float) -> bool:
        """Stop receiving; return whether the thread has ended within ``timeout_s`` seconds."""
        self._receiver.stop()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        get_platform().set_device(self._device)
        self._intake.begin()
        try:
            self._receiver.receive_weights(self._take)
        except Exception as error:  # Any error becomes the outcome of this stream.
            self._intake.fail(error)

    def _take(self, weights: Bucket, is_last: bool) -> None:
        self._intake.take(weights)
        if is_last:
            # Set the outcome before the sender gets the reply to its last message, because the sender asks for the
            # outcome after the reply.
            self._intake.end()


class StagingWorker:
    """A mixin for an engine's worker process, which adds a staging area for the next weights."""

    _staged_model: StagedWeights | None = None
    _staging: Staging | None = None

    def _end_stream(self, timeout_s: float) -> None:
        """End an earlier stream; raise StagingRefused if it has not ended within ``timeout_s`` seconds."""
        if self._staging is not None and not self._staging.stop(timeout_s):
            raise StagingRefused(f"an earlier stream of weights has not ended within {timeout_s:g} s")

    def _receive(
        self, into: StagedWeights, version: int, address: str, device: torch.device, use_shm: bool, timeout_s: float
    ) -> None:
        """Start to receive a stream of weights from ``address``, on another thread.

        ``use_shm`` says whether the sender uses shared memory instead of CUDA IPC. The stream fails after ``timeout_s``
        seconds without a message.
        """
        receiver = DeadlineReceiver(address, device, use_shm=use_shm, timeout_s=timeout_s)
        self._staging = Staging(into, version, receiver, get_platform().current_device())

    def staging_outcome(self) -> str:
        """Return the state of the last stream: `UNDER_WAY`, `COMPLETE` followed by a checksum, or an error message."""
        return UNDER_WAY if self._staging is None else self._staging.outcome

    def _make_live(self, version: int) -> None:
        """Make the staged weights the live ones.

        Raises:
            StagingRefused: ``version`` is not staged completely.
        """
        if self._staged_model is None:
            raise StagingRefused("no weights have been staged")
        self._staged_model.swap(version)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

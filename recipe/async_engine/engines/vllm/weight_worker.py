# SPDX-License-Identifier: Apache-2.0
"""The Ray actor that receives weights from the trainer and passes them to a vLLM engine on the same node.

Contract: weights are either staged (`stage_weights`) while the server continues to answer with the live weights, or
loaded over the live weights (`update_weights`) while the server is closed. Either call succeeds completely, or fails
within its deadline and leaves the engine ready for another attempt. If `update_weights` fails, the server stays closed
(`recipe.async_engine.engines.vllm.server`). The worker's event loop is never blocked. (Stock verl's
``BucketedWeightSender`` has no deadline, and blocks the event loop while it waits on a socket,
bucketed_weight_transfer.py:163.)
"""

import asyncio
import contextlib
import os
import time
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from multiprocessing.shared_memory import SharedMemory
from typing import Any, TypeVar

import ray
import torch
import zmq
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.plugin.platform import get_platform
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from recipe.async_engine.core.errors import WeightLoadError
from recipe.async_engine.weights.checksum import StreamChecksum

LOOK_MS = 100
"""Milliseconds between two checks whether the engine has failed, while a call on a socket waits."""

WATCH_S = 1.0
"""Seconds between two checks whether the engine is alive, while weights are sent."""

UNDER_WAY, COMPLETE = "under way", "complete: "
"""Outcomes of staging that `engine_extension.StagingExtension` reports. `COMPLETE` is followed by the checksum of the
staged weights. Any other text is an error message.
"""

T = TypeVar("T")
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
        # The socket is writable once the engine has connected.
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

    With shared memory, each tensor must fit into one bucket, the buffer through which weights are sent. Shared memory
    is allocated before it is written to, because Linux kills a process (SIGBUS) that writes to it when /dev/shm is
    full.

    If the stream of weights breaks, the engine still gets the last message of the protocol, because its worker would
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
                        f"checkpoint_engine.update_weights_bucket_megabytes={self.bucket_size_mb}; raise it"
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
                f"/dev/shm has no room for a bucket of weights: {error.strerror} after {self._reserved >> 20} of "
                f"checkpoint_engine.update_weights_bucket_megabytes={self.bucket_size_mb}; lower it, or make /dev/shm "
                "larger (docker run --shm-size)"
            ) from error
        self._reserved += more


def part_id(node_rank: int) -> str:
    """Return an id for the socket between weight workers and engines, different for each run and node rank on a host.

    verl uses Ray's job id (vllm_rollout.py:141). Runs that start Ray themselves all have the same job id, so two of
    them on one host would load each other's weights. So would several node ranks of one replica on one host.
    """
    context = ray.get_runtime_context()
    return f"{context.get_job_id()}-{zlib.crc32(context.gcs_address.encode()):08x}-{node_rank}"


def takes_adapters(model_config: Any) -> bool:
    """Return whether the trainer sends LoRA adapters instead of merged weights (verl's ``lora_as_adapter``)."""
    return max(model_config.lora_rank, model_config.lora.get("rank", 0)) > 0 and not model_config.lora.get("merge")


class DeadlineServerAdapter(ServerAdapter):
    """verl's adapter, which passes weights to the vLLM server on its node, with deadlines and on another thread.

    The deadline is ``weight_sync_timeout_s`` (seconds) in ``rollout.custom["recipe"]``. ``checksum`` is the checksum of
    the weights that were last loaded by `update_weights`.
    """

    zmq_handle: str
    node_rank: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.zmq_handle = self.zmq_handle.replace(ray.get_runtime_context().get_job_id(), part_id(self.node_rank))
        settings = (self.config.custom or {}).get("recipe", {})
        self._timeout_s = float(settings.get("weight_sync_timeout_s", 600.0))
        self.checksum: str | None = None

    @torch.no_grad()
    async def update_weights(
        self, weights: NamedTensors, global_steps: int | None = None, wire_format: str = "named_tensors", **kwargs: Any
    ) -> None:
        """Load all tensors of ``weights`` over the live weights, then commit version ``global_steps``.

        Raises:
            WeightLoadError: the engine reported an error or did not answer in time. The server stays closed.
        """
        if wire_format != "named_tensors":
            await super().update_weights(weights, global_steps=global_steps, wire_format=wire_format, **kwargs)
            return
        if takes_adapters(self.model_config):
            await self._load_adapter(weights, global_steps)
            return
        if self._ensure_server_handle():
            await self._in_time(self.server_handle.begin_load.remote(global_steps), "close")
        load = await self._execute_method(
            "update_weights_from_ipc",
            non_block=True,
            timeout=self._timeout_s,
            kwargs={**kwargs, "use_shm": self.use_shm},
        )
        outcome = asyncio.create_task(_error_of(load))
        checksum = StreamChecksum()
        try:
            await self._send(checksum.watching(weights), outcome)
            error = await self._in_time(outcome, "finish the load")
        finally:
            outcome.cancel()
        if error is not None:
            raise WeightLoadError(f"the rollout engine failed to load version {global_steps}: {error}")
        self.checksum = checksum.value()
        if self._has_server:
            await self._in_time(self.server_handle.clear_kv_cache.remote(), "clear its caches")
            if global_steps is not None:
                await self._in_time(self.server_handle.loaded.remote(self.checksum), "take a checksum")
                await self._in_time(self.server_handle.set_global_steps.remote(global_steps), "commit")

    @torch.no_grad()
    async def stage_weights(self, weights: NamedTensors, version: int) -> str | None:
        """Stage all tensors of ``weights`` as ``version``, next to the engine's live weights.

        Returns:
            The checksum of the weights that the engine's workers have staged, or None on ranks other than the leading
                one.

        Raises:
            WeightLoadError: the engine refused the weights or did not answer in time. The live weights did not change.
        """
        leads = self._ensure_server_handle()
        if leads:
            # The engine gets twice the time limit of this worker, so that the worker gives up first and reports the
            # reason.
            staging = self.server_handle.begin_staging.remote(version, self.use_shm, 2 * self._timeout_s)
            await self._in_time(staging, "begin to stage weights")
        outcome = asyncio.create_task(self._death_of_engine(leads))
        try:
            await self._send(weights, outcome)
        finally:
            outcome.cancel()
        return await self._in_time(self._staged(version), "stage the weights") if leads else None

    async def _load_adapter(self, weights: NamedTensors, version: int | None) -> None:
        """Stage an adapter and make it live at once. The caller has paused generation."""
        assert version is not None, "each adapter has its version in its name"
        self.checksum = await self.stage_weights(weights, version)
        if self._has_server:
            await self._in_time(self.server_handle.swap.remote(version, self.checksum), "take the adapter")

    async def _staged(self, version: int) -> str:
        while UNDER_WAY in (outcomes := await self.server_handle.staging_outcomes.remote()):
            await asyncio.sleep(LOOK_MS / 1000)
        wrong = [outcome for outcome in outcomes if not outcome.startswith(COMPLETE)]
        if wrong:
            raise WeightLoadError(f"the rollout engine did not load version {version}: {wrong[0]}")
        return " and ".join(sorted({outcome.removeprefix(COMPLETE) for outcome in outcomes}))

    async def _death_of_engine(self, leads: bool) -> Exception:
        """Wait until the engine has died, and return its error. Ranks other than the leading one wait for ever."""
        while True:
            await asyncio.sleep(WATCH_S)
            if leads and (error := await _error_of(self.server_handle.check_engine.remote())) is not None:
                return error

    async def _send(self, weights: NamedTensors, failure: asyncio.Task[Exception | None]) -> None:
        """Send ``weights`` to the engine; raise WeightLoadError if the task ``failure`` returns an error first."""
        sender = DeadlineWeightSender(
            zmq_handle=self.zmq_handle,
            bucket_size_mb=self.config.checkpoint_engine.update_weights_bucket_megabytes,
            use_shm=self.use_shm,
            timeout_s=self._timeout_s,
            failure=lambda: failure.result() if failure.done() else None,
        )
        await asyncio.to_thread(_run_on, get_platform().current_device(), sender.async_send_weights(weights))

    async def _in_time(self, answer: Awaitable[T], what: str) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await answer
        except TimeoutError:
            raise WeightLoadError(f"the rollout server did not {what} within {self._timeout_s:g} s") from None


async def _error_of(load: Awaitable[Any] | None) -> Exception | None:
    """Await ``load``, a call to the engine or None, and return the error of the call, or None if it has no error."""
    try:
        if load is not None:
            await load
    except Exception as error:  # Any error of the engine is returned.
        return error
    return None


def _run_on(device: Any, work: Coroutine[Any, Any, None]) -> None:
    get_platform().set_device(device)
    asyncio.run(work)


class RolloutWeightWorker(CheckpointEngineWorker):
    """verl's checkpoint-engine worker with a :class:`DeadlineServerAdapter`."""

    checkpoint_engine: Any

    def __init__(self, rollout_config: Any, model_config: Any, replica_rank: int) -> None:
        super().__init__(rollout_config, model_config, replica_rank=replica_rank)
        self.server_adapter = DeadlineServerAdapter(
            config=rollout_config, model_config=model_config, device_mesh=None, replica_rank=replica_rank
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None) -> str | None:
        await super().update_weights(global_steps)
        return self.server_adapter.checksum

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def stage_weights(self, global_steps: int) -> str | None:
        weights = self.checkpoint_engine.receive_weights(global_steps=global_steps)
        return await self.server_adapter.stage_weights(weights, global_steps)

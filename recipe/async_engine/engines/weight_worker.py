# SPDX-License-Identifier: Apache-2.0
"""The Ray actor that receives weights from the trainer and passes them to the engine on the same node.

Contract: `stage_weights` puts weights next to the live ones while the server continues to answer. `update_weights`
loads weights over the live ones while the server keeps requests waiting. Either call succeeds completely, or fails
within its deadline and leaves the engine ready for another attempt. If `update_weights` fails, the requests still wait
(`recipe.async_engine.engines.gated_server`). The worker's event loop is never blocked. (verl's own
``BucketedWeightSender`` has no deadline, and blocks the event loop while it waits on a socket,
bucketed_weight_transfer.py:163.)
"""

import asyncio
from collections.abc import Awaitable, Coroutine
from functools import cached_property
from typing import Any, TypeVar

import torch
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.plugin.platform import get_platform
from verl.single_controller.base.decorator import Dispatch, register

from recipe.async_engine.core.errors import WeightLoadError
from recipe.async_engine.engines.protocol import adapter_class
from recipe.async_engine.engines.weight_stream import COMPLETE, LOOK_MS, UNDER_WAY, DeadlineWeightSender, NamedTensors

WATCH_S = 1.0
"""Seconds between two checks whether the engine is alive, while weights are sent."""

T = TypeVar("T")


class DeadlineAdapter:
    """The part of a server adapter that streams weights to the engine's processes, with deadlines, on another thread.

    A subclass sets the attributes declared here. ``zmq_handle`` is the address of the socket to the engine's process,
    and ``checksum`` is the checksum of the weights that `update_weights` loaded last. The deadline is
    ``weight_sync_timeout_s`` (seconds) in ``rollout.custom["recipe"]``.
    """

    config: Any
    zmq_handle: str
    use_shm: bool
    server_handle: Any
    _has_server: bool
    checksum: str | None = None

    @cached_property
    def _timeout_s(self) -> float:
        settings = (self.config.custom or {}).get("recipe", {})
        return float(settings.get("weight_sync_timeout_s", 600.0))

    def _ensure_server_handle(self) -> bool:
        """Look up the server, and return whether this rank is the leading rank, which alone calls the server."""
        raise NotImplementedError

    @torch.no_grad()
    async def stage_weights(self, weights: NamedTensors, version: int) -> str | None:
        """Stage all tensors of ``weights`` as ``version``, next to the engine's live weights.

        Returns:
            The checksum of the weights that the engine's workers have staged, or None on ranks other than the leading
                one.

        Raises:
            WeightLoadError: the engine refused the weights or did not answer in time. The live weights did not change.
        """
        return await self._stream(weights, version, "begin_staging", "stage")

    async def _stream(self, weights: NamedTensors, version: int, begin: str, verb: str) -> str | None:
        """Call the server's method ``begin``, send ``weights`` to the engine, and return the engine's checksum of them.

        The result is None on ranks other than the leading one. Error messages use ``verb`` for what the engine does.
        """
        leads = self._ensure_server_handle()
        if leads:
            # The engine gets twice the time limit of this worker, so that the worker gives up first and reports the
            # reason.
            begun = getattr(self.server_handle, begin).remote(version, self.use_shm, 2 * self._timeout_s)
            await self._in_time(begun, f"begin to {verb} weights")
        outcome = asyncio.create_task(self._death_of_engine(leads))
        try:
            await self._send(weights, outcome)
        finally:
            outcome.cancel()
        return await self._in_time(self._staged(version), f"{verb} the weights") if leads else None

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
            if leads and (error := await error_of(self.server_handle.check_engine.remote())) is not None:
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


async def error_of(load: Awaitable[Any] | None) -> Exception | None:
    """Await the call ``load`` and return the error that it raises, or None if it raises none or ``load`` is None."""
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
    """verl's checkpoint-engine worker. It passes weights to an engine through this package's adapter for the engine."""

    checkpoint_engine: Any
    server_adapter: Any

    def __init__(self, rollout_config: Any, model_config: Any, replica_rank: int) -> None:
        adapter = adapter_class(rollout_config.name)(
            config=rollout_config, model_config=model_config, device_mesh=None, replica_rank=replica_rank
        )
        super().__init__(rollout_config, model_config, server_adapter=adapter, replica_rank=replica_rank)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None) -> str | None:
        await super().update_weights(global_steps)
        checksum: str | None = self.server_adapter.checksum
        return checksum

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def stage_weights(self, global_steps: int) -> str | None:
        weights = self.checkpoint_engine.receive_weights(global_steps=global_steps)
        staged: str | None = await self.server_adapter.stage_weights(weights, global_steps)
        return staged

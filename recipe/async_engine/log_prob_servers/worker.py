# SPDX-License-Identifier: Apache-2.0
"""The Ray actor of one rank of a log-prob server, which receives weights in the same broadcast as the rollout replicas.

Contract: the engine runs on one thread, and weights are received and staged on another, so the actor's event loop is
never blocked. A rank receives weights only when the server allows it, and reports to the server whether it has staged
them. The server therefore makes weights live only when all ranks have them, and can stop scoring during a transfer
where that is necessary (`recipe.async_engine.log_prob_servers.replica`). If the model cannot load the weights, the rank
raises `WeightLoadError`, which tells the weight publisher that this rank made the transfer fail.

In results, index ``t`` has the log-prob of token ``t`` given the tokens before it, and the entropy of the distribution
from which token ``t`` was sampled. Both are 0 at index 0. (In the output of verl's engines, index ``t`` has the values
of token ``t + 1``.) Shown by tests/integration/test_model_engine_server.py and test_model_engine_adapter.py.
"""

from __future__ import annotations

import asyncio
import faulthandler
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import ray
import torch
from tensordict import TensorDict
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.plugin.platform import get_platform
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils import tensordict_utils as tu

from recipe.async_engine.core.errors import WeightLoadError
from recipe.async_engine.log_prob_servers.adapter import ModelEngineServerAdapter, WorkerSettings
from recipe.async_engine.weights.staged import StagingRefused


def to_batch(sequences: Sequence[torch.Tensor], temperature: float) -> TensorDict:
    """Return an unpadded batch for verl's engine, which divides logits by ``temperature``.

    Each sequence has token ids, int64 (L,).
    """
    rows = len(sequences)
    positions = [torch.arange(len(sequence)) for sequence in sequences]
    # verl's engines require loss masks, although no loss is computed here.
    mask = torch.ones(rows, 1, dtype=torch.int64)
    return tu.get_tensordict(
        tensor_dict={
            "input_ids": torch.nested.as_nested_tensor(list(sequences), layout=torch.jagged),
            "position_ids": torch.nested.as_nested_tensor(positions, layout=torch.jagged),
            "loss_mask": mask,
            "response_mask": mask.clone(),
            "temperature": torch.full((rows,), temperature),
        },
        non_tensor_dict={
            "calculate_entropy": True,
            "compute_loss": False,
            "global_token_num": [len(sequence) for sequence in sequences],
            "max_response_len": 1,
        },
    )


def from_batch(output: TensorDict) -> list[np.ndarray]:
    """Return log-probs and entropies, float32 (2, L), of each sequence in the output of verl's engine."""
    columns = (output["log_probs"].unbind(), output["entropy"].unbind())
    return [torch.stack([_shifted(column) for column in row]).numpy() for row in zip(*columns, strict=True)]


def _shifted(of_next_token: torch.Tensor) -> torch.Tensor:
    """Put 0 before the values and drop the last one, so that index ``t`` has the value of token ``t``."""
    return torch.cat([torch.zeros(1), of_next_token[:-1].float().cpu()])


@dataclass(frozen=True)
class Place:
    """A worker's position in data parallelism: its rank (``share``) and the number of ranks (``shares``).

    ``has_output`` is whether the worker returns results: of the workers with the same rank, verl's engine has output
    only on one.
    """

    share: int
    shares: int
    has_output: bool


class ModelEngineWorker(CheckpointEngineWorker):
    """One rank of a log-prob server: verl's checkpoint-engine worker with a forward-only training engine."""

    checkpoint_engine: Any

    def __init__(self, rollout_config: Any, model_config: Any, replica_rank: int, settings: WorkerSettings) -> None:
        adapter = ModelEngineServerAdapter(rollout_config, model_config, settings, replica_rank)
        super().__init__(rollout_config, model_config, server_adapter=adapter)
        self._settings = settings
        self._server: ray.actor.ActorHandle | None = None
        self._device = get_platform().current_device()
        self._engine = ThreadPoolExecutor(1, thread_name_prefix="engine", initializer=self._use_device)

    def place(self) -> Place:
        engine = self.server_adapter.worker.engine
        return Place(
            engine.get_data_parallel_rank(), engine.get_data_parallel_size(), engine.is_mp_src_rank_with_outputs()
        )

    def attach(self, server: ray.actor.ActorHandle) -> None:
        self._server = server

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    async def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call the checkpoint engine as verl does, but join a process group only when the server allows it."""
        does = partial(super().execute_checkpoint_engine, method, *args, **kwargs)
        if method != "init_process_group":
            return does()
        try:
            await self._tell("begin_join")
            return await asyncio.to_thread(does)
        finally:
            await self._tell("joined")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int) -> str:
        """Receive and stage version ``global_steps``; return the checksum of the staged weights.

        Raises:
            WeightLoadError: the weights are incomplete or do not fit the model. The live weights have not changed.
        """
        await self._tell("begin_load", global_steps, self._settings.timeout_s)
        try:
            checksum = await asyncio.to_thread(self._receive, global_steps)
        except Exception as error:  # After any failure, requests that wait for this version must fail.
            await self._tell("load_failed", f"{type(error).__name__}: {error}")
            if isinstance(error, StagingRefused):
                raise WeightLoadError(
                    f"log-prob server {self.server_adapter.replica_rank} refuses the weights: {error}"
                ) from error
            raise
        await self._tell("staged")
        return checksum

    stage_weights = update_weights

    def _receive(self, version: int) -> str:
        self._use_device()
        weights = self.checkpoint_engine.receive_weights(global_steps=version)
        return asyncio.run(self.server_adapter.update_weights(weights, global_steps=version))

    async def promote(self, version: int) -> None:
        await self._on_engine(lambda: self.server_adapter.swap(version))

    async def score(self, rows: Sequence[np.ndarray]) -> list[np.ndarray] | None:
        """Score sequences of token ids, int32 (L,) each, with the live weights.

        All workers with the same data-parallel rank must get the same sequences at the same time.

        Returns:
            Log-probs and entropies of each sequence, float32 (2, L), with 0 at index 0. None on a worker whose
            `Place.has_output` is False.
        """
        return await self._on_engine(lambda: self._score(rows))

    async def _on_engine(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._engine, self._compute, work)

    def _compute(self, work: Callable[[], Any]) -> Any:
        """Run ``work``. If it takes longer than half of the server's time limit, print the stacks of all threads."""
        faulthandler.dump_traceback_later(self._settings.timeout_s / 2, file=sys.__stderr__ or sys.stderr)
        try:
            return work()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _score(self, rows: Sequence[np.ndarray]) -> list[np.ndarray] | None:
        sequences = [torch.from_numpy(row.astype(np.int64)) for row in rows]
        output = self.server_adapter.score(to_batch(sequences, self._settings.temperature))
        return None if output is None else from_batch(output)

    async def _tell(self, what: str, *arguments: Any) -> None:
        answer = getattr(self._server, what).remote(*arguments)
        async with asyncio.timeout(self._settings.timeout_s):
            await answer

    def _use_device(self) -> None:
        """Select the process's accelerator on a new thread, which would otherwise use the machine's first one."""
        get_platform().set_device(self._device)

# SPDX-License-Identifier: Apache-2.0
"""The engine of one rank of a log-prob server: it computes forward passes, and loads streams of weights.

Contract: `ModelEngineServerAdapter.update_weights` *stages* a version, that is, copies it to buffers next to the live
weights, and returns when every rank has the complete version in its buffers. The engine computes with the live weights,
which stay on their device, until `swap` makes the staged ones live. If one rank cannot load a stream, all ranks refuse
the version with the same error, the live weights do not change, and the next stream is loaded as usual. The buffers are
allocated once, on the device or in host memory, and are as large as the local shards. Shown by
tests/integration/test_model_engine_adapter.py and test_staged_shards.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import (
    EngineConfig,
    FSDPOptimizerConfig,
    McoreEngineConfig,
    McoreOptimizerConfig,
    OptimizerConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.rollout.base import BaseRollout

from recipe.async_engine.weights.staged import Intake, NamedTensors, StagedWeights, StagingRefused


class Shards(Protocol):
    """One rank's shards of a model, and how the tensors of a weight stream are copied to them."""

    def accept(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Return the new values of this rank's shards that can be computed now that ``tensor`` has arrived.

        Args:
            name: the tensor's Hugging Face name.
            tensor: a full tensor of the stream. Its memory may be overwritten before the next call.

        Returns:
            Pairs (live local shard, its new value) of equal shape. The result is empty if the rank has no shard of the
            tensor, or if the shard also depends on tensors that have not arrived.

        Raises:
            StagingRefused: the model has no tensor of this name, or the tensor has a wrong shape.
        """

    def missing(self) -> list[str]:
        """Return the names of tensors that have not arrived and are needed for this rank's shards."""

    def reset(self) -> None:
        """Forget which tensors have arrived."""


class StagedShards(StagedWeights):
    """The staged weights of one rank of a log-prob server.

    Args:
        group: gloo group in which all ranks of the model agree whether a stream was loaded.
        in_host: whether staged weights are kept in host memory instead of on the device.
    """

    def __init__(self, shards: Shards, group: dist.ProcessGroup, in_host: bool = False) -> None:
        self._shards = shards
        self._group = group
        self._in_host = in_host
        # For the address of each live shard, the pair (live shard, staged copy).
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def _begin(self) -> None:
        self._shards.reset()

    def _load(self, weights: NamedTensors) -> None:
        for name, tensor in weights:
            for live, new in self._shards.accept(name, tensor):
                if live.numel() == 0:
                    # A rank's shard of a small parameter may be empty. Skip it: all empty shards have the address 0, so
                    # the address cannot be the key.
                    continue
                if live.data_ptr() not in self._buffers:
                    device = torch.device("cpu") if self._in_host else live.device
                    self._buffers[live.data_ptr()] = live, torch.empty_like(live, device=device)
                self._buffers[live.data_ptr()][1].copy_(new)

    def _find_problem(self) -> str | None:
        missing = self._shards.missing()
        return f"{len(missing)} tensors never came, among them {missing[0]}" if missing else None

    def _agreed(self, problem: str | None) -> str | None:
        self._shards.reset()
        verdicts: list[str | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(verdicts, problem, group=self._group)
        problems = [f"rank {rank}: {verdict}" for rank, verdict in enumerate(verdicts) if verdict is not None]
        return "; ".join(problems) or None

    def _swap(self) -> None:
        for live, staged in self._buffers.values():
            live.copy_(staged)


Stream = Generator[tuple[str, torch.Tensor], None, None] | AsyncGenerator[tuple[str, torch.Tensor], None]


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of one rank of a log-prob server.

    Attributes:
        engine: verl's configuration of the training engine, FSDP2 or Megatron, with parameter offloading off.
        temperature: sampling temperature, by which logits are divided.
        host_staging: whether staged weights are kept in host memory instead of on the device.
        timeout_s: time limit in seconds of each wait: for weights, for the other ranks, and for the server.
    """

    engine: EngineConfig
    temperature: float = 1.0
    host_staging: bool = False
    timeout_s: float = 600.0


class ModelEngineServerAdapter(BaseRollout):
    """A verl training worker that only runs forward passes, and gets new weights like a rollout worker of verl.

    ``config`` is verl's rollout configuration, of which only the settings of the checkpoint engine are used.
    """

    def __init__(self, config: Any, model_config: Any, settings: WorkerSettings, replica_rank: int = 0) -> None:
        super().__init__(config, model_config, None)
        self.replica_rank = replica_rank
        self.worker = TrainingWorker(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=omega_conf_to_dataclass(model_config),
                engine_config=settings.engine,
                optimizer_config=_optimizer_config(settings.engine),
                checkpoint_config=CheckpointConfig(),
            )
        )
        self.worker.reset()
        keep_frequencies(self.worker.engine)
        # The ranks need a process group of their own to agree on staged weights, because the engine may be using its
        # groups.
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=settings.timeout_s))
        self._staged = StagedShards(_shards_of(self.worker.engine, group), group, settings.host_staging)

    async def resume(self, tags: list[str]) -> None:
        """Do nothing, because `release` does nothing."""

    async def release(self) -> None:
        """Do nothing, because the weights stay on their device."""

    async def update_weights(self, weights: Stream, global_steps: int, **_: Any) -> str:
        """Stage all tensors of ``weights`` as version ``global_steps``, and return their checksum.

        Raises:
            StagingRefused: at least one rank could not load the weights. All ranks raise the same error.
        """
        from verl.workers.rollout.utils import ensure_async_iterator

        intake = Intake(self._staged, global_steps)
        intake.begin()
        try:
            async for named_tensor in ensure_async_iterator(weights):
                intake.take([named_tensor])
        except Exception as error:  # The other ranks must learn of any error.
            intake.fail(error)
        await asyncio.to_thread(intake.end)
        if intake.problem is not None:
            raise StagingRefused(intake.problem)
        return intake.checksum

    def swap(self, version: int) -> None:
        """Make the staged weights of ``version`` the live ones on this rank. No batch may be in progress."""
        self._staged.swap(version)

    def score(self, batch: TensorDict) -> TensorDict | None:
        """Return log-probs and entropies under the live weights, or None on a rank without output."""
        return self.worker.infer_batch(batch)


def keep_frequencies(engine: Any) -> None:
    """Restore the rotary frequencies of an FSDP2 engine's model to fp32, the dtype that they have in the trainer.

    If a model is used only for inference, verl casts its buffers to `model_dtype` (fsdp/transformer_impl.py:333). It
    does not cast those of the trainer's model.
    """
    modules = engine.module.modules() if isinstance(engine.module, torch.nn.Module) else ()
    for module in modules:
        rounded = getattr(module, "inv_freq", None)
        if isinstance(rounded, torch.Tensor) and rounded.dtype != torch.float32:
            exact = type(module)(config=module.config)
            for name, buffer in exact.named_buffers(recurse=False):
                module.register_buffer(name, buffer.to(rounded.device), persistent=False)


def _optimizer_config(engine: EngineConfig) -> OptimizerConfig:
    """Return an optimizer configuration, which verl's engines require although nothing is trained here."""
    if isinstance(engine, McoreEngineConfig):
        return McoreOptimizerConfig(lr=0.0, total_training_steps=1, lr_warmup_steps=0)
    return FSDPOptimizerConfig(lr=0.0, total_training_steps=1)


def _shards_of(engine: Any, group: dist.ProcessGroup) -> Shards:
    if hasattr(engine, "bridge"):
        from recipe.async_engine.log_prob_servers.megatron_shards import MegatronShards

        tied = bool(engine.model_config.hf_config.tie_word_embeddings)
        return MegatronShards(engine.bridge, engine.module, group, tied)
    from recipe.async_engine.log_prob_servers.fsdp2_shards import FSDP2Shards

    return FSDP2Shards(engine.module)

# SPDX-License-Identifier: Apache-2.0
"""Finds, for each tensor of a weight stream, the local shard of a Megatron model to which it has to be copied.

The tensors of a stream have Hugging Face names. mbridge, the library that built the model, knows which tensors make up
a parameter (q, k and v; gate and up), how they are merged, and how the result is split across tensor-parallel ranks.
mbridge itself (0.15.1) can load weights only from files, not from a stream. Every rank gets every full tensor and keeps
its own shard, without a collective. Pipeline ranks ignore the tensors of other stages. If a parameter needs several
tensors, those that arrive first are kept as copies until all have arrived. Shown by
tests/integration/test_model_engine_adapter.py.

A process can have only one such model, because mbridge stores tied embeddings in a table that all bridges of a process
share (mbridge/models/qwen2.py:58).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from recipe.async_engine.weights.staged import StagingRefused

EXTRA_STATE = "_extra_state"
EXPERTS = ".mlp.experts.linear_fc"
# Trainers send a tensor with this name even if the output head shares the parameter of the embeddings. In that case the
# tensor is ignored.
TIED_HEAD = "lm_head.weight"


@dataclass
class _Parameter:
    """A local parameter, merged from the tensors named in ``parts``. ``here`` has those tensors that have arrived."""

    name: str
    live: torch.Tensor
    parts: Sequence[str]
    here: dict[str, torch.Tensor] = field(default_factory=dict)
    complete: bool = False


class MegatronShards:
    """Implements `adapter.Shards` for the parts of a Megatron model on one rank.

    Args:
        bridge: mbridge's bridge that built the model.
        group: process group in which all ranks of the model exchange the names of their tensors.
        tied: whether the output head of the model shares the parameter of the embeddings.
    """

    def __init__(self, bridge: Any, chunks: Sequence[torch.nn.Module], group: dist.ProcessGroup, tied: bool) -> None:
        self._bridge = bridge
        self._parameters: list[_Parameter] = []
        self._by_part: defaultdict[str, list[_Parameter]] = defaultdict(list)
        for chunk in chunks:
            state = chunk.state_dict()
            for local, name in bridge._weight_name_mapping_mcore_local_to_global(chunk).items():
                if EXTRA_STATE in local:
                    continue
                parameter = _Parameter(local, state[local], bridge._weight_name_mapping_mcore_to_hf(name))
                self._parameters.append(parameter)
                for part in parameter.parts:
                    self._by_part[part].append(parameter)
        names: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(names, sorted(self._by_part), group=group)
        self._known = {name for own in names for name in own} | ({TIED_HEAD} if tied else set())

    def accept(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        if name not in self._known:
            raise StagingRefused(f"the model has no tensor {name}")
        accepted = []
        for parameter in self._by_part.get(name, ()):
            alone = len(parameter.parts) == 1
            parameter.here[name] = tensor if alone else tensor.clone()
            if len(parameter.here) == len(parameter.parts):
                accepted.append((parameter.live, self._shard(parameter)))
                parameter.here.clear()
                parameter.complete = True
        return accepted

    def missing(self) -> list[str]:
        incomplete = [parameter for parameter in self._parameters if not parameter.complete]
        return sorted({part for parameter in incomplete for part in parameter.parts if part not in parameter.here})

    def reset(self) -> None:
        for parameter in self._parameters:
            parameter.here.clear()
            parameter.complete = False

    def _shard(self, parameter: _Parameter) -> torch.Tensor:
        """Merge the tensors of a parameter and return this rank's shard; raise StagingRefused if they do not fit."""
        parts = [parameter.here[part] for part in parameter.parts]
        ranks = self._bridge.mpu
        size, rank = (ranks.etp_size, ranks.etp_rank) if EXPERTS in parameter.name else (ranks.tp_size, ranks.tp_rank)
        shapes = ", ".join(f"{part} {tuple(tensor.shape)}" for part, tensor in parameter.here.items())
        try:
            whole = self._bridge._weight_to_mcore_format(parameter.name, parts)
            shard = self._bridge._weight_split_across_tp(parameter.name, whole, parameter.live, size)[rank]
        except (RuntimeError, AssertionError, IndexError) as error:
            raise StagingRefused(f"the tensors {shapes} cannot be merged into {parameter.name}: {error}") from error
        if shard.shape != parameter.live.shape:
            expected = tuple(parameter.live.shape)
            raise StagingRefused(
                f"the tensors {shapes} make a shard of {parameter.name} of shape {tuple(shard.shape)}, not {expected}"
            )
        return shard

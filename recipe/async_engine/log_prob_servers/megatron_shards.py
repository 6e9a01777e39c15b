# SPDX-License-Identifier: Apache-2.0
"""Finds the local shards of a Megatron model by the Hugging Face names of tensors in a stream of weights.

mbridge, which built the model, knows which tensors make up a parameter (q, k and v; gate and up), how they are merged
and how the result is split across tensor-parallel ranks, but can load only from a path (mbridge 0.15.1), not from a
stream. Every rank gets every full tensor and keeps its own shard, without a collective; pipeline ranks ignore other
stages' tensors. A tensor is copied if it has to wait for others of the same parameter. Shown by
tests/integration/test_model_engine_adapter.py.

Only one model per process is possible, because mbridge stores tied embeddings in a table that all bridges of the
process share (mbridge/models/qwen2.py:58).
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
# Trainers send the output head under this name even if it shares the parameter of the embeddings.
TIED_HEAD = "lm_head.weight"


@dataclass
class _Parameter:
    """A local parameter, merged from the stream's tensors ``parts``; those in ``here`` wait until all have come."""

    name: str
    live: torch.Tensor
    parts: Sequence[str]
    here: dict[str, torch.Tensor] = field(default_factory=dict)
    complete: bool = False


class MegatronShards:
    """`recipe.async_engine.log_prob_servers.adapter.Shards` of one rank's model chunks.

    Args:
        bridge: the mbridge bridge that built the chunks.
        chunks: this rank's model chunks.
        group: group of all ranks of the model, in which they exchange the names that they know.
        tied: whether the model's output head shares the embedding's parameter.
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
        """Merge the parameter's tensors and return this rank's shard; raise StagingRefused if they do not fit."""
        parts = [parameter.here[part] for part in parameter.parts]
        ranks = self._bridge.mpu
        size, rank = (ranks.etp_size, ranks.etp_rank) if EXPERTS in parameter.name else (ranks.tp_size, ranks.tp_rank)
        shapes = ", ".join(f"{part} {tuple(tensor.shape)}" for part, tensor in parameter.here.items())
        try:
            whole = self._bridge._weight_to_mcore_format(parameter.name, parts)
            shard = self._bridge._weight_split_across_tp(parameter.name, whole, parameter.live, size)[rank]
        except (RuntimeError, AssertionError, IndexError) as error:
            raise StagingRefused(f"{shapes} do not make up {parameter.name}: {error}") from error
        if shard.shape != parameter.live.shape:
            expected = tuple(parameter.live.shape)
            raise StagingRefused(f"{shapes}: a shard of {parameter.name} would be {tuple(shard.shape)}, not {expected}")
        return shard

# SPDX-License-Identifier: Apache-2.0
"""Finds, for each tensor of a weight stream, the local shard of an FSDP2 model to which it has to be copied.

The tensors of a stream have Hugging Face names. Every rank gets every full tensor and cuts its own shard out of it,
without a collective. If tensors share their storage (tied embeddings), the stream needs to contain only one of them.

Transformers 5 packs the experts of a layer into one parameter, but a stream contains a tensor for each expert. To find
where each expert is in the packed parameter, this module once runs, on tensors without data, the functions with which
verl and Transformers export a model as a stream. If a stream contains packed tensors, verl's `unfuse_moe_params` splits
them. If the tensors of a model's stream cannot be mapped to its parameters, the server does not start. Shown by
tests/integration/test_staged_shards.py and test_staged_experts.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from verl.utils.model import convert_weight_keys
from verl.workers.engine.fsdp.utils import unfuse_moe_params

from recipe.async_engine.weights.staged import StagingRefused


class _Place(NamedTuple):
    """The destination of one tensor of the weight stream.

    Attributes:
        shape: shape of the full tensor.
        local: view of this rank's live shard into which this rank's part of the tensor is copied; empty if this rank
            gets no part.
        live: parameter whose sharding applies to the tensor; None for an expert's tensor, which a rank gets completely
            or not at all.
    """

    shape: torch.Size
    local: torch.Tensor
    live: torch.Tensor | None


class FSDP2Shards:
    """Implements `adapter.Shards` for a module to which ``fully_shard`` was applied.

    Raises:
        StagingRefused: a tensor that trainers would send for this model belongs to none of its parameters.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        live: dict[str, torch.Tensor] = convert_weight_keys(dict(module.state_dict()), module)
        self._model_type = getattr(getattr(module, "config", None), "model_type", None)
        blank = {name: torch.empty(tensor.shape, device="meta") for name, tensor in live.items()}
        owners = {id(blank[name]): (tensor, _own_rows(tensor)) for name, tensor in live.items()}
        self._places: dict[str, _Place] = {}
        regions: dict[Any, _Place] = {}
        for name, part in unfuse_moe_params(blank.items(), self._model_type):
            self._places[name] = regions[_region(part)] = _place(name, part, *owners.get(id(_whole(part)), (None, [])))
        self._packed = {name: tensor.shape for name, tensor in live.items() if name not in self._places}
        # Trainers on Megatron send tensors under the names that they have in checkpoint files. Some of these differ
        # from the names in the model, so accept both.
        if isinstance(module, PreTrainedModel):
            for name, part in revert_weight_conversion(module, dict(blank)).items():
                if name not in live and _region(part) in regions:
                    self._places.setdefault(name, regions[_region(part)])
        # The name of each local shard, by the shard's address in memory. If a shard has several names, only the first.
        self._held: dict[int, str] = {}
        for name, place in self._places.items():
            if place.local.numel() > 0:
                self._held.setdefault(place.local.data_ptr(), name)
        self._accepted: set[int] = set()

    def accept(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        if name not in self._places and name not in self._packed:
            raise StagingRefused(f"the model has no tensor {name}")
        shape = self._packed[name] if name in self._packed else self._places[name].shape
        if tensor.shape != shape:
            raise StagingRefused(f"tensor {name} has the shape {tuple(tensor.shape)}, not {tuple(shape)}")
        if name in self._packed:
            parts = unfuse_moe_params([(name, tensor)], self._model_type)
            return [pair for part, values in parts for pair in self.accept(part, values)]
        _, local, live = self._places[name]
        self._accepted.add(local.data_ptr())
        return [(local, _shard_like(live, tensor))] if local.numel() > 0 else []

    def missing(self) -> list[str]:
        """Return the names of tensors that have not arrived and are needed for this rank's shards."""
        return [name for address, name in self._held.items() if address not in self._accepted]

    def reset(self) -> None:
        self._accepted.clear()


def _whole(part: torch.Tensor) -> torch.Tensor:
    return part if part._base is None else part._base


def _region(part: torch.Tensor) -> Any:
    return id(_whole(part)), part.storage_offset(), part.shape, part.stride()


def _own_rows(live: torch.Tensor) -> list[int]:
    """Return the indices of the rows of parameter ``live`` that this rank holds. verl's FSDP2 engine shards by rows."""
    return _shard_like(live, torch.arange(len(live))).tolist() if live.dim() > 0 else []


def _place(name: str, part: torch.Tensor, live: torch.Tensor | None, own: list[int]) -> _Place:
    """Return the destination of the stream's tensor ``name``.

    Args:
        part: the tensor without its data: a whole parameter, or a view of one.
        live: the live parameter to which the tensor belongs, if known.
        own: the indices of those rows of this parameter that this rank holds.

    Raises:
        StagingRefused: the tensor is neither a whole parameter nor part of one expert.
    """
    whole = _whole(part)
    if live is not None and part is whole:
        return _Place(part.shape, _local(live), live)
    last = part.storage_offset() + sum((size - 1) * step for size, step in zip(part.shape, part.stride(), strict=True))
    expert, begin = divmod(part.storage_offset(), whole.stride(0))
    if live is None or last // whole.stride(0) != expert:
        raise StagingRefused(f"the trainer's tensor {name} cannot be matched to a part of the model")
    local = _local(live)
    if expert not in own:
        return _Place(part.shape, local[:0], None)
    row = local[own.index(expert)]
    return _Place(part.shape, row.as_strided(part.shape, part.stride(), row.storage_offset() + begin), None)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard_like(live: torch.Tensor | None, full: torch.Tensor) -> torch.Tensor:
    if not isinstance(live, DTensor):
        return full
    placed = distribute_tensor(full.to(live.device), live.device_mesh, live.placements, src_data_rank=None)
    return placed.to_local()

# SPDX-License-Identifier: Apache-2.0
"""Staging of a LoRA adapter in an engine that has loaded the base weights from the model's files.

Contract: staging works as in `recipe.async_engine.weights.staged`. In addition, a stream is refused if it is not a
complete adapter, or if the shapes of its tensors differ from those of the previous adapter. No request may be in the
engine at the swap, because a request for a removed adapter fails. Each adapter gets a new name and number, by which
vLLM identifies cached prefixes, LoRA slots and loaded adapters. (verl uses the same name and number for all adapters,
verl/workers/rollout/vllm_rollout/utils.py:40.) Shown by tests/integration/test_staged_adapter.py and
tests/e2e/test_lora.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from recipe.async_engine.weights.staged import NamedTensors, StagedWeights, StagingRefused

FIRST, SECOND = ".lora_A.weight", ".lora_B.weight"
NO_FILE = "sent by the trainer"
"""Stands for an adapter's path, which vLLM's requests must have, although the adapters here have no file."""


@dataclass(frozen=True)
class AdapterName:
    """The identity of a LoRA adapter in the server and in its engine's workers: its number and its weights version."""

    number: int
    version: int

    @property
    def request(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's ``LoRARequest`` for this adapter."""
        name = f"version {self.version}, adapter {self.number}"
        return {"lora_name": name, "lora_int_id": self.number, "lora_path": NO_FILE}


class StagedAdapter(StagedWeights):
    """The staged weights of a LoRA adapter. ``peft_config`` has rank, alpha and target modules in PEFT's format."""

    def __init__(self, worker: Any, peft_config: Mapping[str, Any]) -> None:
        self._worker, self._config = worker, dict(peft_config)
        self._tensors: dict[str, torch.Tensor] = {}
        self._live: AdapterName | None = None
        self._shapes: dict[str, torch.Size] | None = None
        self.name: AdapterName | None = None
        """Identity of the next adapter. The caller must set this before the adapter's stream begins."""

    def _begin(self) -> None:
        self._tensors = {}

    def _load(self, weights: NamedTensors) -> None:
        self._tensors.update((name, tensor.to("cpu", copy=True)) for name, tensor in weights)

    def _find_problem(self) -> str | None:
        parts = {name: name.removesuffix(FIRST) + SECOND for name in self._tensors if name.endswith(FIRST)}
        strange = set(self._tensors) - {*parts, *parts.values()}
        missing = set(parts.values()) - set(self._tensors)
        if strange or missing or not parts:
            some = next(iter(sorted(strange or missing)), "nothing at all")
            return (
                f"it is not a complete LoRA adapter: {len(self._tensors)} tensors came, {len(strange)} belong to no "
                f"adapter, {len(missing)} are missing; among them {some}"
            )
        infinite = [name for name, tensor in self._tensors.items() if not bool(tensor.isfinite().all())]
        if infinite:
            return f"it has NaN or infinities in {infinite[0]}"
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        if self._shapes is not None and shapes != self._shapes:
            differing = sorted(name for name, _ in shapes.items() ^ self._shapes.items())
            return f"its tensors or their shapes differ from those of the previous adapter, among them {differing[0]}"
        return None

    def _swap(self) -> None:
        """Replace the live adapter by the staged one.

        Raises:
            StagingRefused: the model lacks a layer for some of the adapter's weights. vLLM would ignore these weights,
                and sample from another policy than the trainer's. After this error no adapter is live.
        """
        from verl.utils.vllm import TensorLoRARequest

        assert self.name is not None, "the adapter must be named before its stream begins"
        if self._live is not None:
            self._worker.remove_lora(self._live.number)
        self._worker.add_lora(
            TensorLoRARequest(**self.name.request, peft_config=self._config, lora_tensors=self._tensors)
        )
        ignored = self._worker.ignored_parts(self.name.number)
        if ignored:
            self._worker.remove_lora(self.name.number)
            raise StagingRefused(
                f"the model has no layer for {len(ignored)} parts of the adapter, among them {ignored[0]}: leave them "
                "out with actor_rollout_ref.model.exclude_modules, or set actor_rollout_ref.model.lora.merge=true"
            )
        self._live = self.name
        self._shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self._tensors = {}

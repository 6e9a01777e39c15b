# SPDX-License-Identifier: Apache-2.0
"""verl's FSDP2 engine for models with LoRA adapters, changed to send merged weights or only the adapters.

Contract: weights are merged in fp32 into new tensors, so the model's own weights do not change. The merged weights are
converted to the dtype of the base weight. (verl merges in place and undoes the merge afterwards,
verl/workers/engine/fsdp/transformer_impl.py:1063, so after a broken transfer the model keeps merged weights until the
generator is garbage-collected. verl also rounds merged weights to bfloat16.) Without merging
(``model.lora.merge=false``) this engine always sends the adapters. (verl sends the frozen base if trainer and rollout
are separate, verl/workers/engine_workers.py:772, verl #7495.) Shown by tests/integration/test_lora_engine.py
and tests/e2e/test_lora.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.lora import Embedding, Linear, LoraLayer
from torch.distributed.tensor import DTensor
from verl.utils.device import get_device_id
from verl.utils.fsdp_utils import fsdp_version, normalize_peft_param_name, offload_fsdp_model_to_cpu
from verl.utils.model import convert_weight_keys
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead

from recipe.async_engine.weights.snapshot import WeightsError

NamedTensors = Iterator[tuple[str, torch.Tensor]]


def merged_parameters(module: torch.nn.Module, device: Any) -> NamedTensors:
    """Yield (name in the base model, full tensor) for each parameter of a PEFT model, with its adapters merged.

    The model is sharded with ``fully_shard``. Gathering a tensor is a collective, so all ranks must iterate in step. On
    a single rank a tensor without an adapter is the model's own, not a copy.

    Raises:
        WeightsError: an adapter does more than add a product to a weight (DoRA, for example), or its weight is shared
            with a layer that does not have this adapter.
    """
    adapted = {
        f"{prefix}.base_layer.weight": layer for prefix, layer in module.named_modules() if isinstance(layer, LoraLayer)
    }
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, layer in adapted.items():
        _check_plain(name, layer)
        tied = [other for other, parameter in parameters.items() if parameter is parameters[name] and other != name]
        if tied:
            raise WeightsError(
                f"{name} has a LoRA adapter and is the same parameter as {tied[0]}, which lacks this adapter, so no "
                f"merged weight fits both. Exclude the layer of {name} from LoRA "
                "(actor_rollout_ref.model.exclude_modules)"
            )
    tensors = {name: (tensor, adapted.get(name)) for name, tensor in module.state_dict().items()}
    for name, (tensor, layer) in convert_weight_keys(normalize_peft_param_name(tensors), module).items():
        whole = _whole(tensor, device)
        yield name, whole if layer is None else _merged(whole, layer, device)


def _check_plain(name: str, layer: LoraLayer) -> None:
    biased = any(layer.lora_bias.get(adapter) for adapter in layer.active_adapters)
    if not isinstance(layer, Linear | Embedding) or layer.lora_variant or biased:
        kind = ", ".join(type(variant).__name__ for variant in layer.lora_variant.values()) or type(layer).__name__
        raise WeightsError(
            f"the adapter of {name} cannot be merged into a copy of the weight, because its kind is not supported "
            f"({kind}{' with a bias' if biased else ''}). Use plain LoRA adapters of linear and embedding layers "
            "(actor_rollout_ref.model.target_modules, lora_adapter_path)"
        )


def _whole(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    tensor = tensor.detach().to(device)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def _merged(base: torch.Tensor, layer: LoraLayer, device: Any) -> torch.Tensor:
    total = base.float()
    for adapter in layer.active_adapters:
        if isinstance(layer, Embedding):
            first, second = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
        else:
            first, second = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
        product = _whole(second, device).float() @ _whole(first, device).float()
        if isinstance(layer, Embedding) or getattr(layer, "fan_in_fan_out", False):
            product = product.T
        total = total + product * layer.scaling[adapter]
    return total.to(base.dtype)


class LoraSending(FSDPEngine):
    """Mixin that makes verl's FSDP engines send merged weights or only adapters. With FSDP1, verl's code merges."""

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **kwargs: Any
    ) -> tuple[Any, dict[str, Any] | None]:
        """Return an iterator of the tensors to send, and the adapters' configuration if only adapters are sent."""
        alone = self._is_lora and not self.model_config.lora.get("merge", False)
        return super().get_per_tensor_param(layered_summon, base_sync_done=base_sync_done or alone, **kwargs)

    def _merged_lora_per_tensor_param(self) -> NamedTensors:
        if fsdp_version(self.module) != 2:
            yield from super()._merged_lora_per_tensor_param()
            return
        try:
            yield from merged_parameters(self.module, get_device_id())
        finally:
            if self._is_offload_param:
                offload_fsdp_model_to_cpu(self.module)


class LoraFSDPEngineWithLMHead(LoraSending, FSDPEngineWithLMHead):
    """verl's FSDP engine for language models on an accelerator, with LoRA weights sent by `LoraSending`."""


def register(device: str, vendor: str) -> None:
    """Make verl use `LoraFSDPEngineWithLMHead` in this process, for language models on a vendor's accelerator.

    verl prefers an engine that is registered for a vendor to a general one. verl's own FSDP engines are general, so
    this one is chosen. On the CPU this function does nothing, because the CPU's engines
    (`recipe.laptop.platform.engines`) already derive from `LoraSending`.
    """
    for backend in ("fsdp", "fsdp2"):
        if device != "cpu" and (device, vendor) not in EngineRegistry._engines["language_model"][backend]:
            EngineRegistry.register("language_model", backend, device, vendor)(LoraFSDPEngineWithLMHead)

# SPDX-License-Identifier: Apache-2.0
"""verl's FSDP2 engines for the device "cpu": for the language model (actor, reference policy) and the value model.

They differ from verl's engines in three ways, because a run on a CPU would fail otherwise:

- FSDP1 is refused, because it broadcasts parameters from rank 0, which torch supports only on an accelerator
  (verl/workers/engine/fsdp/transformer_impl.py:444).
- Parameters are not offloaded to the CPU, where they are anyway. verl gives a forward-only engine
  ``CPUOffloadPolicy(pin_memory=True)`` (:462), but pinning memory needs an accelerator.
- The value model is loaded with the attention implementation of the model's configuration, whereas verl always uses
  flash-attention (verl/utils/model.py:649).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import verl.utils.model as verl_model
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead, FSDPEngineWithValueHead

from recipe.async_engine.core.errors import SettingError
from recipe.async_engine.weights.lora_engine import LoraSending

SUPPORTED_STRATEGY = "fsdp2"
DEFAULT_ATTENTION = "sdpa"


class _CPUEngineMixin(FSDPEngine):
    """The changes that both of verl's engines need on a CPU. A subclass must list this class before verl's engine."""

    engine_config: Any

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        if engine_config.strategy != SUPPORTED_STRATEGY:
            raise SettingError(
                "strategy",
                engine_config.strategy,
                f"{SUPPORTED_STRATEGY!r} on a CPU (FSDP1 synchronises its parameters on an accelerator)",
                "Set actor_rollout_ref.actor.strategy=fsdp2, and critic.strategy=fsdp2 if there is a critic.",
            )
        super().__init__(model_config, engine_config, *args, **kwargs)

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        configured = self.engine_config
        offloading = configured.forward_only or configured.offload_policy
        self.engine_config = dataclasses.replace(configured, forward_only=False, offload_policy=False)
        try:
            built = super()._build_fsdp_module(module)
        finally:
            self.engine_config = configured
        if offloading:
            self._is_offload_param = False
            self._is_offload_optimizer = False
        return built


class CPUFSDPEngineWithLMHead(_CPUEngineMixin, LoraSending, FSDPEngineWithLMHead):
    """verl's FSDP2 engine for actor and reference policy, on a CPU with gloo as the communication backend."""


class CPUFSDPEngineWithValueHead(_CPUEngineMixin, FSDPEngineWithValueHead):
    """verl's FSDP2 engine for the critic, on a CPU with gloo as the communication backend."""

    def _build_module(self) -> torch.nn.Module:
        # The replacement takes effect because verl's engine looks the loader up in its module at each call
        # (transformer_impl.py:291).
        stock = verl_model.load_valuehead_model
        verl_model.load_valuehead_model = _load_value_model
        try:
            return super()._build_module()
        finally:
            verl_model.load_valuehead_model = stock


def _load_value_model(
    local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool
) -> torch.nn.Module:
    from transformers import AutoModelForTokenClassification

    attention = getattr(model_config, "_attn_implementation", None)
    if attention is None or attention.startswith("flash_attention"):
        attention = DEFAULT_ATTENTION
    return AutoModelForTokenClassification.from_pretrained(
        local_path,
        torch_dtype=torch_dtype,
        config=model_config,
        attn_implementation=attention,
        trust_remote_code=trust_remote_code,
    )


def register() -> None:
    """Register the engines for the language model and for the value model with verl for the device "cpu", once per
    process.
    """
    # Register the engines under FSDP1's name too, so that FSDP1 is refused with advice instead of verl's "No engine
    # registered".
    for model_type, engine in (
        ("language_model", CPUFSDPEngineWithLMHead),
        ("value_model", CPUFSDPEngineWithValueHead),
    ):
        for backend in ("fsdp", "fsdp2"):
            if "cpu" not in EngineRegistry._engines[model_type][backend]:
                EngineRegistry.register(model_type=model_type, backend=backend, device="cpu")(engine)

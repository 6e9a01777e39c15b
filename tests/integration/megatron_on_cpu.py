# SPDX-License-Identifier: Apache-2.0
"""Replacements with which megatron-core builds and runs a model without an accelerator. For tests only.

Transformer Engine's modules are replaced by plain ones with the same parameter names, so that mbridge's name mapping
and sharding run as on an accelerator. They compute the same mathematics with other kernels.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import random as parallel_random
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.moe.experts import TEGroupedMLP

CPU = torch.device("cpu")
FACTORIES = ("zeros", "ones", "empty", "tensor", "full")
TRANSFORMER_CONFIG = {"use_cpu_initialization": True, "masked_softmax_fusion": False, "attention_softmax_in_fp32": True}


class Attention(DotProductAttention):
    """Causal attention over packed and padded sequences; the mask is ignored, as Transformer Engine does if causal."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        if packed_seq_params is None:
            inputs = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            return self.attend(*inputs).permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)
        ends = packed_seq_params.cu_seqlens_q_padded
        ends = (packed_seq_params.cu_seqlens_q if ends is None else ends).tolist()
        parts = []
        for begin, end in itertools.pairwise(ends):
            inputs = (x[begin:end].transpose(0, 1)[None] for x in (query, key, value))
            parts.append(self.attend(*inputs)[0].transpose(0, 1))
        return torch.cat(parts).reshape(query.shape[0], -1)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=True
        )


class NormAndLinear(ColumnParallelLinear):
    """Linear layer with the normalisation of its input, under the parameter names of Transformer Engine's."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **settings: Any) -> None:
        super().__init__(input_size, output_size, config=config, **settings)
        self.epsilon = config.layernorm_epsilon
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel

    def forward(self, inputs: torch.Tensor, *args: Any, **settings: Any) -> Any:
        normed = F.rms_norm(inputs, (inputs.shape[-1],), self.layer_norm_weight, self.epsilon)
        return super().forward(normed, *args, **settings)


class GroupedLinear(torch.nn.Module):
    """A weight for each expert, under the parameter names of Transformer Engine's; not tensor parallel."""

    def __init__(self, experts: int, input_size: int, output_size: int, *, config: Any, **_: Any) -> None:
        super().__init__()
        for expert in range(experts):
            weight = torch.empty(output_size, input_size, dtype=config.params_dtype)
            self.register_parameter(f"weight{expert}", torch.nn.Parameter(weight))

    def forward(self, inputs: torch.Tensor, tokens_of_experts: list[int]) -> tuple[torch.Tensor, None]:
        parts = inputs.split(tokens_of_experts)
        return torch.cat([part @ weight.T for part, weight in zip(parts, self.parameters(), strict=True)]), None


class Norm(torch.nn.RMSNorm):
    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class Provider(LocalSpecProvider):
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return NormAndLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return Norm

    def core_attention(self) -> type:
        return Attention

    def grouped_mlp_modules(self, *_: Any) -> tuple[type, MLPSubmodules]:
        return TEGroupedMLP, MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)


class OnCPU:
    """``torch`` whose factories create tensors on the CPU if an accelerator is requested."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(torch, name)
        if name not in FACTORIES:
            return function

        def make(*args: Any, **settings: Any) -> Any:
            if str(settings.get("device", "")).startswith("cuda"):
                settings["device"] = CPU
            return function(*args, **settings)

        return make


def as_on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return the tensor as if copied from an accelerator; megatron-core skips the copy for CPU tensors."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def install() -> None:
    """Patch this process permanently."""
    torch.cuda.current_device = lambda: CPU
    torch.cuda.synchronize = lambda *_: None
    # The token dispatcher of experts does work on a stream of its own, which is done at once here.
    torch.cuda.Stream = torch.cuda.current_stream = mock.MagicMock
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, device=None: self
    parallel_random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    schedules.torch = OnCPU()
    gpt_layer_specs.TESpecProvider = Provider
    gpt_layer_specs.TENorm = Norm
    # Used although it is not defined without Transformer Engine.
    moe_utils.te_general_gemm = None
    token_dispatcher.maybe_move_tensor_to_cpu = as_on_host

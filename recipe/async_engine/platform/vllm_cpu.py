# SPDX-License-Identifier: Apache-2.0
"""vLLM worker extension that lets the CPU build of vLLM take new weights, as often as wanted.

After the first load vLLM packs each linear layer for its CPU kernels and puts an empty parameter, without loader, in
the place of ``layer.weight`` (vllm/model_executor/layers/linear.py:202, .../layers/utils.py:269), so that every later
load fails with "'Parameter' object has no attribute 'weight_loader'". Here the weight is kept. verl runs
``process_weights_after_loading`` after each sync, and that packs the layers again from the new weights: the kernels,
and the bits they compute, are those of stock vLLM. The price is a second copy of the weights in each vLLM worker.

Experts are packed in place of the loaded ones, and at the first load alone: a later one would be read as if it were
packed (vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py:165). Here each load is as the first one.

Use it by name: ``+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=
recipe.async_engine.platform.vllm_cpu.CPUWorkerExtension``.
"""

from __future__ import annotations

from typing import Any

import torch

# Imported here, while the engine starts, or the first weight sync would pay for it.
import verl.workers.rollout.vllm_rollout.bucketed_weight_transfer  # noqa: F401
import vllm
import vllm.model_executor.layers.utils as vllm_layers
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from recipe.async_engine.platform.versions import VLLM_SUPPORTED, require_version

_MARK = "_recipe_keeps_weight"


def keep_loadable_weights() -> None:
    """Make vLLM keep ``layer.weight`` beside the packed copy, and pack experts after each load.

    Must run before the model is loaded; once is enough.

    Another release of vLLM than this was written for raises UnsupportedVersionError.
    """
    require_version("vllm", vllm.__version__, VLLM_SUPPORTED, "Reloading weights on a CPU")
    original = vllm_layers.dispatch_cpu_unquantized_gemm
    if hasattr(original, _MARK):
        return

    def dispatch_cpu_unquantized_gemm(layer: torch.nn.Module, remove_weight: bool) -> None:
        del remove_weight
        original(layer, remove_weight=False)

    setattr(dispatch_cpu_unquantized_gemm, _MARK, True)
    vllm_layers.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm
    pack_experts = UnquantizedFusedMoEMethod.process_weights_after_loading

    def process_weights_after_loading(self: Any, layer: torch.nn.Module) -> None:
        self.moe_kernel = None  # by which vLLM knows that it has packed before
        pack_experts(self, layer)

    UnquantizedFusedMoEMethod.process_weights_after_loading = process_weights_after_loading


class CPUWorkerExtension(vLLMColocateWorkerExtension):
    """verl's own extension, in a vLLM worker whose weights stay loadable."""

    def __new__(cls, **kwargs: Any) -> CPUWorkerExtension:
        keep_loadable_weights()
        return super().__new__(cls, **kwargs)

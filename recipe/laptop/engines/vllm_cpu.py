# SPDX-License-Identifier: Apache-2.0
"""A vLLM worker extension with which the CPU build of vLLM can load weights more than once.

Linear layers: after the first load, vLLM packs each weight for its CPU kernels and replaces ``layer.weight`` by an
empty parameter without a loader (vllm/model_executor/layers/linear.py:202, .../layers/utils.py:269), so every later
load fails with "'Parameter' object has no attribute 'weight_loader'". This extension keeps ``layer.weight``. After each
weight sync, verl runs ``process_weights_after_loading``, which packs the layers again, so kernels and results are those
of stock vLLM. The price is a second copy of the weights in each vLLM worker.

Experts: vLLM packs the weights of experts only once, when it creates their kernel, and replaces their parameters by the
packed weights (vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py:155). The weights of a later load,
which are not packed, would silently be used as if they were. This extension packs them after every load, and stores the
packed weights elsewhere.

The extension also supports ``rollout.data_parallel_size`` above 1 on a CPU (`CPUWorkerExtension._get_zmq_handle`).

To use the extension, set ``+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=
recipe.laptop.engines.vllm_cpu.CPUWorkerExtension``.
"""

from __future__ import annotations

from typing import Any

import torch

# Import this module while the engine starts; otherwise the first weight sync would have to wait for the import.
import verl.workers.rollout.vllm_rollout.bucketed_weight_transfer  # noqa: F401
import vllm
import vllm.model_executor.layers.utils as vllm_layers
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from recipe.async_engine.supported import require_version

VLLM_SUPPORTED = "==0.28.*"
_MARK = "_recipe_keeps_weight"
_EXPERTS = ("w13_weight", "w2_weight")


def keep_loadable_weights() -> None:
    """Make vLLM keep ``layer.weight`` in addition to the packed copy. Call this before a model is loaded.

    Raise WrongInstallation if the change was not written for the installed release of vLLM.
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
    _keep_loadable_experts()


def _keep_loadable_experts() -> None:
    process, apply = UnquantizedFusedMoEMethod.process_weights_after_loading, UnquantizedFusedMoEMethod.apply_monolithic

    def process_weights_after_loading(self: Any, layer: torch.nn.Module) -> None:
        loadable = {name: getattr(layer, name) for name in _EXPERTS}
        self.moe_kernel = None
        process(self, layer)
        layer.packed_experts = {name: getattr(layer, name).data for name in _EXPERTS}
        for name, parameter in loadable.items():
            setattr(layer, name, parameter)

    def apply_monolithic(self: Any, layer: torch.nn.Module, *arguments: Any, **settings: Any) -> torch.Tensor:
        return apply(self, _PackedLayer(layer), *arguments, **settings)

    UnquantizedFusedMoEMethod.process_weights_after_loading = process_weights_after_loading
    UnquantizedFusedMoEMethod.apply_monolithic = apply_monolithic


class _PackedLayer:
    """A layer of experts in the form that vLLM's kernel needs: its weight attributes are the packed weights."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        packed = self._layer.packed_experts
        return packed[name] if name in packed else getattr(self._layer, name)


class CPUWorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension of a vLLM worker, changed so that a worker on a CPU can load weights more than once."""

    local_rank: int
    model_runner: Any

    def __new__(cls, **kwargs: Any) -> CPUWorkerExtension:
        keep_loadable_weights()
        return super().__new__(cls, **kwargs)

    def _get_zmq_handle(self) -> str:
        # verl derives the name of the socket from which a worker gets weights from `local_rank`, which must therefore
        # be unique on the machine. With data parallelism on an accelerator, vLLM numbers the workers of all engine
        # cores consecutively (gpu_worker.py:337). On a CPU it does not, so this method does it.
        parallel, own = self.model_runner.vllm_config.parallel_config, self.local_rank
        self.local_rank = own + (parallel.data_parallel_rank_local or 0) * parallel.world_size
        try:
            return super()._get_zmq_handle()
        finally:
            self.local_rank = own

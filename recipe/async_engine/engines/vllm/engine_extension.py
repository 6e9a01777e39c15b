# SPDX-License-Identifier: Apache-2.0
"""The extension of a vLLM worker that receives weights on a thread during generation, and then makes them live.

vLLM mixes `StagingExtension` into its worker class, and `collective_rpc` calls its methods. Contract: each call returns
quickly, except for the first `begin_staging`, which creates a second instance of the model. The weights arrive as a
stream from the weight worker on the same node, through verl's socket, and shared memory or CUDA IPC. After an error the
stream is read to its end, so that the sender does not block, and `staging_outcome` reports the error.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from verl.utils.vllm.patch import patch_vllm_moe_model_weight_loader
from verl.utils.vllm.vllm_quant_utils import is_quantized_model
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.config import VllmConfig
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from recipe.async_engine.core.cuts import sampled_before
from recipe.async_engine.engines.staged_model import LOADED_IN_PLACE_ONLY, StagedModel, pin, wide_parameters
from recipe.async_engine.engines.vllm.continued_answers import patch_worker
from recipe.async_engine.engines.vllm.staged_adapter import AdapterName, StagedAdapter
from recipe.async_engine.engines.weight_stream import StagingWorker
from recipe.async_engine.weights.staged import StagingRefused


def second_instance(vllm_config: VllmConfig, device: torch.device) -> nn.Module:
    """Return another instance of the engine's model, uninitialized and not registered in the engine."""
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    # vLLM finds the layers of the live model through these two registries. They must not change, so the second model
    # gets its own.
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    # Leave inference mode, because a tensor that is created in inference mode can be written to only in that mode.
    with torch.inference_mode(False), set_default_torch_dtype(config.model_config.dtype), device:
        return initialize_model(vllm_config=config, model_config=config.model_config).eval()


def staged_model_of(live: nn.Module, vllm_config: VllmConfig, device: torch.device, in_host: bool) -> StagedModel:
    """Return the staging area for the model ``live`` of a vLLM worker, on the device or in host memory."""
    spare = second_instance(vllm_config, torch.device("cpu") if in_host else device)
    if in_host and device.type != "cpu":
        pin(spare)
    patch_vllm_moe_model_weight_loader(spare)
    return StagedModel(
        live,
        spare,
        lambda model: process_weights_after_loading(model, vllm_config.model_config, device),
        in_host=in_host,
    )


class StagingExtension(StagingWorker, vLLMColocateWorkerExtension):
    """verl's extension of a vLLM worker, which can also receive new weights without changing the live ones."""

    device: Any
    model_runner: Any

    def __new__(cls, **kwargs: Any) -> StagingExtension:
        patch_worker(kwargs["vllm_config"])
        return super().__new__(cls, **kwargs)

    def wide_parameters(self) -> list[str]:
        return wide_parameters(self.model_runner.get_model(), self.model_runner.vllm_config.model_config.dtype)

    def begin_staging(
        self,
        version: int,
        use_shm: bool,
        timeout_s: float,
        in_host: bool,
        adapter: tuple[int, dict[str, Any]] | None = None,
    ) -> None:
        """Start to receive the next stream of weights as ``version``.

        Args:
            use_shm: whether the sender uses shared memory instead of CUDA IPC.
            timeout_s: seconds without a message after which the stream fails.
            in_host: whether the weights are staged in host memory instead of on the device.
            adapter: number and PEFT configuration of the LoRA adapter in the stream; None if the stream has all weights
                of the model.

        Raises:
            StagingRefused: weights of this engine cannot be staged, or an earlier stream does not end.
        """
        self._end_stream(timeout_s)
        if adapter is not None:
            number, peft_config = adapter
            if not isinstance(self._staged_model, StagedAdapter):
                self._staged_model = StagedAdapter(self, peft_config)
            self._staged_model.name = AdapterName(number, version)
        elif self._staged_model is None:
            if is_quantized_model(self.model_runner.vllm_config) or self._get_drafter_model() is not None:
                raise StagingRefused(LOADED_IN_PLACE_ONLY)
            self._staged_model = staged_model_of(
                self.model_runner.get_model(), self.model_runner.vllm_config, self.device, in_host
            )
        self._receive(self._staged_model, version, self._get_zmq_handle(), self.device, use_shm, timeout_s)

    def ignored_parts(self, number: int) -> list[str]:
        """Return the names of layers for which the LoRA adapter ``number`` has weights, but that the model lacks."""
        if self.model_runner.vllm_config.parallel_config.pipeline_parallel_size > 1:
            return []  # A worker does not know the layers of other pipeline stages.
        manager = self.model_runner.lora_manager._adapter_manager
        adapter = manager.get_adapter(number)
        taken = {id(adapter.get_lora(name)) for name in manager.modules}
        return [name for name, part in adapter.loras.items() if id(part) not in taken]

    def swap_staged(self, version: int) -> dict[str, int]:
        """Make the staged weights the live ones.

        Returns:
            The number of tokens that the engine has sampled for each request, by the engine's request id. If a request
            continues an interrupted answer, the tokens from before the interruption are not counted.

        Raises:
            StagingRefused: no complete weights of this version are staged.
        """
        self._make_live(version)
        return {
            name: len(state.output_token_ids) - len(sampled_before(state.sampling_params))
            for name, state in self.model_runner.requests.items()
        }

# SPDX-License-Identifier: Apache-2.0
"""The extension of a vLLM worker that receives weights on a thread during generation, and then swaps them in.

vLLM mixes the class into its worker and calls its methods by `collective_rpc`. Contract: each call returns quickly,
except for the first `begin_staging`, which creates the second instance of the model. The weights come as a stream from
the weight worker on the same node, through verl's socket and shared memory or CUDA IPC. A stream with an error is read
to its end, so that the sender does not block; `staging_outcome` reports the error.
"""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import torch
import zmq
from torch import nn
from verl.plugin.platform import get_platform
from verl.utils.vllm.patch import patch_vllm_moe_model_weight_loader
from verl.utils.vllm.vllm_quant_utils import is_quantized_model
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.config import VllmConfig
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from recipe.async_engine.core.cuts import sampled_before
from recipe.async_engine.engines.vllm.continued_answers import patch_worker
from recipe.async_engine.engines.vllm.staged_adapter import AdapterName, StagedAdapter
from recipe.async_engine.engines.vllm.staged_model import StagedModel
from recipe.async_engine.engines.vllm.weight_worker import COMPLETE, LOOK_MS, UNDER_WAY
from recipe.async_engine.weights.staged import Intake, NamedTensors, StagedWeights, StagingRefused


class PatientSocket:
    """A zmq REP socket whose receive raises StagingRefused after ``timeout_s`` seconds or once ``stopped`` is set."""

    def __init__(self, socket: zmq.Socket[bytes], timeout_s: float, stopped: threading.Event) -> None:
        self._socket, self._timeout_s, self._stopped = socket, timeout_s, stopped
        socket.setsockopt(zmq.LINGER, 0)
        self.send, self.close = socket.send, socket.close

    def recv_pyobj(self) -> Any:
        deadline = time.monotonic() + self._timeout_s
        while not self._socket.poll(LOOK_MS):
            if self._stopped.is_set():
                raise StagingRefused("another stream of weights took its place")
            if time.monotonic() > deadline:
                raise StagingRefused(f"the sender of the weights said nothing for {self._timeout_s:g} s")
        return self._socket.recv_pyobj()


class DeadlineReceiver(BucketedWeightReceiver):
    """verl's receiver, but it gives up after ``timeout_s`` seconds without a message, or when `stop` is called."""

    socket: Any

    def __init__(self, *args: Any, timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timeout_s = timeout_s
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    def _init_socket(self) -> None:
        super()._init_socket()
        self.socket = PatientSocket(self.socket, self._timeout_s, self._stopped)


def second_instance(vllm_config: VllmConfig, device: torch.device) -> nn.Module:
    """Create another, uninitialized instance of the engine's model, and keep it out of the engine's registries."""
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    # Layers register themselves in these two, where the engine looks up the live layers; the copy gets empty ones.
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    # Leave inference mode, because tensors that are created in it can be written to only in inference mode.
    with torch.inference_mode(False), set_default_torch_dtype(config.model_config.dtype), device:
        return initialize_model(vllm_config=config, model_config=config.model_config).eval()


def staged_model_of(live: nn.Module, vllm_config: VllmConfig, device: torch.device, in_host: bool) -> StagedModel:
    """Create the staging area for a vLLM worker's model, on its device or in host memory."""
    spare = second_instance(vllm_config, torch.device("cpu") if in_host else device)
    if in_host and device.type != "cpu":
        for parameter in spare.parameters():
            parameter.data = parameter.data.pin_memory()
    patch_vllm_moe_model_weight_loader(spare)
    return StagedModel(
        live,
        spare,
        lambda model: process_weights_after_loading(model, vllm_config.model_config, device),
        in_host=in_host,
    )


class Staging:
    """Receives one stream of weights into the staging area, on its own thread."""

    def __init__(self, staged: StagedWeights, version: int, receiver: DeadlineReceiver, device: Any) -> None:
        self._receiver, self._device = receiver, device
        self._intake = Intake(staged, version)
        self._thread = threading.Thread(target=self._run, name="weight-staging", daemon=True)
        self._thread.start()

    @property
    def outcome(self) -> str:
        """`UNDER_WAY`, `COMPLETE` followed by the checksum of the loaded weights, or an error message."""
        if self._thread.is_alive():
            return UNDER_WAY
        return self._intake.problem or COMPLETE + self._intake.checksum

    def stop(self, timeout_s: float) -> bool:
        """Stop receiving, even if the sender has disappeared; return whether the thread ended within ``timeout_s``."""
        self._receiver.stop()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        get_platform().set_device(self._device)
        self._intake.begin()
        try:
            self._receiver.receive_weights(self._take)
        except Exception as error:  # Any error is reported as the outcome of this stream.
            self._intake.fail(error)

    def _take(self, weights: NamedTensors, is_last: bool) -> None:
        self._intake.take(weights)
        if is_last:
            # Set the outcome before the sender gets its reply, since the sender may ask for it next.
            self._intake.end()


class StagingExtension(vLLMColocateWorkerExtension):
    """verl's worker extension with a staging area for the next weights added."""

    device: Any
    model_runner: Any
    _staged_model: StagedWeights | None = None
    _staging: Staging | None = None

    def __new__(cls, **kwargs: Any) -> StagingExtension:
        patch_worker(kwargs["vllm_config"])
        return super().__new__(cls, **kwargs)

    def wide_parameters(self) -> list[str]:
        """Return the names of parameters that this engine holds in a wider dtype than the model's."""
        width = self.model_runner.vllm_config.model_config.dtype.itemsize
        parameters = self.model_runner.get_model().named_parameters()
        return [name for name, found in parameters if found.is_floating_point() and found.dtype.itemsize > width]

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
            use_shm: the sender uses shared memory, not CUDA IPC.
            timeout_s: seconds without a message after which the stream fails.
            in_host: stage the weights in host memory instead of on the device.
            adapter: number and PEFT configuration of the LoRA adapter that the stream contains; None for full weights.

        Raises:
            StagingRefused: weights of this engine cannot be staged, or an earlier stream does not end.
        """
        if self._staging is not None and not self._staging.stop(timeout_s):
            raise StagingRefused(f"an earlier stream of weights has not ended within {timeout_s:g} s")
        if adapter is not None:
            number, peft_config = adapter
            if not isinstance(self._staged_model, StagedAdapter):
                self._staged_model = StagedAdapter(self, peft_config)
            self._staged_model.name = AdapterName(number, version)
        elif self._staged_model is None:
            if is_quantized_model(self.model_runner.vllm_config) or self._get_drafter_model() is not None:
                raise StagingRefused(
                    "weights of a quantized engine, or of one with a draft model, can only be loaded in place; set "
                    "async_training.weights.staging=none"
                )
            self._staged_model = staged_model_of(
                self.model_runner.get_model(), self.model_runner.vllm_config, self.device, in_host
            )
        receiver = DeadlineReceiver(self._get_zmq_handle(), self.device, use_shm=use_shm, timeout_s=timeout_s)
        self._staging = Staging(self._staged_model, version, receiver, get_platform().current_device())

    def ignored_parts(self, number: int) -> list[str]:
        """Return the names of layers that have weights in LoRA adapter ``number`` but no counterpart in the model."""
        if self.model_runner.vllm_config.parallel_config.pipeline_parallel_size > 1:
            return []  # A worker does not know the layers of other pipeline stages.
        manager = self.model_runner.lora_manager._adapter_manager
        adapter = manager.get_adapter(number)
        taken = {id(adapter.get_lora(name)) for name in manager.modules}
        return [name for name, part in adapter.loras.items() if id(part) not in taken]

    def staging_outcome(self) -> str:
        """Return `UNDER_WAY`, `COMPLETE` followed by a checksum, or the error message, for the last stream."""
        return UNDER_WAY if self._staging is None else self._staging.outcome

    def swap_staged(self, version: int) -> dict[str, int]:
        """Make the staged weights the live ones.

        Returns:
            By the engine's name of each request, the number of tokens that this engine has sampled for it, all of them
            with the old weights. Tokens that the request brought from an earlier interruption are not counted.

        Raises:
            StagingRefused: no complete weights of this version are staged.
        """
        if self._staged_model is None:
            raise StagingRefused("no weights have been staged")
        self._staged_model.swap(version)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return {
            name: len(state.output_token_ids) - len(sampled_before(state.sampling_params))
            for name, state in self.model_runner.requests.items()
        }

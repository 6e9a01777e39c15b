# SPDX-License-Identifier: Apache-2.0
"""The vLLM rollout server. `recipe.async_engine.engines.gated_server` has the contract."""

import argparse
import os
from collections.abc import Callable, Collection
from typing import Any

from verl.plugin.platform import get_platform
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from vllm.lora.request import LoRARequest
from vllm.utils.import_utils import resolve_obj_by_qualname

from recipe.async_engine.actors.sockets import sockets_folder
from recipe.async_engine.engines.gated_server import GatedServer
from recipe.async_engine.engines.http_gate import guard
from recipe.async_engine.engines.vllm.continued_answers import SCHEDULER, patch_output_processor
from recipe.async_engine.engines.vllm.engine_calls import call_each_worker, drop_computed, pause
from recipe.async_engine.engines.vllm.engine_extension import StagingExtension
from recipe.async_engine.engines.vllm.engine_settings import choose_runner, peft_config, refused_arguments
from recipe.async_engine.engines.vllm.outputs import VLLMOutputs
from recipe.async_engine.engines.vllm.staged_adapter import AdapterName
from recipe.async_engine.engines.weight_stream import part_id
from recipe.async_engine.engines.weights_gate import RolloutServerError
from recipe.async_engine.outside import CPU_WORKER_EXTENSION

WORKER_EXTENSION = "recipe.async_engine.engines.vllm.engine_extension.StagingExtension"


class GatedVLLMHttpServer(GatedServer, vLLMHttpServer):
    """verl's vLLM server, in which requests must pass a gate (`GatedServer`) before they reach the engine."""

    _outputs: VLLMOutputs

    def _post_init(self, cuda_visible_devices: str) -> None:
        # The engine's workers derive the name of the socket through which they get weights from this variable.
        os.environ["VERL_RAY_JOB_ID"] = part_id(self.node_rank)
        choose_runner(os.environ)
        os.environ.setdefault("VLLM_RPC_BASE_PATH", sockets_folder())
        super()._post_init(cuda_visible_devices)
        self._prepare_gate(VLLMOutputs)
        self._adapter: AdapterName | None = None
        self._coming: AdapterName | None = None

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        """Launch the server as verl does. If vLLM refuses its arguments, raise an error instead of exiting."""
        try:
            await super().launch_server(*args, **kwargs)
        except SystemExit as ended:
            raise refused_arguments(ended) from None

    async def run_server(self, args: argparse.Namespace) -> None:
        """Run verl's server with the gate in front of its HTTP endpoints and with changed methods of the engine."""
        args.middleware = [*args.middleware, guard(self.admit)]
        await super().run_server(args)
        self.engine.generate = self._outputs.watching(self._salted(self.engine.generate))
        self._outputs.processor = self.engine.output_processor
        patch_output_processor(self.engine.output_processor)
        # Before each request verl asks this method for the loaded adapters. Let verl find none, because `_salted` adds
        # the adapter to requests.
        self.engine.list_loras = no_adapters

    def _salted(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an engine's ``generate`` so that requests share cached prefixes only if they have the same weights
        version. If the trainer sends LoRA adapters, the wrapper also adds the current adapter to each request.
        """

        def salted(prompt: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(prompt, dict):
                prompt = {**prompt, "cache_salt": f"version {self.global_steps}"}
            if self._adapter is not None:
                kwargs["lora_request"] = LoRARequest(**self._adapter.request)
            return generate(prompt, *args, **kwargs)

        return salted

    async def begin_staging(self, version: int, use_shm: bool, timeout_s: float) -> None:
        """Make the engine's workers ready to receive version ``version`` into their staging areas."""
        adapter = None
        if self.lora_as_adapter:
            # The number also increases after a failed stream, so that no two adapters have the same number.
            number = 1 if self._coming is None else self._coming.number + 1
            self._coming = AdapterName(number, version)
            adapter = (number, peft_config(self.model_config))
        await self._call_each_worker("begin_staging", version, use_shm, timeout_s, self._stages_in_host, adapter)

    def _engine_has_died(self) -> bool:
        return bool(self.engine.errored)

    def _engine_requests(self) -> Collection[str]:
        requests: Collection[str] = self.engine.output_processor.request_states.keys()
        return requests

    async def _pause_engine(self, keep: bool) -> None:
        await pause(self.engine, "keep" if keep else "abort")

    async def _drop_computed(self) -> None:
        await drop_computed(self.engine)

    async def _call_each_worker(self, method: str, *args: Any) -> list[Any]:
        return await call_each_worker(self.engine, method, *args)

    async def swap(self, version: int, checksum: str) -> None:
        await super().swap(version, checksum)
        self._adapter = self._coming

    def _by_server_ids(self, counts: list[dict[str, int]]) -> dict[str, int]:
        # The engine has added a suffix to each request's id. Translate the ids in ``counts`` back to the server's.
        states = self.engine.output_processor.request_states
        known = {name: count for of_worker in counts for name, count in of_worker.items() if name in states}
        return {states[name].external_req_id: count for name, count in known.items()}

    async def open_submission_gate(self) -> None:
        await super().open_submission_gate()
        self._note_state()

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        engine_kwargs["scheduler_cls"] = SCHEDULER
        chosen = engine_kwargs.get("worker_extension_cls")
        # Check the extension only if weights are loaded in place. If they are staged, an unsuitable extension fails at
        # the first call.
        if self._loads_in_place and chosen and not issubclass(resolve_obj_by_qualname(chosen), StagingExtension):
            raise RolloutServerError(
                f"actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls={chosen}: an engine's workers "
                "need recipe.async_engine.engines.vllm.engine_extension.StagingExtension, or a subclass, to continue "
                "interrupted answers"
            )

    def _get_worker_extension_cls(self) -> str:
        if get_platform().device_name == "cpu":
            return CPU_WORKER_EXTENSION
        return WORKER_EXTENSION


async def no_adapters() -> set[int]:
    """Return no adapters. This function replaces the engine's ``list_loras``, so that verl adds none to requests.

    `GatedVLLMHttpServer._salted` adds the adapter instead.
    """
    return set()

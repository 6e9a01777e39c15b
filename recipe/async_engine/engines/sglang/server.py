# SPDX-License-Identifier: Apache-2.0
"""The SGLang rollout server. `recipe.async_engine.engines.gated_server` has the contract."""

import asyncio
import tempfile
import time
from collections.abc import Collection
from typing import Any

import sglang.srt.entrypoints.engine as sglang_engine
from sglang.srt.entrypoints.http_server import app
from sglang.srt.managers.io_struct import (
    AbortReq,
    PauseGenerationReqInput,
    ResumeMemoryOccupationReqInput,
)
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

from recipe.async_engine.actors.sockets import sockets_folder
from recipe.async_engine.engines.answers import COMPLETED
from recipe.async_engine.engines.gated_server import STRAGGLER_S, GatedServer
from recipe.async_engine.engines.http_gate import HttpGate, guard
from recipe.async_engine.engines.sglang.calls import call_each_worker
from recipe.async_engine.engines.sglang.outputs import SGLangOutputs
from recipe.async_engine.engines.sglang.processes import run_detokenizer, run_scheduler
from recipe.async_engine.engines.sglang.requests import BY_PRIORITY, checking
from recipe.async_engine.engines.sglang.requests import priority as current_priority
from recipe.async_engine.engines.weight_stream import socket_address
from recipe.async_engine.engines.weights_gate import RolloutServerError

OWN_NAMES = {"min_tokens": "min_new_tokens", "seed": "sampling_seed"}
"""SGLang's names of sampling parameters, by vLLM's."""


class SubmittingServer(SGLangHttpServer):
    """verl's SGLang server, where requests wait during a pause before they reach the engine, as in verl's for vLLM."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._by_priority = self.config.scheduling_policy == "priority"
        if self._by_priority:
            self.config.engine_kwargs["sglang"] = {**(self.config.engine_kwargs.get("sglang") or {}), **BY_PRIORITY}
        self._submission_paused = self._rejecting = False
        self._admitting = 0
        """Number of requests that `_park_until_admitted` has admitted and that have not been answered."""
        self._resume_event = asyncio.Event()
        self._resume_event.set()

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        priority: int = 0,
        **kwargs: Any,
    ) -> TokenOutput:
        """Answer like verl's ``generate``, but wait while generation is paused.

        verl translates vLLM's ``max_tokens`` for SGLang. This method also translates `OWN_NAMES`. Without
        ``enable_deterministic_inference`` a seed has no effect.
        """
        rejected = await self._park_until_admitted(request_id)
        if rejected is not None:
            return rejected
        for name, own in OWN_NAMES.items():
            if name in sampling_params:
                sampling_params[own] = sampling_params.pop(name)
        extra = sampling_params.pop("extra_args", None)
        if extra:
            sampling_params["custom_params"] = {**(sampling_params.get("custom_params") or {}), **extra}
        ranked = current_priority.set(priority if self._by_priority else None)
        try:
            output = await super().generate(prompt_ids, sampling_params, request_id, **kwargs)
        finally:
            current_priority.reset(ranked)
            self._admitting -= 1
        if output.stop_reason in ("stop", "length"):
            output.stop_reason = COMPLETED
        return output

    async def _park_until_admitted(self, request_id: str) -> TokenOutput | None:
        while self._submission_paused:
            if self._rejecting:
                return TokenOutput(token_ids=[], stop_reason="aborted")
            await self._resume_event.wait()
        self._admitting += 1
        return None

    async def resume_generation(self) -> None:
        """Resume generation in the engine, and admit the requests that wait."""
        await super().resume_generation()
        self._submission_paused = self._rejecting = False
        self._resume_event.set()


class GatedSGLangHttpServer(GatedServer, SubmittingServer):  # type: ignore[misc]
    """verl's SGLang server, whose requests must pass a gate before they reach the engine."""

    _outputs: SGLangOutputs

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prepare_gate(SGLangOutputs)

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        """Launch the server like verl, with this package's scheduler and with the gate in front of its endpoints."""
        # SGLang puts its sockets into temporary files, which it leaves behind; Ray's folder is removed after the run.
        tempfile.tempdir = sockets_folder()
        # verl takes these two functions from `sglang_engine`, and lets SGLang start its processes with them.
        sglang_engine.run_scheduler_process = run_scheduler
        sglang_engine.run_detokenizer_process = run_detokenizer
        guard(self.admit)
        app.add_middleware(HttpGate)
        await super().launch_server(*args, **kwargs)
        if self.node_rank == 0:
            self.tokenizer_manager.generate_request = checking(self.tokenizer_manager)
            self.tokenizer_manager.generate_request = self._outputs.watching(
                self.tokenizer_manager, self._tasks.__contains__
            )

    def _engine_has_died(self) -> bool:
        # Nothing is to be checked, because SGLang ends this process when a process of its engine has died.
        return False

    def _engine_requests(self) -> Collection[str]:
        return self._outputs.requests

    async def _pause_engine(self, keep: bool) -> None:
        if keep:
            await self.tokenizer_manager.pause_generation(PauseGenerationReqInput(mode="retract"))
        else:
            # Abort without SGLang's own pause, which checks only once a second whether the requests have ended.
            self.tokenizer_manager.send_to_scheduler.send_pyobj(AbortReq(abort_all=True))

    async def _drop_computed(self) -> None:
        deadline = time.monotonic() + self._pause_timeout_s
        while not all(await self._call_each_worker("drop_computed", self._submission_paused)):
            if time.monotonic() > deadline:
                raise RolloutServerError(f"the SGLang engine still computes {self._pause_timeout_s:g} s after a pause")
            await asyncio.sleep(STRAGGLER_S)

    async def _call_each_worker(self, method: str, *args: Any) -> list[Any]:
        return await call_each_worker(self.tokenizer_manager, method, *args)

    async def begin_staging(self, version: int, use_shm: bool, timeout_s: float) -> None:
        handle = socket_address(self.replica_rank, self.node_rank)
        await self._call_each_worker("begin_staging", version, use_shm, timeout_s, self._stages_in_host, handle)

    async def begin_loading(self, version: int, use_shm: bool, timeout_s: float) -> None:
        """Let no requests pass, and make the engine ready to load version ``version`` over its live weights."""
        await self.begin_load(version)
        handle = socket_address(self.replica_rank, self.node_rank)
        await self._call_each_worker("begin_loading", version, use_shm, timeout_s, handle)

    async def commit(self, version: int, checksum: str) -> None:
        """Let requests pass again, because version ``version`` has been loaded over the live weights."""
        await self._drop_computed()
        await self.loaded(checksum)
        await self.set_global_steps(version)

    async def resume_memory(self, tags: list[str]) -> None:
        """Allocate the memory of ``tags`` ("weights", "kv_cache") again, which `sleep` has freed."""
        if self.node_rank == 0:
            await self.tokenizer_manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags), None)

    async def resume_generation(self) -> None:
        await super().resume_generation()
        self._note_state()

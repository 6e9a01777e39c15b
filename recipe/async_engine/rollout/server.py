# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Rollout servers that know which weights they hold.

Contract:

* A server started with dummy weights answers nothing before its first complete load: requests wait up to
  ``first_weights_timeout_s`` and then fail with :class:`FirstWeightsTimeout`.
* ``begin_load`` closes the server, ``set_global_steps`` (which verl's adapter calls when every weight has arrived)
  opens it. A load that is cut off in between leaves the server closed, so torn weights never answer. Abort, resume and
  wake-up calls open nothing.
* Every answer names the version at submission and at the end (``submitted_version``, ``global_steps``). Stock verl
  stamps the version after generation only (vllm_async_server.py:689), which mislabels tokens when weights change.

Shown by tests/integration/test_server_gate.py and, with the real engine, by tests/e2e/test_fully_async.py.
"""

import asyncio
import logging
from typing import Any

import ray
from verl.plugin.platform import get_platform
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.prefork.run import use_for_spawned_processes
from recipe.async_engine.rollout.client import EngineDied
from recipe.async_engine.weights.worker import RolloutWeightWorker

logger = logging.getLogger(__name__)

CPU_WORKER_EXTENSION = "recipe.async_engine.platform.vllm_cpu.CPUWorkerExtension"


class FirstWeightsTimeout(RecipeError):
    """A request waited for weights longer than ``async_training.timeouts.first_weights``."""


class SubmissionTimeout(RecipeError):
    """A request waited at a paused server longer than ``async_training.timeouts.weight_sync``."""


class WeightsGate:
    """Which complete set of weights a server holds; closed while it holds none.

    Pure apart from its event: no engine, no Ray. The owner's event loop is the only one that calls it.
    """

    def __init__(self, opened: bool) -> None:
        self._complete = asyncio.Event()
        if opened:
            self._complete.set()
        self.loading: int | None = None
        self.refusing = False

    @property
    def is_open(self) -> bool:
        return self._complete.is_set()

    def begin_load(self, version: int | None) -> None:
        """Weights are about to be overwritten in place: answer nothing until :meth:`commit`."""
        self.loading = version
        self.refusing = False
        self._complete.clear()

    def commit(self) -> None:
        """Every weight of the announced version has been loaded."""
        self.loading = None
        self.refusing = False
        self._complete.set()

    def refuse(self) -> None:
        """Send the waiting requests away: this server left routing and may never hold complete weights."""
        self.refusing = True
        self._complete.set()
        self._complete.clear()

    async def wait_open(self, timeout_s: float) -> bool:
        """Wait for complete weights. Returns False if the server refuses requests instead.

        Raises:
            FirstWeightsTimeout: after ``timeout_s`` seconds, saying what the server waits for.
        """
        if self._complete.is_set() or self.refusing:
            return not self.refusing
        try:
            await asyncio.wait_for(self._complete.wait(), timeout_s)
            return not self.refusing
        except TimeoutError:
            what = "no weights were ever published" if self.loading is None else f"version {self.loading} never arrived"
            raise FirstWeightsTimeout(
                f"the rollout server refused a request after {timeout_s:g} s: it holds no complete weights ({what}). "
                "Raise async_training.timeouts.first_weights if the trainer needs longer to start, otherwise look for "
                "the error of the trainer or of the weight sync."
            ) from None


class GatedVLLMHttpServer(vLLMHttpServer):
    """verl's vLLM server behind a :class:`WeightsGate`; see the module's contract.

    Settings are read from ``rollout.custom["recipe"]`` (seconds): ``first_weights_timeout_s``, ``pause_timeout_s``.
    """

    def _post_init(self, cuda_visible_devices: str) -> None:
        use_for_spawned_processes()
        super()._post_init(cuda_visible_devices)
        settings = (self.config.custom or {}).get("recipe", {})
        self._first_weights_timeout_s = float(settings.get("first_weights_timeout_s", 1800.0))
        self._pause_timeout_s = float(settings.get("pause_timeout_s", 1800.0))
        self._gate = WeightsGate(opened="dummy" not in self.config.load_format)
        self._submitted_versions: dict[str, int | None] = {}

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **kwargs: Any
    ) -> TokenOutput:
        """As verl's ``generate``; ``extra_fields`` gains ``submitted_version`` (int) beside ``global_steps``.

        Raises:
            FirstWeightsTimeout: the server holds no complete weights and got none in time.
            SubmissionTimeout: the server stayed paused for longer than a weight sync may take.
            EngineDied: the engine is gone, so this server will answer nothing any more.
        """
        if not await self._gate.wait_open(self._first_weights_timeout_s):
            return TokenOutput(token_ids=[], stop_reason="aborted")
        try:
            output = await super().generate(
                prompt_ids=prompt_ids, sampling_params=sampling_params, request_id=request_id, **kwargs
            )
            output.extra_fields["submitted_version"] = self._submitted_versions.get(request_id, self.global_steps)
            return output
        except Exception as error:
            if self.engine.errored:
                raise EngineDied(f"the engine of rollout replica {self.replica_rank} died: {error}") from error
            raise
        finally:
            self._submitted_versions.pop(request_id, None)

    async def _park_until_admitted(self, request_id: str) -> TokenOutput | None:
        while True:
            try:
                parked = await asyncio.wait_for(super()._park_until_admitted(request_id), self._pause_timeout_s)
            except TimeoutError:
                raise SubmissionTimeout(
                    f"request {request_id} waited {self._pause_timeout_s:g} s at a paused rollout server; a weight "
                    "sync should be over by then (async_training.timeouts.weight_sync)"
                ) from None
            if parked is not None:
                return parked
            if self._gate.is_open:
                self._submitted_versions[request_id] = self.global_steps
                return None
            # A load began while the request was parked and has not been committed: a resume alone admits nothing.
            self._admitting -= 1
            if not await self._gate.wait_open(self._first_weights_timeout_s):
                return TokenOutput(token_ids=[], stop_reason="aborted")

    async def begin_load(self, global_steps: int | None) -> None:
        """Close the server: weights of version ``global_steps`` are about to be written in place."""
        self._gate.begin_load(global_steps)

    async def set_global_steps(self, global_steps: int) -> None:
        """Commit version ``global_steps``: called by the weight worker once every tensor is loaded."""
        await super().set_global_steps(global_steps)
        self._gate.commit()

    async def leave_routing(self) -> None:
        """Answer every waiting and every later request as aborted without tokens, so that its client goes elsewhere.

        Called after the server has been taken out of the load balancer; the next complete load undoes it.
        """
        self._gate.refuse()
        self._rejecting = True
        self._submission_paused = True
        # Wakes the requests parked at the pause; they see the rejection. The pause itself stays.
        self._resume_event.set()
        self._resume_event.clear()

    async def committed_version(self) -> int | None:
        """The complete version this server answers with, or None while it holds none."""
        return self.global_steps if self._gate.is_open else None

    def _get_worker_extension_cls(self) -> str:
        if get_platform().device_name == "cpu":
            return CPU_WORKER_EXTENSION
        return super()._get_worker_extension_cls()


class GatedVLLMReplica(vLLMReplica):
    """A vLLM replica of :class:`GatedVLLMHttpServer` s whose weight workers have deadlines."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(GatedVLLMHttpServer)

    def get_ray_class_with_init_args(self) -> Any:
        from verl.single_controller.ray import RayClassWithInitArgs

        return RayClassWithInitArgs(
            cls=ray.remote(RolloutWeightWorker),
            rollout_config=self.config,
            model_config=self.model_config,
            replica_rank=self.replica_rank,
        )

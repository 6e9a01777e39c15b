# SPDX-License-Identifier: Apache-2.0
"""The base of the servers of all rollout engines, which answer only with complete weights of a known version.

Contract:

* A server that was started with dummy weights answers nothing before its first complete load. Until then requests wait,
  and fail with :class:`RolloutServerError` after ``first_weights_timeout_s`` seconds.
* Weights are staged next to the live ones, and ``swap`` makes them live while the engine is paused. If weights are
  loaded over the live weights instead, ``begin_load`` closes the server (requests wait), and ``set_global_steps``,
  which the adapter calls after the last tensor, opens it. An interrupted swap or load leaves the server closed, so that
  it never answers with incomplete weights. Calls to abort, resume or wake up do not open the server.
* An answer is returned only if its finish reason is stop, length, repetition, or abort. (Stock verl accepts any finish
  reason, vllm_async_server.py:726, and trains the partial output of a failed request as a complete answer.)
* Every answer has the version at its submission (``submitted_version``) and at its end (``global_steps``). (Stock verl
  records only the version at the end, vllm_async_server.py:689, which mislabels tokens when weights change.)

Shown by tests/integration/test_server_gate.py and, with the real engines, by tests/e2e/test_fully_async.py and
test_sglang.py.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from verl.workers.rollout.replica import RolloutMode, TokenOutput

from recipe.async_engine.actors.control import EarlyCancellations
from recipe.async_engine.actors.stacks import waits
from recipe.async_engine.core.cuts import engine_request
from recipe.async_engine.core.errors import EngineDied, RequestFailed
from recipe.async_engine.core.versions import RequestVersions
from recipe.async_engine.engines.answers import ABORTED, COMPLETED, RECOMPUTED, VERSION_RUNS, Sampled
from recipe.async_engine.engines.output_watch import OutputWatch
from recipe.async_engine.engines.weights_gate import RolloutServerError, WeightsGate
from recipe.async_engine.record.activity import EngineActivity, Work
from recipe.async_engine.record.events import Activity, Class

if TYPE_CHECKING:
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer as HttpServer
else:
    HttpServer = object

STRAGGLER_S = 0.002
"""Seconds between two attempts to pause an engine, or to drop its KV cache, while requests are still in the engine."""
REPETITION = "repetition"
"""vLLM's finish reason for an answer that ``repetition_detection`` ended; such an answer counts as complete."""
HELD = ("generate",)
"""Methods whose calls take long. All other methods have another concurrency group, so they need not wait for these."""


class GatedServer(HttpServer):
    """A mixin for verl's server of an engine. Requests must pass a :class:`WeightsGate` before they reach the engine.

    ``rollout.custom["recipe"]`` has the server's settings: ``has_trainer``, ``first_weights_timeout_s`` and
    ``pause_timeout_s`` (seconds), ``staging`` and ``places`` (the largest number of requests in the engine). A subclass
    calls `_prepare_gate` when it is created, and implements the methods that raise NotImplementedError here.
    """

    _outputs: OutputWatch

    def _prepare_gate(self, watch: type[OutputWatch]) -> None:
        settings = (self.config.custom or {}).get("recipe", {})
        if "dummy" in self.config.load_format and not settings.get("has_trainer", False):
            raise RolloutServerError(
                f"actor_rollout_ref.rollout.load_format={self.config.load_format} makes a server wait for a trainer's "
                "weights, but this server has no trainer; set load_format=auto to load the weights from files"
            )
        self._first_weights_timeout_s = float(settings.get("first_weights_timeout_s", 1800.0))
        self._pause_timeout_s = float(settings.get("pause_timeout_s", 1800.0))
        self._stages_in_host = settings.get("staging") == "host"
        self._loads_in_place = settings.get("staging") == "none"
        # The gate also starts closed with LoRA, because the base model without the adapter is not the trained policy.
        self._gate = WeightsGate(opened="dummy" not in self.config.load_format and not self.lora_as_adapter)
        self._versions = RequestVersions()
        self._recomputed: Counter[str] = Counter()
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._dropped: set[str] = set()
        self._unwanted = EarlyCancellations()
        self._activity = EngineActivity(
            time.monotonic, int(settings.get("places") or self.config.get("max_num_seqs", 1))
        )
        self._outputs = watch(self._activity)
        self._life = uuid4().hex
        self._checksum: str | None = None

    def _engine_has_died(self) -> bool:
        raise NotImplementedError

    def _engine_requests(self) -> Collection[str]:
        """Return the ids of all requests in the engine."""
        raise NotImplementedError

    async def _pause_engine(self, keep: bool) -> None:
        """Pause generation, and abort all requests of the engine unless ``keep`` is true."""
        raise NotImplementedError

    async def _drop_computed(self) -> None:
        """Drop all results of the old weights, such as the KV cache, even those of requests that stay in the engine."""
        raise NotImplementedError

    async def _call_each_worker(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the staging extension in each process that holds weights, and return all results."""
        raise NotImplementedError

    def _by_server_ids(self, counts: list[dict[str, int]]) -> dict[str, int]:
        """Merge the token counts of all workers, and replace the engine's request ids in them by the server's."""
        return {name: count for of_worker in counts for name, count in of_worker.items()}

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        work: Work = Work.OTHER,
        sampled: int = 0,
        **kwargs: Any,
    ) -> TokenOutput:
        """Answer like verl's ``generate``, with ``submitted_version`` (int) added to the extra fields.

        If weights were swapped during the request, the extra fields also have the versions of the tokens
        (`VERSION_RUNS`) and the number of tokens that the engine computed again (`RECOMPUTED`).

        Args:
            work: purpose of the request, by which the engine's time is classified in the run record.
            sampled: number of tokens at the end of ``prompt_ids`` that already belong to the answer. The sampling
                parameters apply to the whole answer, but only the remainder is returned.

        Raises:
            RolloutServerError: the server got no complete weights in time, or was paused for longer than a weight sync
                may take.
            EngineDied: the engine has died, so this server cannot answer requests any more.
            RequestFailed: the engine ended the request with a finish reason that means a failure.
        """
        if self._unwanted.take(request_id):
            return TokenOutput(token_ids=[], stop_reason="aborted")
        task = asyncio.current_task()
        assert task is not None
        self._tasks[request_id] = task
        self._activity.expect(request_id, work)
        try:
            if not await self._gate.wait_open(self._first_weights_timeout_s):
                return TokenOutput(token_ids=[], stop_reason="aborted")
            prompt_ids, sampling_params = engine_request(prompt_ids, sampling_params, sampled)
            output = await super().generate(
                prompt_ids=prompt_ids, sampling_params=sampling_params, request_id=request_id, **kwargs
            )
            return self._answered(request_id, output)
        except asyncio.CancelledError:
            if request_id not in self._dropped:
                raise
            task.uncancel()
            return TokenOutput(token_ids=[], stop_reason="aborted")
        except Exception as error:
            if self._engine_has_died():
                raise EngineDied(f"the engine of rollout replica {self.replica_rank} died: {error}") from error
            raise
        finally:
            self._versions.forget(request_id)
            self._activity.forget(request_id)
            self._recomputed.pop(request_id, None)
            self._tasks.pop(request_id, None)
            self._dropped.discard(request_id)

    def _answered(self, request_id: str, output: TokenOutput) -> TokenOutput:
        """Add versions to the engine's answer, or raise RequestFailed if the finish reason means a failure."""
        if output.stop_reason == REPETITION:
            output.stop_reason = COMPLETED
        if output.stop_reason not in (COMPLETED, *ABORTED):
            raise RequestFailed(
                f"the engine of rollout replica {self.replica_rank} ended a request with the finish reason "
                f"{output.stop_reason!r} after {len(output.token_ids)} tokens; answers end by stop, length, "
                "repetition or abort; one cause is sampling parameters, such as min_tokens or stop_token_ids, that "
                "forbid every token that the structured output allows"
            )
        submitted = self._versions.submitted(request_id)
        output.extra_fields["submitted_version"] = self.global_steps if submitted is None else submitted
        if self._versions.swapped_under(request_id):
            output.extra_fields[VERSION_RUNS] = self._versions.runs(request_id, len(output.token_ids))
            output.extra_fields[RECOMPUTED] = self._recomputed[request_id]
        self._activity.answer(request_id, len(output.token_ids))
        return output

    async def drop_request(self, request_id: str) -> None:
        """Abort a request whose caller no longer waits for it, and free its sequence slot in the engine at once."""
        task = self._tasks.get(request_id)
        if task is None:
            self._unwanted.add(request_id)
        else:
            self._dropped.add(request_id)
            # vLLM aborts a request if the task that waits for the request is cancelled.
            task.cancel()

    async def give_back_waiting(self) -> None:
        """Abort the requests that have no token yet, so that their clients can send them to other servers."""
        for request_id in list(self._tasks):
            if not self._outputs.asked_tokens(request_id):
                await self.drop_request(request_id)

    async def _park_until_admitted(self, request_id: str) -> TokenOutput | None:
        while True:
            try:
                async with asyncio.timeout(self._pause_timeout_s):
                    parked = await super()._park_until_admitted(request_id)
            except TimeoutError:
                raise RolloutServerError(
                    f"request {request_id} waited {self._pause_timeout_s:g} s at a paused rollout server; a weight "
                    "sync should be over by then (async_training.timeouts.weight_sync)"
                ) from None
            if parked is not None:
                return parked
            if self._gate.is_open:
                self._versions.submit(request_id, self.global_steps)
                return None
            # The engine is not paused any more, but a load is incomplete, so wait at the gate.
            self._admitting -= 1
            if not await self._gate.wait_open(self._first_weights_timeout_s):
                return TokenOutput(token_ids=[], stop_reason="aborted")

    async def sampled_since(self, known: dict[str, int]) -> dict[str, Sampled]:
        news = {
            request_id: self._outputs.since(request_id, count, self._versions)
            for request_id, count in known.items()
            if request_id in self._tasks
        }
        return {request_id: sampled for request_id, sampled in news.items() if sampled is not None}

    async def admit(self) -> None:
        """Wait until an HTTP request may reach the engine.

        Raises:
            RolloutServerError: the server got no complete weights in time, was paused for too long, or was removed from
                the load balancer.
        """
        name = "over HTTP"
        is_open = await self._gate.wait_open(self._first_weights_timeout_s)
        if not is_open or await self._park_until_admitted(name) is not None:
            raise RolloutServerError("this rollout server takes no requests at present: ask another one")
        # `_park_until_admitted` has counted this HTTP request, but only requests that come as calls of the Ray actor
        # should count.
        self._admitting -= 1
        self._versions.forget(name)

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        """Pause the engine right after its current step, and abort all requests.

        With vLLM, verl first waits until every admitted request has its first token (vllm_async_server.py:970). Here
        admitted requests that reach the engine after the pause are aborted too.

        Raises:
            RolloutServerError: an admitted request did not return in time.
        """
        if self.node_rank != 0:
            return {"aborted_count": 0, "request_ids": []}
        self._submission_paused, self._rejecting = True, reject_request
        self._note_state()
        self._resume_event.clear()
        aborted: set[str] = set()
        deadline = time.monotonic() + self._pause_timeout_s
        while True:
            aborted.update(self._engine_requests())
            await self._pause_engine(keep=False)
            if not self._admitting:
                if reset_prefix_cache:
                    await self._drop_computed()
                return {"aborted_count": len(aborted), "request_ids": sorted(aborted)}
            if time.monotonic() > deadline:
                raise RolloutServerError(
                    f"{self._admitting} requests did not come back within {self._pause_timeout_s:g} s of being aborted"
                )
            await asyncio.sleep(STRAGGLER_S)

    async def begin_staging(self, version: int, use_shm: bool, timeout_s: float) -> None:
        """Make the engine's workers ready to receive version ``version`` into their staging areas."""
        await self._call_each_worker("begin_staging", version, use_shm, timeout_s, self._stages_in_host)

    async def wide_parameters(self) -> list[str]:
        of_workers: list[list[str]] = await self._call_each_worker("wide_parameters")
        return [name for names in of_workers for name in names]

    async def staging_outcomes(self) -> list[str]:
        return await self._call_each_worker("staging_outcome")

    async def swap(self, version: int, checksum: str) -> None:
        """Make the staged weights live, and record their ``checksum``.

        The engine must be paused and its caches empty. If the swap fails, the server stays closed.
        """
        self._gate.begin_load(version)
        self._note_state()
        if self.node_rank == 0:
            try:
                counts = await self._call_each_worker("swap_staged", version)
            except Exception:
                for name in list(self._tasks):
                    await self.drop_request(name)
                raise
            self._swapped_under(self._by_server_ids(counts), version)
        await self.loaded(checksum)
        await self.set_global_steps(version)

    async def hold_requests(self) -> None:
        """Pause the engine but keep its requests. Later requests wait in the server until generation resumes.

        The KV cache is dropped, and is computed again with the live weights when generation resumes.
        """
        if self.node_rank != 0:
            return
        self._submission_paused, self._rejecting = True, False
        self._note_state()
        self._resume_event.clear()
        await self._pause_engine(keep=True)
        await self._drop_computed()

    def _swapped_under(self, sampled: dict[str, int], version: int) -> None:
        """Record a swap to ``version``. ``sampled`` has the number of tokens that each request got before the swap."""
        self._versions.swap(sampled, version)
        held = {name: count for name, count in sampled.items() if name in self._tasks and count}
        for name, count in held.items():
            self._recomputed[name] += self._outputs.asked_tokens(name) + count
        self._activity.recompute(held)

    async def begin_load(self, global_steps: int | None) -> None:
        """Close the server, because version ``global_steps`` will be loaded over the live weights."""
        self._gate.begin_load(global_steps)
        self._note_state()

    async def loaded(self, checksum: str) -> None:
        """Record the checksum of weights that have been loaded completely."""
        self._checksum = checksum

    async def set_global_steps(self, global_steps: int) -> None:
        """Commit version ``global_steps`` and open the server, because all tensors have been loaded."""
        await super().set_global_steps(global_steps)
        self._gate.commit()
        self._note_state()

    async def activity(self) -> Activity:
        """Return what the engine did since the last call, and its token counts; raise EngineDied if it has died."""
        await self.check_engine()
        spans, counts = self._activity.take(), self._activity
        tokens = {"sampled": counts.sampled, "answered": counts.answered, "under_way": counts.under_way}
        return Activity(time.monotonic(), self._life, spans, tokens)

    def _note_state(self) -> None:
        """Report to the run record whether the engine can generate, and why if it cannot."""
        if self._gate.refusing:
            self._activity.close(Class.DOWN)
        elif not self._gate.is_open:
            self._activity.close(Class.START_UP if self.global_steps is None else Class.WAIT_WEIGHTS)
        elif self._submission_paused:
            in_turns = self.rollout_mode == RolloutMode.HYBRID
            self._activity.close(Class.WAIT_OTHER_SIDE if in_turns else Class.WAIT_WEIGHTS)
        else:
            self._activity.open()

    async def leave_routing(self) -> None:
        """Answer all waiting and later requests as aborted, without tokens, so that their clients use other servers.

        The weight publisher calls this after it has removed the server from the load balancer. After the next complete
        load the server accepts requests again.
        """
        self._gate.refuse()
        self._note_state()
        self._rejecting = True
        self._submission_paused = True
        # Wake the requests that wait for the end of the pause, so that they are rejected. The pause itself continues.
        self._resume_event.set()
        self._resume_event.clear()

    async def check_engine(self) -> None:
        if self.node_rank == 0 and self._engine_has_died():
            raise EngineDied(f"the engine of rollout replica {self.replica_rank} died")

    async def describe(self) -> list[str]:
        gate = "open" if self._gate.is_open else f"closed, loading version {self._gate.loading}"
        requests = len(self._engine_requests()) if self.node_rank == 0 else 0
        return [
            f"weights {gate}; version {self.global_steps}, checksum {self._checksum}; paused: "
            f"{self._submission_paused}; requests at the engine: {requests}, on their way to it: {self._admitting}",
            *(f"tasks: {line}" for line in waits()),
        ]

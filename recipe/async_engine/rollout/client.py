# SPDX-License-Identifier: Apache-2.0
"""The client through which agent loops reach the rollout servers.

Contract:

* ``generate`` returns a complete answer. If a weight sync aborts it, the tokens so far are kept and the answer goes on
  under the new version, at once: the server holds the resumed request until it may run, so nothing sleeps or polls.
* What an answer is asked for with is for the whole of it, however often it is cut (``core/cuts.py``).
* Where a sync holds requests in their engine (``async_training.weights.at_swap=keep``), the server says which version
  sampled which tokens.
* With ``async_training.partial_rollout=False`` no answer is ever cut (the scheduler drains before a sync); if one is
  cut all the same, ``generate`` raises instead of returning it as complete. After its server's death, or from a
  checkpoint, it goes on under the same version only.
* With ``rollout.scheduling_policy=priority`` engines that are full take the requests of the oldest groups first: what
  a weight sync has cut goes on before younger answers, and the batch that waits for it is complete sooner.
* Every answer of a server, whole or cut, is kept, and a request that a checkpoint has the answer to reaches no server
  (``kept_answers``). :meth:`ResumingClient.fetch` brings the tokens so far of every request under way.
* Where generation happens in turns, requests wait here between two of them (:class:`TurnGate`).
* Every request's version is the one at its submission; an answer that claims another one is an error.
* A server that died, or whose engine did, is taken out of routing and the answer continues elsewhere from its tokens:
  those of its earlier parts and, with ``async_training.partial_tokens_interval``, those that were last fetched.
* A request that its engine failed is asked again, of another server if there is one, with the tokens of the parts
  before; those that the failed request had are not believed. Failures in a row are an error.
* Servers have ``async_training.timeouts.generation`` to give the next token of an answer back, however many of them
  are asked; one that gives nothing back is asked again at growing intervals. What nobody waits for any more, because
  its trajectory was given up or its time is over, is dropped at its server.

Shown by tests/integration/test_client.py (servers faked below the actor seam) and tests/e2e/test_fully_async.py.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import ray
from omegaconf import DictConfig
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from verl.utils import normalize_token_ids
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from recipe.async_engine.core.cuts import refused
from recipe.async_engine.core.deadlines import FETCH_S, ROUTING_S
from recipe.async_engine.core.errors import EngineDied, GenerationError, RequestFailed
from recipe.async_engine.engines.answers import (
    ABORTED,
    CHECKPOINT,
    COMPLETED,
    GOES_ON,
    RECOMPUTED,
    SERVER_DIED,
    VERSION_RUNS,
    Flight,
)
from recipe.async_engine.engines.load_balancer import ENDED, SAY_ENDED_S
from recipe.async_engine.record.activity import Work
from recipe.async_engine.rollout.recorder import TrajectoryRecorder, current_recorder

logger = logging.getLogger(__name__)

# What a request may have beside tokens, in verl's words.
MODALITIES = ("image_data", "video_data", "audio_data")
ASK_AGAIN_S = 0.02
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0
MOST_FAILURES = 3
"""As often in a row an engine may fail a request; what it fails each time is not asked for until the deadline."""


@dataclass
class Patience:
    """How long servers may still take for one request, since they last gave a token of it.

    refusals: how often they gave none back since then. failures: how often because the request failed, the last time
    at ``failed_at``.
    """

    left_s: float
    refusals: int = 0
    failures: int = 0
    failed_at: str | None = None

    @contextmanager
    def spent(self) -> Iterator[None]:
        """Time in here counts."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.left_s -= time.monotonic() - began

    async def refused(self) -> None:
        """A server gave no token back: ask the next one at once, and then after a while."""
        self.refusals += 1
        if self.refusals > 1:
            with self.spent():
                await asyncio.sleep(min(LONGEST_PAUSE_S, SHORTEST_PAUSE_S * 2.0 ** min(self.refusals - 2, 30)))


# verl's methods are told nothing of a request but its own arguments.
_flight: ContextVar[Flight | None] = ContextVar("recipe_flight", default=None)


class TurnGate:
    """Holds requests between generation turns, on an event; nothing polls. Open, until it is told otherwise.

    A loop that is at a tool when its turn ends goes on, and waits at its next request. Requests of a validation pass.

    timeout_s: how long a turn of the trainer may take.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._held_s = 0.0
        self._held_since: float | None = None
        self._open = asyncio.Event()
        self._open.set()

    @property
    def is_held(self) -> bool:
        return not self._open.is_set()

    @property
    def held_s(self) -> float:
        """Seconds in which requests were held, which count for no deadline."""
        return self._held_s + (0.0 if self._held_since is None else time.monotonic() - self._held_since)

    def hold(self) -> None:
        """The turn is over: requests wait from now on."""
        if self._held_since is None:
            self._held_since = time.monotonic()
        self._open.clear()

    def go_on(self) -> None:
        """A turn begins."""
        self._held_s, self._held_since = self.held_s, None
        self._open.set()

    async def enter(self) -> None:
        """Wait until a turn is open; GenerationError if none is for longer than the trainer's turn may take."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._open.wait()
        except TimeoutError:
            raise GenerationError(
                f"an interrupted trajectory waited {self._timeout_s:g} s for its next generation turn; training, a "
                "weight sync, a checkpoint and a validation together should take less (async_training.timeouts)"
            ) from None


class ResumingClient(LLMServerClient):
    """verl's client with resumption, versions, deadlines and fail-over; see the module's contract.

    gate: holds requests between generation turns.
    """

    def __init__(self, config: DictConfig, load_balancer_handle: ray.actor.ActorHandle | None = None, **kwargs: Any):
        super().__init__(config=config, load_balancer_handle=load_balancer_handle, **kwargs)
        async_training = config.async_training
        self._resume = bool(async_training.partial_rollout)
        self._timeout_s = float(async_training.timeouts.generation)
        interval = async_training.partial_tokens_interval
        # What the router of a mixture of experts chose comes with complete parts only.
        self._keeps_parts = not config.actor_rollout_ref.rollout.get("enable_rollout_routing_replay", False)
        self._fetch_every_s = float(interval) if interval is not None and self._keeps_parts else None
        self._by_age = config.actor_rollout_ref.rollout.get("scheduling_policy") == "priority"
        timeouts = async_training.timeouts
        self.gate = TurnGate(float(2 * timeouts.batch_wait + timeouts.weight_sync + timeouts.checkpoint))
        self._ended: list[str] = []
        self._flights: set[Flight] = set()
        self._fetching: asyncio.Task[None] | None = None

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, ray.actor.ActorHandle]:
        flight = _flight.get()
        avoided = None if flight is None else flight.avoided
        answer = asyncio.ensure_future(
            super()._acquire_server(request_id, **extra, ended=self._take_ended(), avoided=avoided)
        )
        try:
            server_id, server = await self._routed(asyncio.shield(answer))
        except asyncio.CancelledError:
            # The load balancer counts a request that no server will have.
            answer.add_done_callback(lambda routed: self._give_back(routed, request_id))
            raise
        except Exception as error:
            answer.cancel()
            if "No available servers" in str(error):
                raise GenerationError("no rollout server is in routing: each one died or failed to load") from error
            raise
        if flight is not None:
            flight.server_id, flight.server = server_id, server
        return server_id, server

    def _give_back(self, routed: asyncio.Future[Any], request_id: str) -> None:
        if not routed.cancelled() and routed.exception() is None:
            self._release_server(routed.result()[0], request_id)

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        """As verl's; where the load balancer takes it with the next request, it waits for that, but not for long."""
        if ENDED not in (self._lb_require_acquire_fields or ()):
            super()._release_server(server_id, request_id)
            return
        if not self._ended:
            asyncio.get_running_loop().call_later(SAY_ENDED_S, self._say_ended)
        self._ended.append(server_id)

    def _say_ended(self) -> None:
        if ended := self._take_ended():
            self._load_balancer.release_servers.remote(ended)

    def _take_ended(self) -> list[str]:
        ended, self._ended = self._ended, []
        return ended

    @staticmethod
    async def _routed(answer: Awaitable[Any]) -> Any:
        """What the load balancer answers.

        Raises:
            GenerationError: it died, or does not answer.
        """
        try:
            async with asyncio.timeout(ROUTING_S):
                return await answer
        except RayActorError as error:
            raise GenerationError(f"the load balancer of the rollout servers died: {error}") from error
        except TimeoutError:
            raise GenerationError(
                f"the load balancer of the rollout servers has not answered for {ROUTING_S:g} s"
            ) from None

    def _vllm_request_id(self, request_id: str) -> str:
        engine_request_id = super()._vllm_request_id(request_id)
        flight = _flight.get()
        if flight is not None:
            flight.engine_request_id = engine_request_id
        return engine_request_id

    @rollout_trace_op
    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """Generate a complete answer to ``prompt_ids``; see the module's contract.

        Args:
            request_id: routes the turns of one conversation to one server.
            sampling_params: passed to the engine; ``max_tokens`` bounds the whole answer, resumed parts included.

        Returns:
            TokenOutput with the tokens of all parts; ``extra_fields`` has ``min_global_steps`` and
            ``max_global_steps``, the oldest and the newest version among them.

        Raises:
            GenerationError: no server answered in time, an answer was cut though resuming is off, or these parameters
                cannot be asked for.
        """
        if (why := refused(sampling_params)) is not None:
            raise GenerationError(f"an answer was asked for with {why}")
        prompt_ids = normalize_token_ids(prompt_ids)
        sampling_params = dict(sampling_params)
        budget = self._budget(len(prompt_ids), sampling_params)
        merged = TokenOutput(token_ids=[], log_probs=[], num_preempted=0)
        versions: list[int] = []
        recorder = current_recorder() or TrajectoryRecorder(work=Work.VALIDATION)
        if any(kwargs.get(data) for data in MODALITIES):
            recorder.mark_multimodal()
        if self._by_age and not kwargs.get("priority"):  # 0: what verl's agent loops give
            kwargs["priority"] = recorder.order
        patience = Patience(self._timeout_s)
        recorder.tools.asks()
        while merged.stop_reason is None:
            part = await self._request(
                request_id,
                recorder,
                patience,
                prompt_ids=prompt_ids + merged.token_ids,
                sampling_params={**sampling_params, "max_tokens": budget},
                sampled=len(merged.token_ids),
                work=recorder.work if not merged.token_ids or recorder.work is not Work.NEW else Work.AGAIN,
                **kwargs,
            )
            if part is None:
                await patience.refused()
                continue
            patience = Patience(self._timeout_s)
            versions += self._record(recorder, prompt_ids + merged.token_ids, part)
            self._check_one_version(request_id, versions)
            self._merge(merged, part)
            if part.stop_reason not in ABORTED or len(merged.token_ids) >= budget:
                merged.stop_reason = COMPLETED
            else:
                self._note_cut(request_id, recorder, part.extra_fields.get(GOES_ON), len(prompt_ids), merged)
        recorder.tools.is_answered()
        for ours in (GOES_ON, VERSION_RUNS, RECOMPUTED):
            merged.extra_fields.pop(ours, None)
        merged.extra_fields.update(
            global_steps=versions[-1], min_global_steps=min(versions), max_global_steps=max(versions)
        )
        return merged

    def _note_cut(
        self, request_id: str, recorder: TrajectoryRecorder, cut_by: str | None, prompt_length: int, merged: TokenOutput
    ) -> None:
        """Note that the answer so far goes to an engine again; raises GenerationError where it may not be cut."""
        tokens = len(merged.token_ids)
        if not self._resume and cut_by is None:
            raise GenerationError(
                f"the answer to request {request_id} was cut after {tokens} tokens although "
                "async_training.partial_rollout=False; a cut answer is never trained as a complete one"
            )
        recorder.interruptions += cut_by != CHECKPOINT
        recorder.reprefilled_tokens += prompt_length + tokens

    def _record(self, recorder: TrajectoryRecorder, context: list[int], part: TokenOutput) -> list[int]:
        """Note a part of an answer, which followed ``context``; returns the versions that sampled it, in order."""
        versions, sampled = [], 0
        for version, count in self._runs(part):
            versions.append(version)
            recorder.record(version, part.token_ids[sampled : sampled + count], context + part.token_ids[:sampled])
            sampled += count
        recorder.reprefilled_tokens += part.extra_fields.get(RECOMPUTED, 0)
        recorder.cut_tokens += len(part.token_ids) if part.stop_reason in ABORTED else 0
        return versions

    def _check_one_version(self, request_id: str, versions: list[int]) -> None:
        if not self._resume and len(set(versions)) > 1:
            raise GenerationError(
                f"the answer to request {request_id} was cut under version {versions[0]} and could go on under "
                f"version {versions[-1]} only, although async_training.partial_rollout=False"
            )

    def _budget(self, prompt_length: int, sampling_params: dict[str, Any]) -> int:
        """Tokens that the whole answer may have: the server's own default, which it would compute anew per part."""
        for key in ("max_tokens", "max_new_tokens"):
            if key in sampling_params:
                return int(sampling_params.pop(key))
        rollout = self.config.actor_rollout_ref.rollout
        return max(1, min(rollout.response_length, rollout.prompt_length + rollout.response_length - prompt_length))

    async def _request(
        self, request_id: str, recorder: TrajectoryRecorder, patience: Patience, **kwargs: Any
    ) -> TokenOutput | None:
        """The answer that the trajectory's record has to this request, or else a server's."""
        asked = kwargs["prompt_ids"]
        if recorder.answers.over:
            raise GenerationError("the trajectory has ended: its agent loop may ask for nothing more")
        answer = recorder.answers.again(asked)
        if answer is None:
            if not recorder.validates:
                await self.gate.enter()
            began = time.monotonic()
            answer = await self._ask_server(request_id, recorder, patience, **kwargs)
            recorder.asked_s += time.monotonic() - began
            # Nothing is awaited since the request left ``flights``: it is never in a record twice, or not at all.
            if answer is not None:
                recorder.answers.keep(asked, answer)
        return answer

    async def _ask_server(
        self, request_id: str, recorder: TrajectoryRecorder, patience: Patience, **kwargs: Any
    ) -> TokenOutput | None:
        """One request to one server; None if it gave no token, because it died, left routing or failed the request."""
        with self._under_way(recorder, kwargs["prompt_ids"], patience.failed_at) as flight, patience.spent():
            try:
                async with asyncio.timeout(patience.left_s):
                    part = await super().generate(request_id, **kwargs)
            except TimeoutError:
                who = f"rollout server {flight.server_id}"
                if patience.refusals:
                    who = f"rollout servers gave {patience.refusals} answers without a token, and"
                raise GenerationError(
                    f"{who} did not answer within {self._timeout_s:g} s; raise "
                    "async_training.timeouts.generation if answers may take longer"
                ) from None
            except (RequestFailed, ActorUnavailableError) as error:
                # A server that cannot be reached stays in routing: its death is not known, and an agent loop may have
                # left this process unable to open connections.
                patience.failures, patience.failed_at = patience.failures + 1, flight.server_id
                if patience.failures == MOST_FAILURES:
                    raise
                logger.warning("a request is asked again: %s", error)
                return None
            except (RayActorError, EngineDied) as error:
                return await self._after_death(flight, recorder, error)
        return part if part.token_ids or part.stop_reason not in ABORTED else None

    async def _after_death(self, flight: Flight, recorder: TrajectoryRecorder, error: Exception) -> TokenOutput | None:
        logger.error(
            "rollout server %s died under a request, which goes on elsewhere after %d of its tokens: %s",
            flight.server_id,
            len(flight.token_ids),
            error,
        )
        await self._routed(self._load_balancer.remove_servers.remote([flight.server_id]))
        part = flight.cut_answer(SERVER_DIED)
        if part is not None:
            recorder.recovered_tokens += len(part.token_ids)
        return part

    @contextmanager
    def _under_way(self, recorder: TrajectoryRecorder, asked: list[int], avoided: str | None) -> Iterator[Flight]:
        """What is known of the request under way; its tokens are fetched meanwhile."""
        flight = Flight(asked, avoided=avoided)
        _flight.set(flight)
        self._flights.add(flight)
        recorder.answers.flights.append(flight)
        if self._fetch_every_s is not None and (self._fetching is None or self._fetching.done()):
            self._fetching = asyncio.get_running_loop().create_task(self._fetch_forever(self._fetch_every_s))
        try:
            yield flight
        except BaseException:
            if flight.engine_request_id is not None:
                flight.server.drop_request.remote(flight.engine_request_id)
            raise
        finally:
            self._flights.remove(flight)
            recorder.answers.flights.remove(flight)
            _flight.set(None)

    async def _fetch_forever(self, every_s: float) -> None:
        """As long as requests are under way, ask their servers for the tokens so far."""
        while self._flights:
            await asyncio.sleep(every_s)
            await self._fetch(self._flights)

    async def fetch(self, flights: Iterable[Flight], timeout_s: float) -> None:
        """Return when each of these requests, as it is at its server now, is known here: its tokens so far, or its end.

        A request that its server does not know, or has completed, is on its way there or back: it is asked for again,
        until ``timeout_s`` seconds are over. What is not known by then is left out.
        """
        left, deadline = set(flights), time.monotonic() + timeout_s
        for flight in left:
            flight.told = False
        while True:
            await self._fetch(left)
            left = {flight for flight in left & self._flights if not flight.told}
            if not left:
                return
            if time.monotonic() > deadline:
                logger.error("of %d requests under way it is not known what they have sampled", len(left))
                return
            await asyncio.sleep(ASK_AGAIN_S)

    async def _fetch(self, flights: Iterable[Flight]) -> None:
        by_server: dict[str | None, list[Flight]] = defaultdict(list)
        for flight in flights:
            if flight.engine_request_id is not None:
                by_server[flight.server_id].append(flight)
        await asyncio.gather(*[self._fetch_from(each) for each in by_server.values()])

    async def _fetch_from(self, flights: list[Flight]) -> None:
        known = {str(flight.engine_request_id): len(flight.token_ids) for flight in flights}
        try:
            async with asyncio.timeout(FETCH_S):
                sampled = await flights[0].server.sampled_since.remote(known)
        except (RayError, TimeoutError) as error:
            # The requests themselves end with the server's death, or with their own deadline.
            logger.warning("rollout server %s did not say what it has sampled: %s", flights[0].server_id, error)
            for flight in flights:
                flight.told = True
            return
        for flight in flights:
            news = sampled.get(flight.engine_request_id)
            if news is not None:
                flight.told = True
                if self._keeps_parts:
                    flight.add(news, after=known[str(flight.engine_request_id)])

    @staticmethod
    def _runs(part: TokenOutput) -> list[tuple[int, int]]:
        """(version, token count) of each run of versions that sampled the part's tokens."""
        runs = part.extra_fields.get(VERSION_RUNS)
        if runs:
            if sum(count for _, count in runs) != len(part.token_ids):
                raise GenerationError(
                    f"a rollout server answered {len(part.token_ids)} tokens with the versions {runs}"
                )
            return [(int(version), count) for version, count in runs]
        submitted, answered = part.extra_fields.get("submitted_version"), part.extra_fields.get("global_steps")
        version = submitted if submitted is not None else answered
        if version is None:
            raise GenerationError("a rollout server answered without a weight version")
        if answered is not None and answered != version and part.stop_reason not in ABORTED:
            raise GenerationError(f"weights changed from version {version} to {answered} under an uninterrupted answer")
        return [(int(version), len(part.token_ids))]

    @staticmethod
    def _merge(merged: TokenOutput, part: TokenOutput) -> None:
        import numpy as np

        merged.token_ids.extend(part.token_ids)
        if part.log_probs is not None:
            merged.log_probs.extend(part.log_probs)
        if part.routed_experts is not None and len(part.token_ids) > 0:
            if merged.routed_experts is None:
                merged.routed_experts = part.routed_experts
            else:
                new_rows = part.routed_experts[-len(part.token_ids) :]
                merged.routed_experts = np.concatenate([merged.routed_experts, new_rows])
        if part.num_preempted is not None:
            merged.num_preempted += part.num_preempted
        merged.extra_fields = {**part.extra_fields, **merged.extra_fields}

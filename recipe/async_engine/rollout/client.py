# SPDX-License-Identifier: Apache-2.0
"""The client through which agent loops reach the rollout servers.

Contract:

* ``generate`` returns a complete answer. If a weight sync interrupts an answer, the client keeps its tokens and
  requests the rest at once. The server holds the new request until its engine may run again, so the client does not
  poll.
* The sampling parameters of a request apply to the whole answer, however often it is interrupted (``core/cuts.py``).
* With ``async_training.weights.at_swap=keep`` requests stay in the engine while it pauses for a sync, and the server
  reports which version sampled which tokens.
* With ``async_training.partial_rollout=False`` the scheduler lets all answers finish before a sync. If a sync
  interrupts an answer nevertheless, ``generate`` raises an error. With this setting, an answer whose server died, or
  that comes from a checkpoint, continues only under the version that began it.
* With ``rollout.scheduling_policy=priority`` a full engine takes the requests of the oldest groups first, so
  interrupted answers continue before answers of younger groups begin.
* The experts returned for a token are those that the router chose when an engine first read the token. The router's
  choices when the token is read again, after an interruption or in a later request, are ignored
  (``rollout/chosen_experts.py``).
* The client keeps every answer, complete or interrupted, for checkpoints. After a restart, a request whose answer is in
  the checkpoint is answered without a server (``kept_answers``). :meth:`ResumingClient.fetch` gets the tokens sampled
  so far for open requests.
* If generation and training alternate, requests wait in the client during training (:class:`TurnGate`).
* The version of a request is the server's version when the request is submitted. If the server reports that it answered
  an uninterrupted request with another version, the client raises an error.
* A server whose process or engine died is removed from the load balancer. Other servers continue its answers after the
  tokens that the client has. With ``async_training.partial_tokens_interval`` the client fetches tokens regularly.
* A request that fails in its engine is sent again, to another server if possible. Tokens that the failed request has
  sampled are not used. After `MOST_FAILURES` failures in a row the client raises an error.
* An answer has to arrive within ``async_training.timeouts.generation`` seconds, even if several servers are asked for
  it. Each time the client has fetched tokens of the answer, this limit begins anew. If a server returns no token, the
  client asks again at growing intervals. If the caller of ``generate`` gives up, the client makes the server drop the
  request.

Shown by tests/integration/test_client.py (with fake server actors) and tests/e2e/test_fully_async.py.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import ray
from omegaconf import DictConfig
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from verl.utils import normalize_token_ids
from verl.utils.rollout_trace import rollout_trace_op
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
    joined_experts,
)
from recipe.async_engine.engines.load_balancer import ENDED, SAY_ENDED_S
from recipe.async_engine.engines.request_names import NamingClient
from recipe.async_engine.record.activity import Work
from recipe.async_engine.rollout.kept_answers import TrajectoryRecorder, current_recorder, digest

logger = logging.getLogger(__name__)

# Names of verl's arguments with the images, videos and audio of a request.
MODALITIES = ("image_data", "video_data", "audio_data")
ASK_AGAIN_S = 0.02
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0
MOST_FAILURES = 3
"""Number of failures in a row after which a request is not sent again."""


@dataclass
class Patience:
    """The time that servers have left to return the next token of one answer, and their attempts so far.

    Attributes:
        left_s: seconds left. Only the time inside `spent` is subtracted.
        refusals: number of requests in a row that returned no token.
        failures: number of those requests that failed in their engine.
        failed_at: id of the server where the last failure occurred.
    """

    left_s: float
    refusals: int = 0
    failures: int = 0
    failed_at: str | None = None

    @contextmanager
    def spent(self) -> Iterator[None]:
        """Subtract the duration of the ``with`` block from `left_s`."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.left_s -= time.monotonic() - began

    async def refused(self) -> None:
        """Count a request that returned no token. If there was another directly before it, pause before returning."""
        self.refusals += 1
        if self.refusals > 1:
            with self.spent():
                await asyncio.sleep(min(LONGEST_PAUSE_S, SHORTEST_PAUSE_S * 2.0 ** min(self.refusals - 2, 30)))


# The open request (`Flight`) of the current asyncio task. A context variable passes it on through verl's methods, which
# have no parameter for it.
_flight: ContextVar[Flight | None] = ContextVar("recipe_flight", default=None)


class TurnGate:
    """Holds the requests of agent loops while the trainer trains, if generation and training take turns.

    An agent loop that runs a tool when a generation turn ends continues until its next request, which then waits for
    the next generation turn. Requests of a validation are never held. The gate lets all requests pass until `hold` is
    called. A request that is held for ``timeout_s`` seconds fails.
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
        """Total seconds for which the gate was closed. These seconds do not count toward a trajectory's deadline."""
        return self._held_s + (0.0 if self._held_since is None else time.monotonic() - self._held_since)

    def hold(self) -> None:
        """Make requests wait from now on, because the trainer's turn begins."""
        if self._held_since is None:
            self._held_since = time.monotonic()
        self._open.clear()

    def go_on(self) -> None:
        """Let all requests pass from now on, because a turn of generation begins."""
        self._held_s, self._held_since = self.held_s, None
        self._open.set()

    async def enter(self) -> None:
        """Wait until requests may pass; raise GenerationError if that takes longer than ``timeout_s``."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._open.wait()
        except TimeoutError:
            raise GenerationError(
                f"a trajectory waited {self._timeout_s:g} s for generation to go on after a training step; raise "
                "async_training.timeouts.batch_wait if training, a weight sync, a checkpoint and a validation together "
                "take longer"
            ) from None


class ResumingClient(NamingClient):
    """verl's client, extended by resumption, versions, deadlines and fail-over as the module's contract describes."""

    def __init__(self, config: DictConfig, load_balancer_handle: ray.actor.ActorHandle | None = None, **kwargs: Any):
        super().__init__(config=config, load_balancer_handle=load_balancer_handle, **kwargs)
        async_training = config.async_training
        self._resume = bool(async_training.partial_rollout)
        self._timeout_s = float(async_training.timeouts.generation)
        interval, rollout = async_training.partial_tokens_interval, config.actor_rollout_ref.rollout
        self._replays_experts = bool(rollout.get("enable_rollout_routing_replay", False))
        self._fetch_every_s = None if interval is None else float(interval)
        self._by_age = rollout.get("scheduling_policy") == "priority"
        self._prompt_length, self._response_length = rollout.get("prompt_length"), rollout.get("response_length")
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
            # If the load balancer has chosen a server, it has counted a request that will never be sent. Undo this.
            answer.add_done_callback(lambda routed: self._give_back(routed, request_id))
            raise
        except Exception as error:
            answer.cancel()
            if "No available servers" in str(error):
                raise GenerationError(
                    "no rollout server can take requests: each one has died or failed to load weights (see the log)"
                ) from error
            raise
        if flight is not None:
            flight.server_id, flight.server = server_id, server
        return server_id, server

    def _give_back(self, routed: asyncio.Future[Any], request_id: str) -> None:
        if not routed.cancelled() and routed.exception() is None:
            self._release_server(routed.result()[0], request_id)

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        """Tell the load balancer that a request has ended.

        This package's load balancer gets the report together with the next request, or after `SAY_ENDED_S` seconds.
        A user's own load balancer gets a separate call for the report, as in verl.
        """
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
        """Wait for the answer to a call of the load balancer.

        Raises:
            GenerationError: the load balancer died, or did not answer within `ROUTING_S` seconds.
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

    def name_request(self, engine_request_id: str) -> None:
        flight = _flight.get()
        if flight is not None:
            flight.engine_request_id = engine_request_id

    @rollout_trace_op
    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """Generate a complete answer to ``prompt_ids``, as the module's contract describes.

        Args:
            request_id: identifies a conversation, whose requests all go to one server.
            sampling_params: the engine's sampling parameters. ``max_tokens`` limits the whole answer, including resumed
                parts.

        Returns:
            TokenOutput with the tokens of the whole answer. Its ``extra_fields`` have ``min_global_steps`` and
                ``max_global_steps``, the oldest and the newest version that sampled tokens of the answer.

        Raises:
            GenerationError: no server answered in time, an answer was interrupted although resuming is off, or the
                sampling parameters are not supported.
        """
        if (why := refused(sampling_params)) is not None:
            raise GenerationError(f"a rollout request has unsupported sampling parameters: {why}")
        prompt_ids = normalize_token_ids(prompt_ids)
        sampling_params = dict(sampling_params)
        budget = self._budget(len(prompt_ids), sampling_params)
        merged = TokenOutput(token_ids=[], log_probs=[], num_preempted=0)
        versions: list[int] = []
        recorder = current_recorder() or TrajectoryRecorder(work=Work.VALIDATION)
        if any(kwargs.get(data) for data in MODALITIES):
            recorder.mark_multimodal()
        if self._by_age and not kwargs.get("priority"):  # verl's agent loops pass the priority 0
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
        merged.routed_experts = recorder.experts.first_chosen(prompt_ids + merged.token_ids, merged.routed_experts)
        for ours in (GOES_ON, VERSION_RUNS, RECOMPUTED):
            merged.extra_fields.pop(ours, None)
        merged.extra_fields.update(
            global_steps=versions[-1], min_global_steps=min(versions), max_global_steps=max(versions)
        )
        return merged

    def _note_cut(
        self, request_id: str, recorder: TrajectoryRecorder, cut_by: str | None, prompt_length: int, merged: TokenOutput
    ) -> None:
        """Count an interruption, and the tokens that have to be sent again to resume the answer.

        ``cut_by`` says what interrupted the answer; None stands for a weight sync.

        Raises:
            GenerationError: a weight sync interrupted the answer, although answers must not be resumed.
        """
        tokens = len(merged.token_ids)
        if not self._resume and cut_by is None:
            raise GenerationError(
                f"the answer to request {request_id} was interrupted after {tokens} tokens although "
                "async_training.partial_rollout=False; an interrupted answer is never trained as a complete one"
            )
        recorder.interruptions += cut_by != CHECKPOINT
        recorder.reprefilled_tokens += prompt_length + tokens

    def _record(self, recorder: TrajectoryRecorder, context: list[int], part: TokenOutput) -> list[int]:
        """Record ``part`` of an answer, sampled after the tokens ``context``; return the versions that sampled it."""
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
                f"the answer to request {request_id} was interrupted under version {versions[0]} and could continue "
                f"only under version {versions[-1]}, although async_training.partial_rollout=False"
            )

    def _budget(self, prompt_length: int, sampling_params: dict[str, Any]) -> int:
        """Return the token limit of an answer: the caller's, or else the default that verl's server would use."""
        for key in ("max_tokens", "max_new_tokens"):
            if key in sampling_params:
                return int(sampling_params.pop(key))
        return max(1, min(self._response_length, self._prompt_length + self._response_length - prompt_length))

    async def _request(
        self, request_id: str, recorder: TrajectoryRecorder, patience: Patience, **kwargs: Any
    ) -> TokenOutput | None:
        """Return the answer to a request: the checkpoint's, or else a server's; None if the server sent no token."""
        asked = digest(kwargs["prompt_ids"], [kwargs.get(data) for data in MODALITIES])
        if recorder.over.is_set():
            raise GenerationError("the trajectory has ended, so its agent loop can send no further requests")
        answer = recorder.again(asked)
        if answer is None:
            if not recorder.validates:
                await self.gate.enter()
            began = time.monotonic()
            answer = await self._ask_server(request_id, recorder, patience, asked, **kwargs)
            recorder.asked_s += time.monotonic() - began
            # `_ask_server` has just removed the request from ``recorder.flights``, and no other task has run since. So
            # a checkpoint has the request's tokens only once, in a flight or in the answer that is kept here.
            if answer is not None:
                recorder.keep(asked, answer)
        return answer

    async def _ask_server(
        self, request_id: str, recorder: TrajectoryRecorder, patience: Patience, asked: bytes, **kwargs: Any
    ) -> TokenOutput | None:
        """Send one request, whose digest is ``asked``, to one server.

        Returns:
            The answer, or None if the server returned no token, because the server died, the request failed there, or
                the server has left the load balancer.
        """
        with self._under_way(recorder, asked, patience.failed_at) as flight, patience.spent():
            answer = asyncio.ensure_future(super().generate(request_id, **kwargs))
            try:
                part = await self._growing(answer, flight, patience)
            except TimeoutError:
                who = f"rollout server {flight.server_id}"
                if patience.refusals:
                    who = f"rollout servers gave {patience.refusals} answers without a token, and"
                raise GenerationError(
                    f"{who} did not answer within {self._timeout_s:g} s; raise "
                    "async_training.timeouts.generation if answers may take longer"
                ) from None
            except (RequestFailed, ActorUnavailableError) as error:
                # Keep the server in the load balancer, even if it cannot be reached: the fault may be in this process,
                # because agent loops run in it and may have left it unable to open connections.
                patience.failures, patience.failed_at = patience.failures + 1, flight.server_id
                if patience.failures == MOST_FAILURES:
                    raise
                logger.warning("a request is asked again: %s", error)
                return None
            except (RayActorError, EngineDied) as error:
                return await self._after_death(flight, recorder, error)
        return part if part.token_ids or part.stop_reason not in ABORTED else None

    async def _growing(self, answer: asyncio.Task[Any], flight: Flight, patience: Patience) -> Any:
        """Wait for ``answer``. The time limit begins anew when the client has fetched tokens of the answer.

        Raises:
            TimeoutError: no new token was fetched within the time limit.
        """
        try:
            limit_s = patience.left_s
            while True:
                sampled = len(flight.token_ids)
                with suppress(TimeoutError):
                    async with asyncio.timeout(limit_s):
                        return await asyncio.shield(answer)
                if answer.done() or len(flight.token_ids) == sampled:
                    raise TimeoutError
                # Tokens have arrived, so begin the limit anew. `Patience.spent` will subtract the whole duration of
                # this method from ``left_s``, so add the new limit to ``left_s`` too.
                patience.left_s += self._timeout_s
                limit_s = self._timeout_s
        finally:
            answer.cancel()

    async def _after_death(self, flight: Flight, recorder: TrajectoryRecorder, error: Exception) -> TokenOutput | None:
        logger.error(
            "rollout server %s died during a request, which continues on another server after %d tokens: %s",
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
    def _under_way(self, recorder: TrajectoryRecorder, asked: bytes, avoided: str | None) -> Iterator[Flight]:
        """Register a request as open during the ``with`` block, so that its tokens can be fetched.

        ``asked`` is the digest of the request, and ``avoided`` is the id of the server that should not get it, if any.
        """
        flight = Flight(asked, avoided=avoided)
        _flight.set(flight)
        self._flights.add(flight)
        recorder.flights.append(flight)
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
            recorder.flights.remove(flight)
            _flight.set(None)

    async def _fetch_forever(self, every_s: float) -> None:
        while self._flights:
            await asyncio.sleep(every_s)
            await self._fetch(self._flights)

    async def fetch(self, flights: Iterable[Flight], timeout_s: float) -> None:
        """Fetch the tokens that servers have sampled so far for the given open requests.

        If a server does not know a request, either the request or its answer is in transit. Then the server is asked
        again until it knows the request, or the answer has arrived. After ``timeout_s`` seconds, requests whose tokens
        are still unknown are skipped.
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
                logger.error("it is not known which tokens %d open requests have sampled", len(left))
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
            # This error is only logged, because the requests of a dead or stuck server raise their own errors.
            logger.warning("rollout server %s did not say what it has sampled: %s", flights[0].server_id, error)
            for flight in flights:
                flight.told = True
            return
        for flight in flights:
            news = sampled.get(flight.engine_request_id)
            if news is not None:
                flight.told = True
                # With router replay, use tokens only if the server also returned the experts chosen for them.
                if not self._replays_experts or news.routed_experts is not None:
                    flight.add(news, after=known[str(flight.engine_request_id)])

    @staticmethod
    def _runs(part: TokenOutput) -> list[tuple[int, int]]:
        """Return (version, token count) for each run of consecutive tokens of ``part`` that one version sampled."""
        runs = part.extra_fields.get(VERSION_RUNS)
        if runs:
            if sum(count for _, count in runs) != len(part.token_ids):
                raise GenerationError(
                    f"a rollout server returned {len(part.token_ids)} tokens, but its token counts by version have "
                    f"another sum: {runs}"
                )
            return [(int(version), count) for version, count in runs]
        submitted, answered = part.extra_fields.get("submitted_version"), part.extra_fields.get("global_steps")
        version = submitted if submitted is not None else answered
        if version is None:
            raise GenerationError("a rollout server returned an answer without a weight version")
        if answered is not None and answered != version and part.stop_reason not in ABORTED:
            raise GenerationError(f"weights changed from version {version} to {answered} during one answer")
        return [(int(version), len(part.token_ids))]

    @staticmethod
    def _merge(merged: TokenOutput, part: TokenOutput) -> None:
        merged.token_ids.extend(part.token_ids)
        if part.log_probs is not None:
            merged.log_probs.extend(part.log_probs)
        merged.routed_experts = joined_experts(merged.routed_experts, part.routed_experts, len(part.token_ids))
        if part.num_preempted is not None:
            merged.num_preempted += part.num_preempted
        merged.extra_fields = {**part.extra_fields, **merged.extra_fields}

# SPDX-License-Identifier: Apache-2.0
"""The pool of agent-loop workers: which one runs a trajectory, and how its events come back.

Contract: a trajectory goes to the live worker with the fewest of them, on a retry to another one if there is another.
Whatever a worker raises arrives as a :class:`RecipeError`. A worker that died has no work until Ray has started it
again; while there is no other, its calls wait for that. Workers are asked all the time whether they answer: one whose
process stopped, or whose event loop is blocked, gets no trajectories after half of ``answer_s`` if there is another,
and is ended and started again after the whole. Events are awaited, payloads are not: the pool hands on their
object references. One event loop calls it. Of a worker that died, the account of tokens is that of the last time it was
asked, and what it held is lost. Shown by tests/integration/test_workers.py and test_turn_pool.py.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.core.groups import Group
from recipe.async_engine.rollout.agent_worker import (
    AgentLoopError,
    TrajectoryCancelled,
    TrajectoryGenerated,
    TrajectoryScored,
    WorkerRestarted,
)
from recipe.async_engine.rollout.kept_answers import Exported, TokenAccount, TrajectoryRecord
from recipe.async_engine.rollout.prompts import sample_of
from recipe.async_engine.rollout.soundness import NonFinite, RewardError, UnusableAnswer
from recipe.async_engine.run.restarts import is_up_again

logger = logging.getLogger(__name__)

STARTUP_S = 600.0
ANSWER_S = 180.0
# Of ``answer_s``: the pause between two questions.
ASK_EVERY = 0.1


class TrajectoryFailed(RecipeError):
    """An agent loop raised, or its worker died; a note has the traceback of the place where it happened."""


class NoWorkers(RecipeError):
    """Every agent-loop worker has died, and none is being started again."""

    def __init__(self, message: str = "every agent-loop worker has died; the first one's error is in the log above"):
        super().__init__(message)


@dataclass(eq=False)
class TrajectoryCall:
    """One attempt at one trajectory on one worker; ``turn``: the newest generation turn that it is admitted to."""

    key: str
    worker_id: str
    pool: "WorkerPool"
    row: dict[str, Any]
    group: Group
    rollout_n: int
    record: TrajectoryRecord | None = None
    turn: int | None = None

    def arguments(self) -> tuple[Any, ...]:
        """What the worker's ``run_trajectory`` is called with."""
        group, sample = self.group, sample_of(self.row, self.group)
        return self.key, sample, group.prompt.index, self.rollout_n, group.start, self.record, self.turn

    async def events(self) -> AsyncIterator[tuple[Any, Any]]:
        """(event, None) for each event, then (None, payload's object reference).

        Raises:
            TrajectoryFailed: the agent loop raised or the worker died.
            RewardError: the answer is complete but could not be scored.
            TrajectoryCancelled: :meth:`WorkerPool.cancel` named this call.
        """
        self.pool.began(self)
        life = 0
        try:
            actor = await self.pool.actor_of(self)
            life = self.pool.lives[self.worker_id]
            stream = actor.run_trajectory.options(num_returns="streaming").remote(*self.arguments())
            self.pool.submitted(self)
            scored = False
            async for reference in stream:
                if scored:
                    yield None, reference
                    return
                event = await reference
                if not isinstance(event, TrajectoryGenerated | TrajectoryScored):
                    raise TrajectoryFailed(f"trajectory {self.key} yielded {type(event).__name__} out of turn")
                scored = isinstance(event, TrajectoryScored)
                yield event, None
            raise TrajectoryFailed(f"trajectory {self.key} ended without its payload")
        except RayTaskError as error:
            # First of all: Ray's error is also an instance of its cause's class, which may be any of those below.
            cause = error.cause
            failed: RecipeError
            if isinstance(cause, WorkerRestarted):
                self.pool.died(self.worker_id, life, cause)
            if isinstance(cause, RewardError | NonFinite | UnusableAnswer | TrajectoryCancelled):
                failed = type(cause)(str(cause))
            else:
                said = str(cause) if isinstance(cause, AgentLoopError) else f"{type(cause).__name__}: {cause}"
                failed = TrajectoryFailed(f"trajectory {self.key} raised {said}")
            for note in getattr(cause, "__notes__", ()):
                failed.add_note(note)
            raise failed from error
        except RayActorError as error:
            self.pool.died(self.worker_id, life, error)
            raise TrajectoryFailed(f"the agent-loop worker of trajectory {self.key} died: {error}") from error
        except RecipeError:
            raise
        except Exception as error:  # Ray has many errors (an object lost, a full disk), which cost one attempt each
            raise TrajectoryFailed(f"trajectory {self.key} failed with {type(error).__name__}: {error}") from error
        finally:
            self.pool.ended(self)


class WorkerPool:
    """The agent-loop workers and how many trajectories each one runs.

    Args:
        actors: Ray may start them again.
        prepare: tells one that was what the others have been told.
        startup_s: how long one may take to be up again; after that it is given up.
        answer_s: how long one may not answer; after that it is ended.

    Attributes:
        lives: how often each worker was started again.
    """

    def __init__(
        self,
        actors: list[ray.actor.ActorHandle],
        prepare: Callable[[ray.actor.ActorHandle], Awaitable[None]] | None = None,
        startup_s: float = STARTUP_S,
        answer_s: float = ANSWER_S,
    ) -> None:
        self._actors = {f"worker-{n}": actor for n, actor in enumerate(actors)}
        self._running: Counter[str] = Counter({worker_id: 0 for worker_id in self._actors})
        self._worker_of_key: dict[str, str] = {}
        self._submitted: set[str] = set()
        self._accounts: dict[str, TokenAccount] = {}
        self._of_the_dead = TokenAccount()
        self._returning: dict[str, asyncio.Task[None]] = {}
        self._cancelled: set[str] = set()
        self._ended_turn = 0
        self._prepare_actor = prepare
        self._startup_s = startup_s
        self._answer_s = answer_s
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._silent: set[str] = set()
        self.lives: Counter[str] = Counter()

    @property
    def alive(self) -> int:
        return len(self._actors)

    @property
    def lost(self) -> bool:
        """Whether no worker is alive or being started again."""
        return not self._actors and not self._returning

    def call(
        self,
        row: dict[str, Any],
        group: Group,
        rollout_n: int,
        attempt: int,
        avoid: str | None,
        record: TrajectoryRecord | None = None,
        turn: int | None = None,
    ) -> TrajectoryCall:
        """The next attempt at a trajectory, on the least loaded worker other than ``avoid`` if there is one.

        ``record``: what a checkpoint has of it. ``turn``: the generation turn that it is admitted to, None in a stream.

        Raises:
            NoWorkers: none is alive or being started again.
        """
        self._watch_workers()
        answering = self._actors.keys() - self._silent
        candidates = [worker_id for worker_id in self._actors if worker_id in answering and worker_id != avoid]
        worker_id = min(candidates or self._actors or self._returning, key=self._running.__getitem__, default=None)
        if worker_id is None:
            raise NoWorkers
        return TrajectoryCall(f"{group.id}-{rollout_n}-{attempt}", worker_id, self, row, group, rollout_n, record, turn)

    async def actor_of(self, call: TrajectoryCall) -> ray.actor.ActorHandle:
        """The worker of a call, once it is up.

        Raises:
            TrajectoryFailed: it has died and is not started again.
            TrajectoryCancelled: :meth:`cancel` named the call meanwhile.
        """
        if call.worker_id in self._returning:
            await asyncio.wait([self._returning[call.worker_id]])
        if call.key in self._cancelled:
            raise TrajectoryCancelled(f"trajectory {call.key} was ended on request")
        if call.worker_id not in self._actors:
            raise TrajectoryFailed(f"agent-loop {call.worker_id} has died")
        return self._actors[call.worker_id]

    async def cancel(self, keys: Iterable[str]) -> None:
        """End the named calls; each raises TrajectoryCancelled to its own awaiter."""
        for worker_id, worker_keys in self._by_worker(keys).items():
            if worker_id in self._actors:
                self._actors[worker_id].cancel.remote(worker_keys)
            else:
                self._cancelled.update(worker_keys)

    def resume(self, calls: Sequence[TrajectoryCall], turn: int) -> None:
        """Let these calls go on in ``turn``, in this order."""
        for call in calls:
            # For one that waits for its worker to be started again.
            call.turn = turn
        for worker_id, keys in self._by_worker(call.key for call in calls).items():
            if worker_id in self._actors:
                self._actors[worker_id].resume.remote(keys, turn)

    async def end_turn(self, turn: int, timeout_s: float) -> TokenAccount:
        """Hold every trajectory at its next request; returns the workers' account together.

        A worker that does not answer in time is left to the deadlines of its trajectories.
        """
        self._ended_turn = turn
        for worker_id, account in (await self._ask("end_turn", timeout_s, turn)).items():
            self._note(worker_id, account)
        return self._account()

    def _by_worker(self, keys: Iterable[str]) -> dict[str, list[str]]:
        by_worker: dict[str, list[str]] = {}
        for key in keys:
            if key in self._worker_of_key:
                by_worker.setdefault(self._worker_of_key[key], []).append(key)
        return by_worker

    def rescore(self, payload: Any, version: int, start: int) -> Any:
        """Object reference of the scores of a finished trajectory; see :meth:`TrajectoryWorker.rescore`.

        None where no worker is alive: the trainer scores it then.
        """
        if not self._actors:
            return None
        worker_id = min(self._actors, key=self._running.__getitem__)
        return self._actors[worker_id].rescore.remote(payload, version, start)

    def began(self, call: TrajectoryCall) -> None:
        self._running[call.worker_id] += 1
        self._worker_of_key[call.key] = call.worker_id

    def submitted(self, call: TrajectoryCall) -> None:
        self._submitted.add(call.key)

    def ended(self, call: TrajectoryCall) -> None:
        self._running[call.worker_id] -= 1
        self._worker_of_key.pop(call.key, None)
        self._submitted.discard(call.key)
        self._cancelled.discard(call.key)

    def died(self, worker_id: str, life: int, error: BaseException) -> None:
        """The calls of a worker end with its death, and the first to say so has it taken back once it is up again.

        Args:
            life: ``lives`` of the worker when the call began: others may say so after its return.
        """
        if worker_id in self._actors and life == self.lives[worker_id]:
            actor = self._actors.pop(worker_id)
            logger.error("agent-loop %s died: %s", worker_id, error)
            self._returning[worker_id] = asyncio.create_task(self._take_back(worker_id, actor))
            if not isinstance(error, WorkerRestarted):
                self._of_the_dead += self._accounts.pop(worker_id, TokenAccount()).of_the_dead()

    async def export(self, timeout_s: float) -> Exported:
        """What every unfinished trajectory has been answered; a worker that does not tell in time is left out."""
        submitted = {key: self._worker_of_key[key] for key in self._submitted}
        # Half of the time is for the workers' own questions to their servers.
        told = await self._ask("export", timeout_s, timeout_s / 2)
        records: dict[str, TrajectoryRecord | None] = {}
        for worker_id, (part, account) in told.items():
            records.update(part)
            self._note(worker_id, account)
        over = {key for key, worker_id in submitted.items() if worker_id in told and key not in records}
        return Exported(records, over, self._account())

    async def close(self, keys: Iterable[str]) -> None:
        """End the named calls, and wait for no worker any more."""
        for task in (*self._returning.values(), *self._watches.values()):
            task.cancel()
        await self.cancel(keys)

    def metrics(self) -> dict[str, float]:
        """How many are up, and how often one was started again."""
        return {
            "fully_async/count/live_agent_loop_workers": self.alive,
            "fully_async/count/agent_loop_worker_restarts": self.lives.total(),
        }

    def _note(self, worker_id: str, account: TokenAccount) -> None:
        # One that has died since is counted already.
        if worker_id not in self._actors:
            return
        before = self._accounts.get(worker_id, TokenAccount())
        if account.cut < before.cut:
            # Of another process: that one died with no work, so that nobody has noticed yet.
            self._of_the_dead += before.of_the_dead()
        self._accounts[worker_id] = account

    def _account(self) -> TokenAccount:
        return sum(self._accounts.values(), self._of_the_dead)

    async def _ask(self, method: str, timeout_s: float, *arguments: Any) -> dict[str, Any]:
        """What the workers answer, by worker; one that does not is logged and left out."""

        async def answer(worker_id: str, actor: Any) -> Any:
            try:
                return await asyncio.wait_for(getattr(actor, method).remote(*arguments), timeout_s)
            except Exception as error:  # its trajectories end with their own errors
                logger.error("agent-loop %s did not answer %s: %s", worker_id, method, error)
                return None

        asked = dict(self._actors)
        answers = await asyncio.gather(*[answer(worker_id, actor) for worker_id, actor in asked.items()])
        return {worker_id: part for worker_id, part in zip(asked, answers, strict=True) if part is not None}

    def _watch_workers(self) -> None:
        for worker_id in self._actors.keys() - self._watches.keys():
            watch = self._watches[worker_id] = asyncio.create_task(self._watch(worker_id))
            watch.add_done_callback(lambda _, worker_id=worker_id: self._watches.pop(worker_id))

    async def _watch(self, worker_id: str) -> None:
        """Ask a worker whether it answers, until it dies."""
        life, actor = self.lives[worker_id], self._actors[worker_id]
        try:
            while self.lives[worker_id] == life and worker_id in self._actors:
                answer = asyncio.ensure_future(actor.__ray_ready__.remote())
                await asyncio.wait({answer}, timeout=self._answer_s / 2)
                if not answer.done():
                    self._silent.add(worker_id)
                    logger.warning("agent-loop %s has not answered for %g s", worker_id, self._answer_s / 2)
                    await asyncio.wait({answer}, timeout=self._answer_s / 2)
                if not answer.done():
                    logger.error(
                        "agent-loop %s has not answered for %g s (async_training.timeouts.agent_worker): it is ended",
                        worker_id,
                        self._answer_s,
                    )
                    ray.kill(actor, no_restart=False)
                await answer
                self._silent.discard(worker_id)
                await asyncio.sleep(ASK_EVERY * self._answer_s)
        except RayError as error:
            self.died(worker_id, life, error)
        finally:
            self._silent.discard(worker_id)

    async def _take_back(self, worker_id: str, actor: ray.actor.ActorHandle) -> None:
        try:
            async with asyncio.timeout(self._startup_s):
                while await is_up_again(actor):
                    try:
                        await self._prepare(actor)
                    except RayActorError:
                        continue
                    self._actors[worker_id] = actor
                    self.lives[worker_id] += 1
                    logger.warning("agent-loop %s is up again", worker_id)
                    return
            logger.error("agent-loop %s is not started again", worker_id)
        except TimeoutError:
            logger.error("agent-loop %s was not up again within %g s: it is given up", worker_id, self._startup_s)
        except Exception:  # the run goes on without it
            logger.exception("agent-loop %s could not be told what the others know: it is given up", worker_id)
        finally:
            del self._returning[worker_id]

    async def _prepare(self, actor: ray.actor.ActorHandle) -> None:
        """Tell a worker that was started again what it has to know before it has work."""
        if self._prepare_actor is not None:
            await self._prepare_actor(actor)
        told = 0
        while told < self._ended_turn:
            told = self._ended_turn
            await actor.end_turn.remote(told)

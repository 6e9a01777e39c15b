# SPDX-License-Identifier: Apache-2.0
"""The pool of agent-loop workers: which one runs a trajectory, and how its events come back.

Contract: a trajectory goes to the live worker with the fewest of them, on a retry to another one if there is another.
Whatever a worker raises arrives as a :class:`RecipeError`. Workers are asked all the time whether they answer; what
follows where one does not, or has died, is in `actors/worker_set.py`. Events are awaited, payloads are not: the pool
hands on their object references. A prompt of more than `LARGE` bytes, one with images say, goes into the object store
once for all the trajectories of its group. One event loop calls it. Of a worker that died, the account of tokens is
that of the last time it was asked, and what it held is lost. Shown by tests/integration/test_worker_pool.py and
test_turn_pool.py.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayTaskError

from recipe.async_engine.actors.worker_set import ANSWER_S, WorkerDied, WorkerSet
from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.core.groups import Group
from recipe.async_engine.rollout.kept_answers import Exported, TokenAccount, TokenFlow, TrajectoryRecord
from recipe.async_engine.rollout.prompts import sample_of
from recipe.async_engine.rollout.soundness import NonFinite, RewardError, UnusableAnswer
from recipe.async_engine.rollout.traced_groups import TracedGroups
from recipe.async_engine.rollout.trajectory_events import (
    AgentLoopError,
    TrajectoryCancelled,
    TrajectoryDisturbed,
    TrajectoryFailed,
    TrajectoryGenerated,
)

logger = logging.getLogger(__name__)

STARTUP_S = 600.0
LARGE = 64 << 10
"""Ray copies larger arguments into the object store too, once for each call."""
VALIDATION = "validation-"
"""What the keys of a validation's trajectories begin with; a worker has those of training beside them."""
ALONE = ", again, by itself (look for what in its agent loop or tools ends, blocks or fills the process)"
LOOK_S = 0.05
NONE_LEFT = "every agent-loop worker has died; the first one's error is in the log above"


class NoWorkers(RecipeError):
    """Every agent-loop worker has died, and none is being started again."""


@dataclass(eq=False)
class TrajectoryCall:
    """One attempt at one trajectory on one worker.

    turn: the newest generation turn that it is admitted to. alone: it has its worker for itself.
    """

    key: str
    worker_id: str
    pool: "WorkerPool"
    row: dict[str, Any]
    group: Group
    rollout_n: int
    record: TrajectoryRecord | None = None
    turn: int | None = None
    trace: bool = True
    alone: bool = False
    submitted: bool = False
    cancelled: bool = False

    def arguments(self) -> tuple[Any, ...]:
        """What the worker's ``run_trajectory`` is called with."""
        group = self.group
        return (
            self.key,
            self.pool.sample_for(self),
            group.prompt.index,
            self.rollout_n,
            group.start,
            self.record,
            self.turn,
            self.trace,
            self.pool.validates,
        )

    async def events(self) -> AsyncIterator[tuple[Any, Any]]:
        """(event, None) for each event, then (None, payload's object reference).

        Raises:
            TrajectoryFailed: the agent loop raised.
            TrajectoryDisturbed: the worker died, or something there cancelled it.
            RewardError: the answer is complete but could not be scored.
            TrajectoryCancelled: :meth:`WorkerPool.cancel` named this call.
        """
        self.pool.under_way[self.key] = self
        self.pool.users[self.group.id] += 1
        try:
            async with self.pool.place(self) as actor:
                if self.cancelled:
                    raise TrajectoryCancelled(f"trajectory {self.key} was ended on request")
                said, payload = actor.run_trajectory.options(num_returns=2).remote(*self.arguments())
                self.submitted = True
                event = await _event(said, payload)
                if isinstance(event, TrajectoryGenerated):
                    yield event, None
                    said, payload = actor.finish_trajectory.options(num_returns=2).remote(self.key)
                    event = await _event(said, payload)
                yield event, None
                yield None, payload
        except RayTaskError as error:
            # First of all: Ray's error is also an instance of its cause's class, which may be any of those below.
            cause = error.cause
            failed: RecipeError
            if isinstance(cause, RewardError | NonFinite | UnusableAnswer | TrajectoryCancelled):
                failed = type(cause)(str(cause))
            elif isinstance(cause, TrajectoryDisturbed):
                failed = TrajectoryDisturbed(f"trajectory {self.key}{ALONE if self.alone else ''}: {cause}")
            else:
                said = str(cause) if isinstance(cause, AgentLoopError) else f"{type(cause).__name__}: {cause}"
                failed = TrajectoryFailed(f"trajectory {self.key} raised {said}")
            for note in getattr(cause, "__notes__", ()):
                failed.add_note(note)
            raise failed from error
        except WorkerDied as error:
            often = ALONE if self.alone else ""
            raise TrajectoryDisturbed(f"the agent-loop worker of trajectory {self.key} died{often}: {error}") from error
        except RecipeError:
            raise
        except Exception as error:  # Ray has many errors (an object lost, a full disk), which cost one attempt each
            raise TrajectoryFailed(f"trajectory {self.key} failed with {type(error).__name__}: {error}") from error
        finally:
            self.pool.under_way.pop(self.key, None)
            self.pool.let_go(self.group.id)


async def _event(said: Any, payload: Any) -> Any:
    """What was said, or the error; ``payload`` has the same one then, and Ray logs errors that nobody has looked at."""
    try:
        return await said
    except Exception:
        with suppress(Exception):
            await payload
        raise


class WorkerPool(WorkerSet):
    """The agent-loop workers and how many trajectories each one runs.

    Args:
        actors: Ray may start them again.
        prepare: tells one that was what the others have been told.
        startup_s, answer_s: see `WorkerSet`.
        traced: which groups verl's rollout trace has.
        validates: its calls are those of a validation.

    Attributes:
        under_way: calls by their key.
        users: how many of them each group has, by its id.
    """

    def __init__(
        self,
        actors: list[Any],
        prepare: Callable[[Any], Awaitable[None]] | None = None,
        startup_s: float = STARTUP_S,
        answer_s: float = ANSWER_S,
        traced: TracedGroups | None = None,
        validates: bool = False,
    ) -> None:
        super().__init__("agent-loop", actors, answer_s, startup_s)
        self._size = len(actors)
        self.under_way: dict[str, TrajectoryCall] = {}
        self.users: Counter[int] = Counter()
        self._samples: dict[int, Any] = {}
        self._accounts: dict[str, TokenAccount] = {}
        self._lost_with_workers = TokenAccount()
        self._ended_turn = 0
        self._prepare_actor = prepare
        self._traced = traced or TracedGroups()
        self.validates = validates
        self._by_itself = asyncio.Lock()

    @property
    def alive(self) -> int:
        return len(self.actors)

    def call(
        self,
        row: dict[str, Any],
        group: Group,
        rollout_n: int,
        attempt: int,
        avoid: str | None,
        record: TrajectoryRecord | None = None,
        turn: int | None = None,
        alone: bool = False,
    ) -> TrajectoryCall:
        """The next attempt at a trajectory, on the least loaded worker other than ``avoid`` if there is one.

        ``record``: what a checkpoint has of it. ``turn``: the generation turn that it is admitted to, None in a stream.
        ``alone``: workers died under it, so that it has one for itself.

        Raises:
            NoWorkers: none is alive or being started again.
        """
        self.watch()
        worker_id = self.choose(but=avoid)
        if worker_id is None:
            raise NoWorkers(NONE_LEFT)
        key, trace = f"{group.id}-{rollout_n}-{attempt}", self._traced.has(group.id, group.start)
        if self.validates:
            key = f"{VALIDATION}{key}"
        return TrajectoryCall(key, worker_id, self, row, group, rollout_n, record, turn, trace, alone)

    @asynccontextmanager
    async def place(self, call: TrajectoryCall) -> AsyncIterator[Any]:
        """The worker of a call, once it is up.

        A call that is to be alone waits until its worker has no other, which ends with their deadlines, and keeps
        further ones away. With a single worker there is nowhere else for those. It begins in one that is sound: what
        those before it have changed there is not its doing.
        """
        if not call.alone:
            async with self.one(call.worker_id) as actor:
                yield actor
            return
        async with self._by_itself:
            self.reserved = call.worker_id
            try:
                while self.load[call.worker_id] and len({*self.actors, *self._returning}) > 1:
                    await asyncio.sleep(LOOK_S)
                with suppress(WorkerDied):
                    async with self.one(call.worker_id) as actor:
                        await actor.rehearse.remote()
                async with self.one(call.worker_id) as actor:
                    yield actor
            finally:
                self.reserved = None

    def sample_for(self, call: TrajectoryCall) -> Any:
        """The prompt of a call as its worker gets it: itself, or where the object store has it."""
        group = call.group
        if group.id not in self._samples:
            sample = sample_of(call.row, group)
            is_large = len(cloudpickle.dumps(sample)) > LARGE
            self._samples[group.id] = ray.put(sample) if is_large else sample
        return self._samples[group.id]

    def let_go(self, group_id: int) -> None:
        """A call of this group has ended."""
        self.users[group_id] -= 1
        if not self.users[group_id]:
            del self.users[group_id]
            self._samples.pop(group_id, None)

    async def cancel(self, keys: Iterable[str]) -> None:
        """End the named calls; each raises TrajectoryCancelled to its own awaiter."""
        for worker_id, worker_keys in self._by_worker(keys).items():
            if worker_id in self.actors:
                self.actors[worker_id].cancel.remote(worker_keys)
            else:
                for key in worker_keys:
                    self.under_way[key].cancelled = True

    def resume(self, calls: Sequence[TrajectoryCall], turn: int) -> None:
        """Let these calls go on in ``turn``, in this order."""
        for call in calls:
            # For one that waits for its worker to be started again.
            call.turn = turn
        for worker_id, keys in self._by_worker(call.key for call in calls).items():
            if worker_id in self.actors:
                self.actors[worker_id].resume.remote(keys, turn)

    async def end_turn(self, turn: int, timeout_s: float) -> TokenAccount:
        """Hold every trajectory at its next request; returns the workers' account together.

        A worker that does not answer in time is left to the deadlines of its trajectories.
        """
        self._ended_turn = turn
        for worker_id, account in (await self._ask("end_turn", timeout_s, turn)).items():
            self._note(worker_id, account)
        return self._account()

    def _by_worker(self, keys: Iterable[str]) -> dict[str, list[str]]:
        by_worker: dict[str, list[str]] = defaultdict(list)
        for key in keys:
            if key in self.under_way:
                by_worker[self.under_way[key].worker_id].append(key)
        return by_worker

    def rescore(self, payload: Any, version: int, start: int) -> Any:
        """Object reference of the scores of a finished trajectory; see :meth:`TrajectoryWorker.rescore`.

        None where no worker is alive: the trainer scores it then.
        """
        worker_id = self.choose()
        if worker_id not in self.actors:
            return None
        return self.actors[worker_id].rescore.remote(payload, version, start)

    def _noticed_death(self, worker_id: str) -> None:
        self._lost_with_workers += self._accounts.pop(worker_id, TokenAccount()).held_as_lost()

    async def export(self, timeout_s: float) -> Exported:
        """What every unfinished trajectory has been answered; a worker that does not tell in time is left out."""
        submitted = {key: call.worker_id for key, call in self.under_way.items() if call.submitted}
        # Half of the time is for the workers' own questions to their servers.
        told = await self._ask("export", timeout_s, timeout_s / 2)
        records: dict[str, TrajectoryRecord | None] = {}
        for worker_id, (part, account) in told.items():
            records.update(part)
            self._note(worker_id, account)
        over = {key for key, worker_id in submitted.items() if worker_id in told and key not in records}
        return Exported(records, over, self._account())

    async def close_books(self, timeout_s: float) -> TokenFlow | None:
        """Have every worker end its trajectories; what all of them say of their tokens.

        None if one does not answer or has died, since it is not known what it had.
        """
        told = await self._ask("close_books", timeout_s)
        if self.lives or len(told) < self._size:
            return None
        return sum(told.values(), TokenFlow())

    async def close(self, keys: Iterable[str]) -> None:
        """End the named calls, and wait for no worker any more."""
        self.stop()
        await self.cancel(keys)

    def metrics(self) -> dict[str, float]:
        """How many are up, and how often one was started again."""
        return {
            "fully_async/count/live_agent_loop_workers": self.alive,
            "fully_async/count/agent_loop_worker_restarts": self.lives.total(),
        }

    def _note(self, worker_id: str, account: TokenAccount) -> None:
        # One that has died since is counted already.
        if worker_id not in self.actors:
            return
        before = self._accounts.get(worker_id, TokenAccount())
        if account.cut < before.cut:
            # Of another process: that one died with no work, so that nobody has noticed yet.
            self._lost_with_workers += before.held_as_lost()
        self._accounts[worker_id] = account

    def _account(self) -> TokenAccount:
        return sum(self._accounts.values(), self._lost_with_workers)

    async def _ask(self, method: str, timeout_s: float, *arguments: Any) -> dict[str, Any]:
        """What the workers answer, by worker; one that does not is logged and left out."""

        async def answer(worker_id: str, actor: Any) -> Any:
            try:
                async with asyncio.timeout(timeout_s):
                    return await getattr(actor, method).remote(*arguments)
            except Exception as error:  # its trajectories end with their own errors
                logger.error("agent-loop %s did not answer %s: %s", worker_id, method, error)
                return None

        asked = dict(self.actors)
        answers = await asyncio.gather(*[answer(worker_id, actor) for worker_id, actor in asked.items()])
        return {worker_id: part for worker_id, part in zip(asked, answers, strict=True) if part is not None}

    async def _prepare(self, actor: Any) -> None:
        """Tell a worker that was started again what it has to know before it has work."""
        if self._prepare_actor is not None:
            await self._prepare_actor(actor)
        told = 0
        while told < self._ended_turn:
            told = self._ended_turn
            await actor.end_turn.remote(told)

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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayTaskError

from recipe.async_engine.actors.worker_set import WorkerDied, WorkerSet
from recipe.async_engine.config.sections import Timeouts
from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.rollout.group_run import (
    AgentLoopError,
    RolloutFailed,
    TrajectoryCancelled,
    TrajectoryDisturbed,
    TrajectoryFailed,
    TrajectoryRun,
)
from recipe.async_engine.rollout.kept_answers import Exported, TokenAccount, TokenFlow, TrajectoryRecord
from recipe.async_engine.rollout.loop_output import NonFinite, RewardError, UnusableAnswer
from recipe.async_engine.rollout.prompts import sample_of
from recipe.async_engine.rollout.traced_groups import TracedGroups

logger = logging.getLogger(__name__)

DEFAULTS = Timeouts()
LARGE = 64 << 10
"""Ray copies larger arguments into the object store too, once for each call."""
VALIDATION = "validation-"
"""What the keys of a validation's attempts begin with; a worker has those of training beside them."""
ALONE = ", again, by itself (look for what in its agent loop or tools ends, blocks or fills the process)"
LOOK_S = 0.05
NONE_LEFT = "every agent-loop worker has died; the first one's error is in the log above"


async def _said(said: Any, payload: Any) -> Any:
    """What was said, or the error; ``payload`` has the same one then, and Ray logs errors that nobody has looked at."""
    try:
        return await said
    except Exception:
        with suppress(Exception):
            await payload
        raise


def _failure(run: TrajectoryRun, cause: BaseException) -> RecipeError:
    """What an attempt failed with whose worker raised this."""
    failed: RecipeError
    if isinstance(cause, RewardError | NonFinite | UnusableAnswer | TrajectoryCancelled):
        failed = type(cause)(str(cause))
    elif isinstance(cause, TrajectoryDisturbed):
        failed = TrajectoryDisturbed(f"trajectory {run.key}{ALONE if run.is_suspect else ''}: {cause}")
    else:
        said = str(cause) if isinstance(cause, AgentLoopError) else f"{type(cause).__name__}: {cause}"
        failed = TrajectoryFailed(f"trajectory {run.key} raised {said}")
    for note in getattr(cause, "__notes__", ()):
        failed.add_note(note)
    return failed


class WorkerPool(WorkerSet):
    """The agent-loop workers and how many trajectories each one runs.

    Args:
        actors: Ray may start them again.
        prepare: tells one that was what the others have been told.
        startup_s, answer_s: see `WorkerSet`.
        traced: which groups verl's rollout trace has.
        validates: its attempts are those of a validation.

    Attributes:
        under_way: trajectories by the key of the attempt that is made.
        users: how many of them each group has, by its id.
    """

    def __init__(
        self,
        actors: list[Any],
        prepare: Callable[[Any], Awaitable[None]] | None = None,
        startup_s: float = DEFAULTS.startup,
        answer_s: float = DEFAULTS.agent_worker,
        traced: TracedGroups | None = None,
        validates: bool = False,
    ) -> None:
        super().__init__("agent-loop", actors, answer_s, startup_s)
        self._size = len(actors)
        self.under_way: dict[str, TrajectoryRun] = {}
        self.users: Counter[int] = Counter()
        self._samples: dict[int, Any] = {}
        self._accounts: dict[str, TokenAccount] = {}
        self._lost_with_workers = TokenAccount()
        self._holds = False
        self._prepare_actor = prepare
        self._traced = traced or TracedGroups()
        self.validates = validates
        self._by_itself = asyncio.Lock()

    @property
    def alive(self) -> int:
        return len(self.actors)

    def assign(self, run: TrajectoryRun) -> None:
        """Choose who makes the next attempt: the least loaded worker, another one than the last time if there is one.

        Raises:
            RolloutFailed: none is alive or being started again.
        """
        self.watch()
        run.worker_id = self.choose(but=run.worker_id if run.errors else None)
        if run.worker_id is None:
            raise RolloutFailed(NONE_LEFT)
        run.key = f"{VALIDATION if self.validates else ''}{run.of.group.id}-{run.n}-{len(run.errors)}"
        run.submitted = run.cancelled = False
        run.under_way = True

    async def attempt(self, run: TrajectoryRun, sampled: Callable[[], None]) -> None:
        """Make the attempt that was assigned; ``run`` has what came of it then.

        Args:
            sampled: called when its last token is, if its reward takes longer.

        Raises:
            TrajectoryFailed: the agent loop raised.
            TrajectoryDisturbed: the worker died, or something there cancelled it.
            RewardError, NonFinite, UnusableAnswer: the answer cannot be scored, or trained.
            TrajectoryCancelled: :meth:`cancel` named this attempt.
        """
        group_id = run.of.group.id
        self.under_way[run.key] = run
        self.users[group_id] += 1
        try:
            async with self.place(run) as actor:
                if run.cancelled:
                    raise TrajectoryCancelled(f"trajectory {run.key} was ended on request")
                said, payload = actor.run_trajectory.options(num_returns=2).remote(*self.arguments(run))
                run.submitted = True
                scored = await _said(said, payload)
                if scored is None:
                    sampled()
                    said, payload = actor.finish_trajectory.options(num_returns=2).remote(run.key)
                    scored = await _said(said, payload)
                run.scored, run.payload = scored, payload
        except RayTaskError as error:
            # First of all: Ray's error is also an instance of its cause's class, which may be any of those below.
            raise _failure(run, error.cause) from error
        except WorkerDied as error:
            often = ALONE if run.is_suspect else ""
            raise TrajectoryDisturbed(f"the agent-loop worker of trajectory {run.key} died{often}: {error}") from error
        except RecipeError:
            raise
        except Exception as error:  # Ray has many errors (an object lost, a full disk), which cost one attempt each
            raise TrajectoryFailed(f"trajectory {run.key} failed with {type(error).__name__}: {error}") from error
        finally:
            run.under_way = False
            self.under_way.pop(run.key, None)
            self.users[group_id] -= 1
            if not self.users[group_id]:
                del self.users[group_id]
                self._samples.pop(group_id, None)

    def arguments(self, run: TrajectoryRun) -> tuple[Any, ...]:
        """What the worker's ``run_trajectory`` is called with."""
        group = run.of.group
        trace = self._traced.has(group.id, group.start)
        sample = self.sample_for(run)
        return run.key, sample, group.prompt.index, run.n, group.start, run.record, trace, self.validates

    @asynccontextmanager
    async def place(self, run: TrajectoryRun) -> AsyncIterator[Any]:
        """The worker of an attempt, once it is up.

        One under suspicion is made alone: it waits until its worker has no other, which ends with their deadlines, and
        keeps further ones away. With a single worker there is nowhere else for those. It begins in one that is sound:
        what those before it have changed there is not its doing.
        """
        assert run.worker_id is not None
        if not run.is_suspect:
            async with self.one(run.worker_id) as actor:
                yield actor
            return
        async with self._by_itself:
            self.reserved = run.worker_id
            try:
                while self.load[run.worker_id] and len({*self.actors, *self._returning}) > 1:
                    await asyncio.sleep(LOOK_S)
                with suppress(WorkerDied):
                    async with self.one(run.worker_id) as actor:
                        await actor.rehearse.remote()
                async with self.one(run.worker_id) as actor:
                    yield actor
            finally:
                self.reserved = None

    def sample_for(self, run: TrajectoryRun) -> Any:
        """The prompt of an attempt as its worker gets it: itself, or where the object store has it."""
        group = run.of.group
        if group.id not in self._samples:
            sample = sample_of(run.of.row, group)
            is_large = len(cloudpickle.dumps(sample)) > LARGE
            self._samples[group.id] = ray.put(sample) if is_large else sample
        return self._samples[group.id]

    async def cancel(self, keys: Iterable[str]) -> None:
        """End the named attempts; each raises TrajectoryCancelled to its own awaiter."""
        for worker_id, worker_keys in self._by_worker(keys).items():
            if worker_id in self.actors:
                self.actors[worker_id].cancel.remote(worker_keys)
            else:
                for key in worker_keys:
                    self.under_way[key].cancelled = True

    async def go_on(self) -> None:
        """A generation turn begins: let every worker's requests go on."""
        self._holds = False
        for actor in self.actors.values():
            actor.go_on.remote()

    async def hold(self, timeout_s: float) -> TokenAccount:
        """The turn is over: hold every request from now on; returns the workers' account together.

        A worker that does not answer in time is left to the deadlines of its trajectories.
        """
        self._holds = True
        for worker_id, account in (await self._ask("hold", timeout_s)).items():
            self._note(worker_id, account)
        return self._account()

    def _by_worker(self, keys: Iterable[str]) -> dict[str, list[str]]:
        by_worker: dict[str, list[str]] = defaultdict(list)
        for key in keys:
            if key in self.under_way:
                by_worker[str(self.under_way[key].worker_id)].append(key)
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
        submitted = {key: run.worker_id for key, run in self.under_way.items() if run.submitted}
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
        if self._holds:
            await actor.hold.remote()
            if not self._holds:
                actor.go_on.remote()

# SPDX-License-Identifier: Apache-2.0
"""The pool of agent-loop workers, which chooses a worker for each trajectory.

Contract: each attempt runs on the worker with the fewest attempts, and a retry on a different worker if there is one.
Every error of a worker is raised as a :class:`RecipeError`. The pool checks all the time whether workers respond;
`actors/worker_set.py` describes how it handles a worker that does not, or has died. The pool never fetches payloads,
and only passes on their object references. A prompt of more than `LARGE` bytes, for example with images, is put into
the object store once for all trajectories of its group. Only one event loop calls the pool. The token account of a
dead worker is the last account that the worker reported, with its held tokens counted as lost.

Shown by tests/integration/test_worker_pool.py and test_turn_pool.py.
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
from recipe.async_engine.rollout.kept_answers import TokenAccount, TrajectoryRecord
from recipe.async_engine.rollout.loop_output import NonFinite, RewardError, UnusableAnswer
from recipe.async_engine.rollout.prompts import sample_of

logger = logging.getLogger(__name__)

DEFAULTS = Timeouts()
LARGE = 64 << 10
"""Size in bytes from which a prompt is put into the object store. Ray would do so itself, but again for each call."""
VALIDATION = "validation-"
"""Prefix of the keys of a validation's attempts, since a worker runs these at the same time as attempts of training."""
ALONE = ", again, in a worker of its own (look for what in its agent loop or tools ends, blocks or fills the process)"
LOOK_S = 0.05
NONE_LEFT = "every agent-loop worker has died; the first one's error is in the log above"


async def _said(said: Any, payload: Any) -> Any:
    """Return the result of ``said``, the first of a call's two results.

    If the call failed, ``payload`` has the same error and is awaited too, because Ray logs each error that was not
    awaited.
    """
    try:
        return await said
    except Exception:
        with suppress(Exception):
            await payload
        raise


def _failure(run: TrajectoryRun, cause: BaseException) -> RecipeError:
    """Return the error to raise for an attempt whose worker raised ``cause``."""
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


class TracedGroups:
    """Chooses the prompt groups that verl's rollout trace shows (``actor_rollout_ref.rollout.trace``).

    If ``max_samples_per_step_per_worker`` is set, the trace has the first groups of each version, with all their
    answers, up to that number times the number of agent-loop workers. Shown by
    tests/integration/test_rollout_trace.py.

    Args:
        each_version: the largest number of groups to trace in a version. None traces all groups.
    """

    def __init__(self, each_version: int | None = None) -> None:
        self._each_version = each_version
        self._chosen: set[int] = set()
        self._of_version: Counter[int] = Counter()

    def has(self, group_id: int, version: int) -> bool:
        """Return whether to trace a group that was issued at ``version``, always with the same result for a group."""
        if self._each_version is None or group_id in self._chosen:
            return True
        if self._of_version[version] >= self._each_version:
            return False
        self._of_version[version] += 1
        self._chosen.add(group_id)
        return True


class WorkerPool(WorkerSet):
    """The agent-loop workers and the attempts that they are running.

    Args:
        actors: the workers, which Ray may restart.
        prepare: a function that repeats to a restarted worker the settings that the other workers got.
        startup_s: seconds within which a restarted worker has to be up.
        answer_s: seconds without a response after which a worker is killed.
        traced: chooses the groups of verl's rollout trace.
        validates: whether the attempts belong to a validation.

    Attributes:
        under_way: the trajectories with a running attempt, by the attempt's key.
        users: number of running attempts by group id.
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
        """Choose a worker for the next attempt: the least loaded one, but for a retry a different one if possible.

        Raises:
            RolloutFailed: all workers are dead and none of them is being restarted.
        """
        self.watch()
        run.worker_id = self.choose(but=run.worker_id if run.errors else None)
        if run.worker_id is None:
            raise RolloutFailed(NONE_LEFT)
        run.key = f"{VALIDATION if self.validates else ''}{run.of.group.id}-{run.n}-{len(run.errors)}"
        run.submitted = run.cancelled = False
        run.under_way = True

    async def attempt(self, run: TrajectoryRun, sampled: Callable[[], None]) -> None:
        """Run the attempt that was assigned to a worker, and write its result into ``run``.

        Args:
            sampled: a function that is called when the last token is sampled, if the reward takes longer.

        Raises:
            TrajectoryFailed: the agent loop raised an error, or Ray failed.
            TrajectoryDisturbed: the worker died, or code in the worker cancelled the attempt.
            RewardError, NonFinite, UnusableAnswer: the answer cannot be scored or trained.
            TrajectoryCancelled: :meth:`cancel` was called for this attempt.
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
            # This clause has to be the first, because Ray's error is also an instance of its cause's class, which a
            # later clause may name.
            raise _failure(run, error.cause) from error
        except WorkerDied as error:
            often = ALONE if run.is_suspect else ""
            raise TrajectoryDisturbed(f"the agent-loop worker of trajectory {run.key} died{often}: {error}") from error
        except RecipeError:
            raise
        except Exception as error:  # any other error of Ray (a lost object, a full disk) fails only this attempt
            raise TrajectoryFailed(f"trajectory {run.key} failed with {type(error).__name__}: {error}") from error
        finally:
            run.under_way = False
            self.under_way.pop(run.key, None)
            self.users[group_id] -= 1
            if not self.users[group_id]:
                del self.users[group_id]
                self._samples.pop(group_id, None)

    def arguments(self, run: TrajectoryRun) -> tuple[Any, ...]:
        """Return the arguments of the worker's ``run_trajectory``."""
        group = run.of.group
        trace = self._traced.has(group.id, group.start)
        sample = self.sample_for(run)
        return run.key, sample, group.prompt.index, run.n, group.start, run.record, trace, self.validates

    @asynccontextmanager
    async def place(self, run: TrajectoryRun) -> AsyncIterator[Any]:
        """Yield the worker of an attempt, once the worker has started.

        A trajectory that may have caused disturbances gets the worker for itself: no new attempts are assigned to the
        worker, and the trajectory waits until the worker's other attempts have ended. If there is only one worker,
        the worker is shared nevertheless. The worker is tested first, so that the trajectory is not blamed for damage
        that earlier trajectories did.
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
        """Return the prompt of an attempt, as an object reference if the prompt is larger than `LARGE`."""
        group = run.of.group
        if group.id not in self._samples:
            sample = sample_of(run.of.row, group)
            is_large = len(cloudpickle.dumps(sample)) > LARGE
            self._samples[group.id] = ray.put(sample) if is_large else sample
        return self._samples[group.id]

    async def cancel(self, keys: Iterable[str]) -> None:
        """Cancel the attempts with these keys, so that :meth:`attempt` raises TrajectoryCancelled for each."""
        for worker_id, worker_keys in self._by_worker(keys).items():
            if worker_id in self.actors:
                self.actors[worker_id].cancel.remote(worker_keys)
            else:
                for key in worker_keys:
                    self.under_way[key].cancelled = True

    async def go_on(self) -> None:
        """Let the requests of all workers continue, because a generation turn begins."""
        self._holds = False
        for actor in self.actors.values():
            actor.go_on.remote()

    async def hold(self, timeout_s: float) -> TokenAccount:
        """Hold every request from now on, because the generation turn is over.

        If a worker does not answer in time, its trajectories end at their own deadlines.

        Returns:
            The sum of the workers' token accounts.
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
        """Have log-prob servers score a finished trajectory.

        Returns:
            An object reference of the scores, or None if no worker is alive. For None the trainer computes the
                log-probs itself.
        """
        worker_id = self.choose()
        if worker_id not in self.actors:
            return None
        return self.actors[worker_id].rescore.remote(payload, version, start)

    def _noticed_death(self, worker_id: str) -> None:
        self._lost_with_workers += self._accounts.pop(worker_id, TokenAccount()).held_as_lost()

    async def export(self, timeout_s: float) -> tuple[dict[str, TrajectoryRecord | None], set[str], TokenAccount]:
        """Collect the answers of unfinished trajectories from all workers that respond in time.

        Returns:
            The answers by key of the attempt, or None for an attempt without answers; the keys of attempts that their
            workers have finished, so that their payloads are in transit; and the sum of the workers' token accounts.
        """
        submitted = {key: run.worker_id for key, run in self.under_way.items() if run.submitted}
        # The workers get half of the time to ask the rollout servers.
        told = await self._ask("export", timeout_s, timeout_s / 2)
        records: dict[str, TrajectoryRecord | None] = {}
        for worker_id, (part, account) in told.items():
            records.update(part)
            self._note(worker_id, account)
        over = {key for key, worker_id in submitted.items() if worker_id in told and key not in records}
        return records, over, self._account()

    async def close_books(self, timeout_s: float) -> TokenAccount | None:
        """Have every worker cancel its trajectories, and return the sum of the workers' token accounts.

        The result is None if a worker does not answer or has died, because its counts are not known.
        """
        told = await self._ask("close_books", timeout_s)
        if self.lives or len(told) < self._size:
            return None
        return sum(told.values(), TokenAccount())

    async def close(self, keys: Iterable[str]) -> None:
        """Cancel the attempts with these keys, and stop watching the workers."""
        self.stop()
        await self.cancel(keys)

    def metrics(self) -> dict[str, float]:
        """Return the number of live workers, and the number of restarts of all workers."""
        return {
            "fully_async/count/live_agent_loop_workers": self.alive,
            "fully_async/count/agent_loop_worker_restarts": self.lives.total(),
        }

    def _note(self, worker_id: str, account: TokenAccount) -> None:
        # The account of a worker that has died in the meantime is already counted as lost.
        if worker_id not in self.actors:
            return
        before = self._accounts.get(worker_id, TokenAccount())
        if account.cut < before.cut:
            # The account comes from a restarted process. The earlier process died while it had no attempt, so its death
            # has not been noticed.
            self._lost_with_workers += before.held_as_lost()
        self._accounts[worker_id] = account

    def _account(self) -> TokenAccount:
        return sum(self._accounts.values(), self._lost_with_workers)

    async def _ask(self, method: str, timeout_s: float, *arguments: Any) -> dict[str, Any]:
        """Call a method of all workers, and return the results by worker, without those of workers that fail."""

        async def answer(worker_id: str, actor: Any) -> Any:
            try:
                async with asyncio.timeout(timeout_s):
                    return await getattr(actor, method).remote(*arguments)
            except Exception as error:  # the worker's trajectories end with their own errors
                logger.error("agent-loop %s did not answer %s: %s", worker_id, method, error)
                return None

        asked = dict(self.actors)
        answers = await asyncio.gather(*[answer(worker_id, actor) for worker_id, actor in asked.items()])
        return {worker_id: part for worker_id, part in zip(asked, answers, strict=True) if part is not None}

    async def _prepare(self, actor: Any) -> None:
        """Give a restarted worker its settings before it gets trajectories."""
        if self._prepare_actor is not None:
            await self._prepare_actor(actor)
        if self._holds:
            await actor.hold.remote()
            if not self._holds:
                actor.go_on.remote()

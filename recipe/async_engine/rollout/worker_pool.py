# SPDX-License-Identifier: Apache-2.0
"""The pool of agent-loop workers, which chooses a worker for each trajectory.

Contract: each attempt at a trajectory runs on the worker with the fewest running attempts, and a retry on a different
worker if possible. Every error of a worker is raised as a :class:`RecipeError`. The pool constantly checks whether its
workers respond (`actors/worker_set.py` describes what happens if one dies or does not respond). The pool passes on
object references to payloads (packed trajectories), but never fetches payloads. A prompt of more than `LARGE` bytes,
for example with images, is put into the object store once for all trajectories of its group. Only one event loop calls
the pool. The token counts of a dead worker are those that it reported last, with its held tokens (`TokenAccount`)
counted as lost. Shown by tests/integration/test_worker_pool.py and test_turn_pool.py.
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
"""A prompt with more bytes is put into the object store only once. Ray itself would put it there for each call."""
VALIDATION = "validation-"
"""Prefix of the keys of validation attempts, which a worker may run at the same time as attempts for training."""
ALONE = ", again, in a worker of its own (look for what in its agent loop or tools ends, blocks or fills the process)"
LOOK_S = 0.05
NONE_LEFT = "every agent-loop worker has died; the first one's error is in the log above"


async def _said(said: Any, payload: Any) -> Any:
    """Await and return ``said``, the first of the two results of a remote call.

    If the call fails, its second result, ``payload``, has the same error. Then ``payload`` is awaited too, because Ray
    logs each error that is never awaited.
    """
    try:
        return await said
    except Exception:
        with suppress(Exception):
            await payload
        raise


def _failure(run: TrajectoryRun, cause: BaseException) -> RecipeError:
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

    The trace has only the first ``each_version`` groups of each version, or all groups if this is None. The
    number is the setting ``max_samples_per_step_per_worker`` times the number of agent-loop workers. Shown by
    tests/integration/test_rollout_trace.py.
    """

    def __init__(self, each_version: int | None = None) -> None:
        self._each_version = each_version
        self._chosen: set[int] = set()
        self._of_version: Counter[int] = Counter()

    def has(self, group_id: int, version: int) -> bool:
        """Return whether to trace a group that was issued at ``version``. A group that is traced stays traced."""
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
        prepare: a function that sends a restarted worker the settings that it had before.
        startup_s: seconds within which a restarted worker has to be up.
        answer_s: seconds without a response after which a worker is killed.
        validates: whether the attempts belong to a validation.

    Attributes:
        under_way: the trajectories that have a running attempt, by the attempt's key.
        users: number of running attempts for each group id.
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
        """Choose the worker that will run the next attempt: the one with the fewest open calls.

        A retry gets a different worker than the failed attempt had, if possible.

        Raises:
            RolloutFailed: all workers are dead, and none is being restarted.
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

        If the reward is not ready soon after the last token is sampled, ``sampled`` is called.

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
            # Keep `except RayTaskError` first: a RayTaskError is also an instance of the class of its cause, so another
            # clause could catch it.
            raise _failure(run, error.cause) from error
        except WorkerDied as error:
            often = ALONE if run.is_suspect else ""
            raise TrajectoryDisturbed(f"the agent-loop worker of trajectory {run.key} died{often}: {error}") from error
        except RecipeError:
            raise
        except Exception as error:  # other errors of Ray (a lost object, a full disk) fail only this attempt
            raise TrajectoryFailed(f"trajectory {run.key} failed with {type(error).__name__}: {error}") from error
        finally:
            run.under_way = False
            self.under_way.pop(run.key, None)
            self.users[group_id] -= 1
            if not self.users[group_id]:
                del self.users[group_id]
                self._samples.pop(group_id, None)

    def arguments(self, run: TrajectoryRun) -> tuple[Any, ...]:
        group = run.of.group
        trace = self._traced.has(group.id, group.start)
        sample = self.sample_for(run)
        return run.key, sample, group.prompt.index, run.n, group.start, run.record, trace, self.validates

    @asynccontextmanager
    async def place(self, run: TrajectoryRun) -> AsyncIterator[Any]:
        """Wait until the worker of an attempt is up, and yield the worker's actor handle.

        A trajectory that may have disturbed others gets the worker for itself: no new attempts are assigned to the
        worker, and the trajectory waits until the worker's other attempts have ended. Then the worker is tested, so
        that the trajectory is not blamed for damage by earlier trajectories. If there is only one worker, it is shared.
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
        """Return an attempt's prompt, or a Ray object reference to the prompt if it has more than `LARGE` bytes."""
        group = run.of.group
        if group.id not in self._samples:
            sample = sample_of(run.of.row, group)
            is_large = len(cloudpickle.dumps(sample)) > LARGE
            self._samples[group.id] = ray.put(sample) if is_large else sample
        return self._samples[group.id]

    async def cancel(self, keys: Iterable[str]) -> None:
        """Cancel the attempts with these keys. Each open call of :meth:`attempt` then raises TrajectoryCancelled."""
        for worker_id, worker_keys in self._by_worker(keys).items():
            if worker_id in self.actors:
                self.actors[worker_id].cancel.remote(worker_keys)
            else:
                for key in worker_keys:
                    self.under_way[key].cancelled = True

    async def go_on(self) -> None:
        self._holds = False
        for actor in self.actors.values():
            actor.go_on.remote()

    async def hold(self, timeout_s: float) -> TokenAccount:
        """Make all workers hold their requests until `go_on`, and return their token counts in total (`TokenAccount`).

        A worker that does not answer within ``timeout_s`` seconds is skipped. Its trajectories end at their deadlines.
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
            A Ray object reference to the scores, or None if no worker is alive. In that case the trainer computes the
                log-probs.
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
            The answers by the attempt's key, with None for an attempt without answers; the keys of finished attempts
                whose payloads are in transit; and the sum of the workers' token counts.
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
        """Cancel the trajectories of all workers, and return the sum of the workers' token counts.

        The result is None if a worker does not answer or has died, because its counts are then unknown.
        """
        told = await self._ask("close_books", timeout_s)
        if len(told) < self._size:
            return None
        return sum(told.values(), TokenAccount())

    async def close(self, keys: Iterable[str]) -> None:
        """Cancel the attempts with these keys, and stop watching the workers."""
        self.stop()
        await self.cancel(keys)

    def metrics(self) -> dict[str, float]:
        return {
            "fully_async/count/live_agent_loop_workers": self.alive,
            "fully_async/count/agent_loop_worker_restarts": self.lives.total(),
        }

    def _note(self, worker_id: str, account: TokenAccount) -> None:
        # If the worker has died since it sent ``account``, its last counts are already in ``_lost_with_workers``.
        if worker_id not in self.actors:
            return
        before = self._accounts.get(worker_id, TokenAccount())
        if account.cut < before.cut:
            # `cut` never decreases within a process, so this is a new process of the worker. The death of the old one
            # was not noticed, because it ran no attempt. Keep its last counts here.
            self._lost_with_workers += before.held_as_lost()
        self._accounts[worker_id] = account

    def _account(self) -> TokenAccount:
        return sum(self._accounts.values(), self._lost_with_workers)

    async def _ask(self, method: str, timeout_s: float, *arguments: Any) -> dict[str, Any]:
        """Call a method of all workers; return the results by worker id, without workers that fail or are late."""

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
        if self._prepare_actor is not None:
            await self._prepare_actor(actor)
        if self._holds:
            await actor.hold.remote()
            if not self._holds:
                actor.go_on.remote()

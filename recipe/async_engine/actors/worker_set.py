# SPDX-License-Identifier: Apache-2.0
"""Chooses a worker for each call, among workers that Ray restarts when they die.

Contract: a worker that died gets no calls until Ray has restarted it and `_prepare` has run; if there is no other
worker, calls wait for it. A worker that has not answered for half of ``answer_s`` seconds gets calls only if there is
no other worker. After ``answer_s`` seconds it is considered suspended or hanging: it is killed, and Ray restarts it. A
worker whose process can no longer serve any call (a spoilt worker) raises `WorkerSpoilt` or `EngineDied`, or answers
even health checks with an error, and is killed at once. All methods are called on one event loop. Shown by
tests/integration/test_worker_pool.py and test_reward_dispatch.py.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from recipe.async_engine.actors.control import has_ended, is_up_again, sign_of_life
from recipe.async_engine.core.deadlines import Silence
from recipe.async_engine.core.errors import EngineDied, RecipeError
from recipe.async_engine.core.plain import told

logger = logging.getLogger(__name__)

ASK_EVERY = 0.1
"""Pause between a worker's answer to a health check and the next check, as a share of ``answer_s``."""
LOOK_S = 1.0
PASSED_OVER_AT_MOST = 64


class WorkerDied(RecipeError):
    """A worker died before or during a call."""


class WorkersLost(RecipeError):
    """All workers have died, and none is being restarted."""


class WorkerRestarted(RecipeError):
    """Raised by a worker that was restarted and has not got its settings again (`WorkerSet._prepare`)."""


class WorkerSpoilt(RecipeError):
    """Raised by a worker whose process can no longer serve any call."""


def as_handle(method: str, call: Callable[..., Awaitable[Any]]) -> SimpleNamespace:
    """Return a stand-in for an actor handle, on which ``handle.<method>.remote(...)`` calls ``call``."""
    return SimpleNamespace(**{method: SimpleNamespace(remote=call)})


class WorkerSet:
    """Chooses workers and replaces those that fail, as the module's contract describes.

    Args:
        kind: name of this type of worker, for the log.
        answer_s: seconds without an answer after which a worker is killed.
        startup_s: seconds that a worker may take to restart before it is given up; None for no limit.

    Attributes:
        actors: workers that are alive, by name.
        silent: names of living workers that do not answer at present.
        lives: number of restarts of each worker.
        load: number of open calls of each worker.
        reserved: name of a worker that gets no new calls as long as another worker is alive or being restarted.
    """

    def __init__(self, kind: str, actors: Sequence[Any], answer_s: float, startup_s: float | None = None) -> None:
        self.actors = {f"worker-{n}": actor for n, actor in enumerate(actors)}
        self.silent: set[str] = set()
        self.lives: Counter[str] = Counter()
        self.load: Counter[str] = Counter()
        self.reserved: str | None = None
        self._failed: Counter[str] = Counter()
        self._passed_over: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._returning: dict[str, asyncio.Task[None]] = {}
        self._questions: dict[str, asyncio.Task[None]] = {}
        self._watched = False
        self._last: WorkerDied | None = None
        self._kind, self._answer_s, self._startup_s = kind, answer_s, startup_s

    @property
    def lost(self) -> bool:
        """Whether all workers have died and none is being restarted."""
        return not self.actors and not self._returning

    def choose(self, but: str | None = None) -> str | None:
        """Return the name of the worker with the fewest open calls, or None if all workers are lost.

        The worker ``but`` is chosen only if no other one is available. A worker whose last n calls failed (`note`) is
        avoided in the next 2^n choices, but in at most 64, as long as other workers are alive.
        """
        candidates = [name for name in self.actors if name not in self.silent and name not in (but, self.reserved)]
        # If the only worker alive is reserved, calls wait for workers that are being restarted.
        others = [name for name in self._returning if self.reserved not in (None, name)]
        anyone = candidates or others or self.actors or self._returning
        passed_over, self._passed_over = self._passed_over, +(self._passed_over - Counter(self._passed_over.keys()))
        return min(anyone, key=lambda n: (passed_over[n] > 0, self.load[n], self._calls[n]), default=None)

    def note(self, name: str, failed: bool) -> None:
        self._failed[name] = self._failed[name] + 1 if failed else 0
        self._passed_over[name] = min(2 ** self._failed[name], PASSED_OVER_AT_MOST) if failed else 0

    @asynccontextmanager
    async def one(self, name: str) -> AsyncIterator[Any]:
        """Wait until the worker ``name`` is up, and yield it for a call.

        Raises:
            WorkerDied: the worker died before or during the call.
        """
        self.load[name] += 1
        self._calls[name] += 1
        life = 0
        try:
            if name in self._returning:
                await asyncio.wait([self._returning[name]])
            if name not in self.actors:
                raise WorkerDied(f"{self._kind} {name} has died")
            life = self.lives[name]
            yield self.actors[name]
        except RayTaskError as error:
            # This clause has to be first: a RayTaskError whose cause is a RayActorError is a RayActorError too.
            said = isinstance(error.cause, WorkerRestarted | WorkerSpoilt | EngineDied)
            ended = error.cause if said else await self._spoilt(name, life, error)
            if ended is None:
                raise
            self.died(name, life, ended)
            raise WorkerDied(f"{self._kind} {name} died: {ended}") from error
        except RayActorError as error:
            self.died(name, life, error)
            raise WorkerDied(f"{self._kind} {name} died: {error}") from error
        finally:
            self.load[name] -= 1

    async def ask(self, call: Callable[[Any], Awaitable[Any]]) -> Any:
        """Run ``call`` with the least busy worker and return the result.

        A worker whose calls fail is avoided if there are others. If this call is cancelled, usually because of a
        deadline, the worker's health is checked. If no worker is available, the call waits for one.

        Raises:
            WorkerDied: the worker died, and others are alive or being restarted.
            WorkersLost: all workers have died.
        """
        while (name := self.choose()) in self.silent:
            await self.any_answer()
        try:
            if name is not None:
                async with self.one(name) as worker:
                    answer = await call(worker)
                self.note(name, failed=False)
                return answer
        except WorkerDied as error:
            self._last = error
            # If this was the last worker, the error at the end of this function is raised instead.
            if not self.lost:
                raise
        except Exception:
            if name is not None:
                self.note(name, failed=True)
            raise
        except asyncio.CancelledError:
            self.doubt(name)
            raise
        raise WorkersLost(f"every {self._kind} worker has died; the last error of a call: {self._last or 'none'}")

    def died(self, name: str, life: int, error: BaseException) -> None:
        """Give a dead worker no calls until it is up again.

        Only the first report of a death counts. ``life`` is the worker's number of restarts (`lives`) at the time when
        the failed call began. If the worker has been restarted since then, the report is ignored.
        """
        if name in self.actors and life == self.lives[name]:
            logger.error("%s %s died: %s", self._kind, name, error)
            is_up = isinstance(error, RayTaskError | WorkerSpoilt | EngineDied)
            self._returning[name] = asyncio.create_task(self._take_back(name, self.actors.pop(name), is_up))
            if not isinstance(error, WorkerRestarted):
                self._noticed_death(name)

    async def _spoilt(self, name: str, life: int, error: RayTaskError) -> WorkerSpoilt | None:
        """Return why a worker can no longer serve any call, or None if only the call that raised ``error`` failed."""
        # Ray may deliver a WorkerSpoilt as an error of another class that quotes the WorkerSpoilt's text.
        for line in str(error).splitlines():
            _, named, words = line.partition(f"{WorkerSpoilt.__name__}: ")
            if named:
                return WorkerSpoilt(words)
        if isinstance(error.cause, RecipeError) or name not in self.actors or life != self.lives[name]:
            return None
        with suppress(TimeoutError, RayActorError):
            async with asyncio.timeout(self._answer_s):
                try:
                    await sign_of_life(self.actors[name]).remote()
                except RayTaskError as failure:
                    return WorkerSpoilt(f"it answers every call with {told(failure.cause or failure)}")
        return None

    def _noticed_death(self, name: str) -> None:
        """Do nothing; a subclass may override this hook, which is called once for each death of a worker."""

    async def _prepare(self, actor: Any) -> None:
        """Do nothing; a subclass may send a restarted worker the settings and handles that it needs for calls."""

    def watch(self) -> None:
        """From now on, check the health of every worker repeatedly. This goes on after a worker is restarted."""
        self._watched = True
        for name in self.actors:
            self._question(name, for_ever=True)

    def doubt(self, name: str | None) -> None:
        """Check a worker's health once, because a call was given up. New calls avoid the worker until it answers."""
        if name in self.actors:
            self.silent.add(name)
            self._question(name, for_ever=False)

    def _question(self, name: str, for_ever: bool) -> None:
        def end(question: asyncio.Task[None]) -> None:
            del self._questions[name]
            self.silent.discard(name)
            if self._watched and not question.cancelled() and question.exception() is None:
                # The worker was restarted, and its new process is not checked yet.
                self.watch()

        if name not in self._questions:
            self._questions[name] = asyncio.create_task(self._keep_asking(name, for_ever))
            self._questions[name].add_done_callback(end)

    async def any_answer(self) -> None:
        """Wait until one of the workers whose health is being checked has answered or died."""
        await asyncio.wait(self._questions.values(), return_when=asyncio.FIRST_COMPLETED)

    def stop(self) -> None:
        """Stop the health checks, and stop waiting for workers that are being restarted."""
        self._watched = False
        for task in (*self._returning.values(), *self._questions.values()):
            task.cancel()

    async def _keep_asking(self, name: str, for_ever: bool) -> None:
        life, actor = self.lives[name], self.actors[name]
        try:
            while self.lives[name] == life and name in self.actors:
                answer = asyncio.ensure_future(sign_of_life(actor).remote())
                silence = Silence(f"{self._kind} {name}", self._answer_s)
                while not (await asyncio.wait({answer}, timeout=min(LOOK_S, self._answer_s / 100)))[0]:
                    if silence.too_long():
                        logger.error("%s has not answered for %g s: it is ended", silence.part, self._answer_s)
                        ray.kill(actor, no_restart=False)
                        break
                    if silence.seconds > self._answer_s / 2 and name not in self.silent:
                        self.silent.add(name)
                        logger.warning("%s has not answered for %g s", silence.part, self._answer_s / 2)
                await answer
                if not for_ever:
                    return
                self.silent.discard(name)
                await asyncio.sleep(ASK_EVERY * self._answer_s)
        except RayError as error:
            self.died(name, life, error)

    async def _take_back(self, name: str, actor: Any, is_up: bool) -> None:
        try:
            async with asyncio.timeout(self._startup_s):
                if is_up:
                    ray.kill(actor, no_restart=False)
                    await has_ended(actor)
                while await is_up_again(actor):
                    try:
                        await self._prepare(actor)
                    except RayActorError:
                        continue
                    self.actors[name] = actor
                    self.lives[name] += 1
                    if self._watched:
                        self.watch()
                    logger.warning("%s %s is up again", self._kind, name)
                    return
            logger.error("%s %s is not started again", self._kind, name)
        except TimeoutError:
            logger.error("%s %s was not up again within %g s: it is given up", self._kind, name, self._startup_s)
        except Exception:  # the run continues without this worker
            logger.exception("%s %s could not be prepared after its restart: it is given up", self._kind, name)
        finally:
            del self._returning[name]

# SPDX-License-Identifier: Apache-2.0
"""Workers that Ray starts again when they die: which of them can have work, and which one has least.

Contract: a worker that died has no work until Ray has started it again and it was prepared; while there is no other,
calls wait for that. One that was asked and has not answered for half of ``answer_s`` has none if there is another, and
is ended, and so started again, after the whole: its process was stopped, or its event loop hangs. One whose process is
spoilt, which it says itself or answers every question with an error, is ended at once. One event loop calls it.

Shown by tests/integration/test_worker_pool.py and test_reward_dispatch.py.
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
from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.core.plain import told

logger = logging.getLogger(__name__)

ANSWER_S = 180.0
# Of ``answer_s``: the pause between two questions.
ASK_EVERY = 0.1
PASSED_OVER_AT_MOST = 64


class WorkerDied(RecipeError):
    """A worker died under a call, or before it."""


class WorkerRestarted(RecipeError):
    """Raised by a worker that was started again and has not been prepared."""


class WorkerSpoilt(RecipeError):
    """Raised by a worker whose process does not do any more what every call needs."""


def as_handle(method: str, call: Callable[..., Awaitable[Any]]) -> SimpleNamespace:
    """As an actor handle of which this one method is called."""
    return SimpleNamespace(**{method: SimpleNamespace(remote=call)})


class WorkerSet:
    """See the module's contract.

    Args:
        kind: of workers, for the log.
        actors: Ray may start them again.
        answer_s: how long one may not answer.
        startup_s: how long one may take to be up again, after which it is given up; None: any time.

    Attributes:
        actors: those that are alive, by name.
        silent: names of those among them that do not answer.
        lives: how often each was started again.
        load: its calls under way.
        reserved: the one that has no further work where there is another, be it one that is being started again.
    """

    def __init__(
        self, kind: str, actors: Sequence[Any], answer_s: float = ANSWER_S, startup_s: float | None = None
    ) -> None:
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
        self._kind, self._answer_s, self._startup_s = kind, answer_s, startup_s

    @property
    def lost(self) -> bool:
        """Whether none is alive or being started again."""
        return not self.actors and not self._returning

    def choose(self, but: str | None = None) -> str | None:
        """The one with the fewest calls, other than ``but`` if there is another; None if all are lost.

        One whose calls fail (:meth:`note`) is passed over the longer, the more of them have in a row.
        """
        candidates = [name for name in self.actors if name not in self.silent and name not in (but, self.reserved)]
        # Beside a reserved one, calls wait for those that are being started again.
        others = [name for name in self._returning if self.reserved not in (None, name)]
        anyone = candidates or others or self.actors or self._returning
        passed_over, self._passed_over = self._passed_over, +(self._passed_over - Counter(self._passed_over.keys()))
        return min(anyone, key=lambda n: (passed_over[n] > 0, self.load[n], self._calls[n]), default=None)

    def note(self, name: str, failed: bool) -> None:
        """How a call of this worker ended."""
        self._failed[name] = self._failed[name] + 1 if failed else 0
        self._passed_over[name] = min(2 ** self._failed[name], PASSED_OVER_AT_MOST) if failed else 0

    @asynccontextmanager
    async def one(self, name: str) -> AsyncIterator[Any]:
        """A worker, once it is up, for one call; raises WorkerDied if it dies meanwhile, or is not started again."""
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
            # First of all: Ray's error is also an instance of its cause's class, which may be the one below.
            said = isinstance(error.cause, WorkerRestarted | WorkerSpoilt)
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

    def died(self, name: str, life: int, error: BaseException) -> None:
        """The first to say so has a dead worker taken back once it is up again; others may say so after its return.

        ``life``: ``lives`` of the worker when the call began.
        """
        if name in self.actors and life == self.lives[name]:
            logger.error("%s %s died: %s", self._kind, name, error)
            is_up = isinstance(error, RayTaskError | WorkerSpoilt)
            self._returning[name] = asyncio.create_task(self._take_back(name, self.actors.pop(name), is_up))
            if not isinstance(error, WorkerRestarted):
                self._noticed_death(name)

    async def _spoilt(self, name: str, life: int, error: RayTaskError) -> WorkerSpoilt | None:
        """What its worker says of itself in another error, or shows; None if the error is one of the call alone."""
        # Where a process is spoilt, Ray may come to send what it says as an error of Ray's own.
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
        """Once for each death that was noticed as such."""

    async def _prepare(self, actor: Any) -> None:
        """Tell a worker that was started again what it has to know before it has work."""

    def watch(self) -> None:
        """Ask every worker from now on whether it answers, all the time, those too that are started again."""
        self._watched = True
        for name in self.actors:
            self._question(name, for_ever=True)

    def doubt(self, name: str | None) -> None:
        """A call was given up: whether it is the call alone or the worker, only asking can tell."""
        if name in self.actors:
            self.silent.add(name)
            self._question(name, for_ever=False)

    def _question(self, name: str, for_ever: bool) -> None:
        def end(question: asyncio.Task[None]) -> None:
            del self._questions[name]
            self.silent.discard(name)
            if self._watched and not question.cancelled() and question.exception() is None:
                # It was of the life before.
                self.watch()

        if name not in self._questions:
            self._questions[name] = asyncio.create_task(self._keep_asking(name, for_ever))
            self._questions[name].add_done_callback(end)

    async def news(self) -> None:
        """Wait until one that was asked has answered, or has died."""
        await asyncio.wait(self._questions.values(), return_when=asyncio.FIRST_COMPLETED)

    def stop(self) -> None:
        """Wait for no worker any more, and ask none."""
        self._watched = False
        for task in (*self._returning.values(), *self._questions.values()):
            task.cancel()

    async def _keep_asking(self, name: str, for_ever: bool) -> None:
        life, actor = self.lives[name], self.actors[name]
        try:
            while self.lives[name] == life and name in self.actors:
                answer = asyncio.ensure_future(sign_of_life(actor).remote())
                await asyncio.wait({answer}, timeout=self._answer_s / 2)
                if not answer.done():
                    self.silent.add(name)
                    logger.warning("%s %s has not answered for %g s", self._kind, name, self._answer_s / 2)
                    await asyncio.wait({answer}, timeout=self._answer_s / 2)
                if not answer.done():
                    logger.error("%s %s has not answered for %g s: it is ended", self._kind, name, self._answer_s)
                    ray.kill(actor, no_restart=False)
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
        except Exception:  # the run goes on without it
            logger.exception("%s %s could not be told what the others know: it is given up", self._kind, name)
        finally:
            del self._returning[name]

# SPDX-License-Identifier: Apache-2.0
"""Calls a user's agent loop so that a failure costs only the loop's own trajectory.

Contract: whatever a loop or one of its tools raises, including ``SystemExit``, becomes an `AgentLoopError` with its
message and its traceback as text, because the error's object may not be readable in another process. Whoever waits for
the loop's task notices that it was cancelled although nobody asked for that. Columns of the data reach the loop
whatever their names are, except for `ARGUMENTS`.

Shown by tests/integration/test_users_loops.py.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from functools import cache, partial
from typing import Any, cast

import hydra
import numpy as np
from ray.exceptions import RayTaskError
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, _agent_loop_registry

from recipe.async_engine.core.columns import ARGUMENTS
from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.core.plain import told, traced
from recipe.async_engine.rollout.group_run import AgentLoopError
from recipe.async_engine.rollout.loop_output import NonFinite, RewardError, UnusableAnswer

ROLLOUT_N = "__rollout_n__"
"""With this column verl's v1 trainers give a prompt another number of answers than ``rollout.n``."""
PRIORITY = "priority"
ANY = "**"
CONTROLS = frozenset({ROLLOUT_N, "__do_sample__"})
"""Columns that verl reads itself and does not give to the loop."""

OURS = (AgentLoopError, RewardError, NonFinite, UnusableAnswer)
"""Errors that already say what is wrong with a trajectory."""


async def guarded(work: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    """Return the result of ``work``.

    Raises:
        AgentLoopError: ``work`` raised something other than `OURS`.
    """
    try:
        return await work(*arguments)
    except (*OURS, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:  # a user's loop may raise anything, and SystemExit would end the worker's event loop
        raise explained(AgentLoopError, "", error) from None


class _BegunTask(asyncio.Task[Any]):
    """A task that cannot be cancelled before it has begun, because Ray never answers a call that was."""

    has_begun = False

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the task, or have it cancelled right after it has begun."""
        if self.has_begun or self.done():
            return super().cancel(msg)
        self.get_loop().call_soon(super().cancel, msg)
        return True


def contain_exits(loop: asyncio.AbstractEventLoop) -> None:
    """Keep any task of this event loop from ending the loop by ``SystemExit``, which asyncio does not catch."""

    async def contained(work: Coroutine[Any, Any, Any]) -> Any:
        asyncio.current_task(loop).has_begun = True  # type: ignore[union-attr]
        try:
            return await work
        except (SystemExit, KeyboardInterrupt) as error:
            raise explained(AgentLoopError, "", error) from None

    loop.set_task_factory(cast(Any, lambda loop, work, **options: _BegunTask(contained(work), loop=loop, **options)))


async def run_loop(agent_loop: AgentLoopBase, sampling_params: dict[str, Any], row: dict[str, Any], **v1: Any) -> Any:
    """Run the loop for a row of the data, whose columns are its arguments, and return the loop's result.

    Args:
        agent_loop: the loop.
        sampling_params: its sampling parameters.
        row: the row of the data.
        v1: further arguments that verl's v1 trainers give to a loop that accepts them.
    """
    for name in ARGUMENTS & row.keys():
        raise AgentLoopError(f"the data has a column {name!r}, the name of an argument of every agent loop: rename it")
    takes = _parameters(type(agent_loop).run)
    # A column that is missing in this row's file gets the loop's own default, if there is one.
    columns = {
        name: value
        for name, value in row.items()
        if name not in CONTROLS and (value is not None or not takes.get(name, False))
    }
    more = {name: value for name, value in v1.items() if ANY in takes or name in takes}
    if type(agent_loop).__module__.startswith("verl.") and not isinstance(columns.get(PRIORITY), int | np.integer):
        # verl's own loops use this column as a request's priority in the engine.
        columns.pop(PRIORITY, None)
    return await agent_loop.run(sampling_params, **{**more, **columns})


def check_row(row: dict[str, Any], n: int | None) -> None:
    """Raise `AgentLoopError` if a row asks for another number of answers, or if verl cannot hand it on."""
    for name, value in row.items():
        if not (isinstance(value, list | tuple) and any(isinstance(part, list | tuple | np.ndarray) for part in value)):
            continue
        try:
            np.array([value])
        except ValueError:
            raise AgentLoopError(
                f"the data's column {name!r} has lists of different lengths in each other, of which verl can make no "
                "array for the reward: make it text (JSON), a mapping, or lists of one length"
            ) from None
    if n is not None and (asked := row.get(ROLLOUT_N)) is not None and asked != n:
        raise AgentLoopError(
            f"the data's column {ROLLOUT_N} asks for {asked} answers to this prompt: only verl's own v1 trainers give "
            f"each prompt a number of its own, here it is actor_rollout_ref.rollout.n={n}; leave the column out"
        )


@cache
def _parameters(run: Hashable) -> dict[str, bool]:
    """Return the names of a loop's arguments and whether each has a default, with `ANY` if it takes any name."""
    try:
        parameters = inspect.signature(cast(Callable[..., Any], run)).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {
        ANY if parameter.kind is inspect.Parameter.VAR_KEYWORD else parameter.name: parameter.default
        is not inspect.Parameter.empty
        for parameter in parameters
    }


def explained(kind: type[RecipeError], words: str, error: BaseException) -> RecipeError:
    """Return an error of this kind that says what ``error`` was.

    A note has the traceback of ``error``, which Ray would cut short.
    """
    what = error.cause if isinstance(error, RayTaskError) and error.cause is not None else error
    # The messages of this package's own errors need no type before them.
    failed = kind(f"{words}{what if isinstance(what, RecipeError) else told(what)}")
    failed.add_note(traced(error))
    return failed


@cache
def loop_maker(agent_name: str) -> Callable[..., AgentLoopBase]:
    """Return a function that makes the agent loop registered under ``agent_name``, given verl's arguments.

    Raises:
        AgentLoopError: no loop is registered under that name.
    """
    if agent_name not in _agent_loop_registry:
        raise AgentLoopError(f"no agent loop {agent_name!r} is registered, only {sorted(_agent_loop_registry)}")
    settings = _agent_loop_registry[agent_name]
    own = {name: value for name, value in settings.items() if name != "_target_"}
    if any(name.startswith("_") or not isinstance(value, str | int | float | None) for name, value in own.items()):
        # The loop has arguments that Hydra has to build.
        return partial(hydra.utils.instantiate, settings)
    return partial(hydra.utils.get_object(settings["_target_"]), **own)

# SPDX-License-Identifier: Apache-2.0
"""Runs a user's agent loop so that an error in it fails only its own trajectory.

Contract: any error of an agent loop or of its tools, even ``SystemExit``, becomes an `AgentLoopError` that has the
message and the traceback as text, because another process may be unable to unpickle the error itself. If the task of an
agent loop is cancelled, the ``CancelledError`` is passed on, so that the agent-loop worker can check whether it has
requested this cancellation. The columns of the data are passed to the agent loop as arguments, except those that
control verl itself (`CONTROLS`). A column whose name is in `ARGUMENTS` is refused. Shown by
tests/integration/test_users_loops.py.
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
from recipe.async_engine.rollout.prompts import ROLLOUT_N

DO_SAMPLE = "__do_sample__"
PRIORITY = "priority"
ANY = "**"
CONTROLS = frozenset({ROLLOUT_N, DO_SAMPLE})
"""Columns of the data that control verl itself. They are not passed to the agent loop."""

OURS = (AgentLoopError, RewardError, NonFinite, UnusableAnswer)
"""Errors that already explain why a trajectory failed, so they are raised unchanged."""


async def guarded(work: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    """Await ``work(*arguments)``, which may run users' code, and return its result.

    Raises:
        AgentLoopError: ``work`` raised an error that is not one of `OURS`.
    """
    try:
        return await work(*arguments)
    except (*OURS, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:  # a user's loop may raise anything, and SystemExit would end the worker's event loop
        raise explained(AgentLoopError, "", error) from None


class _BegunTask(asyncio.Task[Any]):
    """A task that runs its first step even if it is cancelled earlier. Otherwise Ray would never answer the call that
    the task runs.
    """

    has_begun = False

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the task. If it has not begun yet, the cancellation takes effect after its first step."""
        if self.has_begun or self.done():
            return super().cancel(msg)
        self.get_loop().call_soon(super().cancel, msg)
        return True


def contain_exits(loop: asyncio.AbstractEventLoop) -> None:
    """Make tasks of an event loop raise `AgentLoopError` instead of ``SystemExit``, which would end the event loop."""

    async def contained(work: Coroutine[Any, Any, Any]) -> Any:
        asyncio.current_task(loop).has_begun = True  # type: ignore[union-attr]
        try:
            return await work
        except (SystemExit, KeyboardInterrupt) as error:
            raise explained(AgentLoopError, "", error) from None

    loop.set_task_factory(cast(Any, lambda loop, work, **options: _BegunTask(contained(work), loop=loop, **options)))


async def run_loop(agent_loop: AgentLoopBase, sampling_params: dict[str, Any], row: dict[str, Any], **v1: Any) -> Any:
    """Run an agent loop with the columns of a data row as its arguments, and return the loop's result.

    ``v1`` has arguments that verl's v1 trainers pass. The agent loop gets those that its signature accepts.
    """
    for name in ARGUMENTS & row.keys():
        raise AgentLoopError(f"the data has a column {name!r}, the name of an argument of every agent loop: rename it")
    takes = _parameters(type(agent_loop).run)
    # A row has None for a column that its data file lacks. Leave the column out if the loop's parameter has a default.
    columns = {
        name: value
        for name, value in row.items()
        if name not in CONTROLS and (value is not None or not takes.get(name, False))
    }
    more = {name: value for name, value in v1.items() if ANY in takes or name in takes}
    if type(agent_loop).__module__.startswith("verl.") and not isinstance(columns.get(PRIORITY), int | np.integer):
        # verl's own agent loops pass this column to the engine as the request's priority, so drop any non-integer.
        columns.pop(PRIORITY, None)
    return await agent_loop.run(sampling_params, **{**more, **columns})


def check_row(row: dict[str, Any]) -> None:
    """Raise `AgentLoopError` if verl cannot pass a column to the reward function."""
    for name, value in row.items():
        if not (isinstance(value, list | tuple) and any(isinstance(part, list | tuple | np.ndarray) for part in value)):
            continue
        try:
            np.array([value])
        except ValueError:
            raise AgentLoopError(
                f"the data's column {name!r} has lists of different lengths inside one list, and verl cannot convert "
                "this list to an array for the reward function. Use text (JSON), a mapping, or lists of equal length"
            ) from None


@cache
def _parameters(run: Hashable) -> dict[str, bool]:
    """Return a dict with the name of each parameter of ``run``, and whether the parameter has a default.

    The name `ANY` stands for ``**kwargs``.
    """
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
    """Return an error of class ``kind`` whose message is ``words`` followed by a description of ``error``.

    The traceback of ``error`` becomes a note (``__notes__``), because Ray shortens long messages.
    """
    what = error.cause if isinstance(error, RayTaskError) and error.cause is not None else error
    # `told` adds the error's class to the message. Errors of this package are clear without it.
    failed = kind(f"{words}{what if isinstance(what, RecipeError) else told(what)}")
    failed.add_note(traced(error))
    return failed


@cache
def loop_maker(agent_name: str) -> Callable[..., AgentLoopBase]:
    """Return a function that creates the agent loop registered as ``agent_name`` from verl's constructor arguments.

    Raises:
        AgentLoopError: no loop is registered under that name.
    """
    if agent_name not in _agent_loop_registry:
        raise AgentLoopError(
            f"no agent loop {agent_name!r} is registered, only {sorted(_agent_loop_registry)}: correct agent_name"
        )
    settings = _agent_loop_registry[agent_name]
    own = {name: value for name, value in settings.items() if name != "_target_"}
    if any(name.startswith("_") or not isinstance(value, str | int | float | None) for name, value in own.items()):
        # Some of the agent loop's settings are not plain values, so Hydra has to process them.
        return partial(hydra.utils.instantiate, settings)
    return partial(hydra.utils.get_object(settings["_target_"]), **own)

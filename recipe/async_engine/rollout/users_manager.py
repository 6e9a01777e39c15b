# SPDX-License-Identifier: Apache-2.0
"""A user's ``agent_loop_manager_class``: verl's manager and workers as the user has them, under this package's own.

Contract: the user's manager and the worker class that it makes actors of are base classes of this package's, so what
they override stands wherever this package asks verl's method. What nothing would ask here is refused by name
(`ManagerRefused`), before a process is made. Shown by tests/integration/test_users_manager.py.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopManager, AgentLoopWorker
from verl.utils.import_utils import load_class_from_fqn

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.rollout.trajectory_manager import TrajectoryManager
from recipe.async_engine.rollout.trajectory_worker import TrajectoryWorker

SETTING = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
UNASKED: dict[type, tuple[str, ...]] = {
    AgentLoopManager: ("generate_sequences", "_performance_metrics"),
    AgentLoopWorker: ("generate_sequences", "_run_agent_loop", "_postprocess"),
}
"""What verl does for whole batches, and this package one trajectory at a time."""


class ManagerRefused(RecipeError):
    """A class that ``agent_loop_manager_class`` names cannot take part here."""


def manager_class(name: str | None) -> type[TrajectoryManager]:
    """The manager of a run, over the user's if one is named.

    Raises:
        ManagerRefused: it is no subclass of verl's, or overrides what would never be called.
    """
    if not name:
        return TrajectoryManager
    try:
        users = load_class_from_fqn(name, "AgentLoopManager")
    except Exception as error:  # whatever a user's module raises
        raise ManagerRefused(f"{SETTING}={name} cannot be loaded: {error}") from error
    _check(name, users, AgentLoopManager)
    if users is AgentLoopManager:
        return TrajectoryManager
    named: str = name

    class UsersManager(TrajectoryManager, users):  # type: ignore[misc, valid-type]
        """This package's manager over the user's."""

        def worker_class(self) -> type[TrajectoryWorker]:
            return worker_over(named, self.agent_loop_workers_class)

    return UsersManager


def worker_over(name: str, actor_class: Any) -> type[TrajectoryWorker]:
    """This package's worker over the class that a user's manager would have made actors of.

    Args:
        name: of the user's manager, for messages.
        actor_class: a class, or what ``ray.remote`` made of one.

    Raises:
        ManagerRefused: as `manager_class` does.
    """
    metadata = getattr(actor_class, "__ray_metadata__", None)
    users = actor_class if metadata is None else metadata.modified_class.__ray_actor_class__
    _check(f"{name}, whose workers are of", users, AgentLoopWorker)
    if issubclass(TrajectoryWorker, users):
        return TrajectoryWorker
    return type("UsersTrajectoryWorker", (TrajectoryWorker, users), {"__module__": users.__module__})


def _check(name: str, users: Any, verls: type) -> None:
    if not (isinstance(users, type) and issubclass(users, verls)):
        raise ManagerRefused(f"{SETTING}={name} {users!r}: it is no subclass of verl's {verls.__name__}")
    for method in UNASKED[verls]:
        if getattr(users, method) is not getattr(verls, method):
            raise ManagerRefused(
                f"{SETTING}={name} {users.__qualname__}: it has a {method} of its own, which nothing calls here, where "
                "answers are generated one by one. Put what it does into an agent loop (agent_loop_config_path), or "
                "into _agent_loop_postprocess or _compute_score of the workers"
            )

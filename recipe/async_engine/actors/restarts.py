# SPDX-License-Identifier: Apache-2.0
"""Actors that Ray starts again after they died (``max_restarts``), from the side of who calls them."""

import asyncio
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from recipe.async_engine.actors.control import sign_of_life, with_control

ASK_AGAIN_S, LOOK_S = 1.0, 0.05


async def has_ended(actor: Any) -> None:
    """Wait until an actor that is being killed does not answer any more."""
    while True:
        try:
            await sign_of_life(actor).remote()
        except RayTaskError:
            pass
        except RayError:
            return
        await asyncio.sleep(LOOK_S)


async def is_up_again(actor: Any) -> bool:
    """Wait until a dead actor answers; False once Ray says that it is not started any more."""
    while True:
        try:
            await sign_of_life(actor).remote()
        except ActorUnavailableError:
            await asyncio.sleep(ASK_AGAIN_S)
        except RayActorError:
            return False
        else:
            return True


def was_restarted() -> bool:
    """Whether this process is an actor that Ray has started again."""
    if not ray.is_initialized():
        return False
    context = ray.get_runtime_context()
    return context.get_actor_id() is not None and context.was_current_actor_reconstructed


class Restartable:
    """Stands in for a remote class whose actors Ray starts again, ``restarts`` times each.

    ``held``: their methods that keep calls open, see `recipe.async_engine.actors.control`.

    What they were made with is held in the object store: Ray deletes large arguments once the actors are up, and cannot
    start them again then (ray-project/ray#53727). Each argument is stored once, however many actors have it.
    """

    def __init__(self, actor_class: type, restarts: int, held: Collection[str] = (), **options: Any) -> None:
        self._remote_class = with_control(actor_class, held, max_restarts=restarts, **options)
        # With the values themselves, whose ids they are.
        self._held: dict[int, tuple[Any, ray.ObjectRef]] = {}

    def options(self, **options: Any) -> SimpleNamespace:
        """As of a remote class: its ``remote`` makes an actor."""
        remote_class = self._remote_class.options(**options)
        return SimpleNamespace(remote=lambda *arguments: remote_class.remote(*map(self._hold, arguments)))

    def _hold(self, value: Any) -> ray.ObjectRef:
        if id(value) not in self._held:
            self._held[id(value)] = value, ray.put(value)
        return self._held[id(value)][1]

# SPDX-License-Identifier: Apache-2.0
"""Actors that answer control calls however many calls they hold open, and that Ray starts again after they died.

Contract: a Ray actor runs so many calls at once, 1,000 where nobody says otherwise, and keeps the others waiting in
their order. Methods that hold a call open, a trajectory, an answer or a score, share that number; all others (an abort,
a cancellation, weights, a sign of life) are in a concurrency group of their own and wait for none of them. Ray gives
each group an event loop on a thread of its own. A control call hops to the actor's own loop from there, so that all
that an actor does is done on one thread, as if there were no groups. Actors without coroutines get a lock instead.
Shown by tests/integration/test_control.py, with real actors at small limits, and test_restarts.py.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

CONTROL = "control"
CALLS = 256
"""Control calls at once; one that waits long for something else (weights, a drain) is among them."""


def with_control(
    actor_class: type, held: Collection[str], plain: Collection[str] = (), **options: Any
) -> ray.actor.ActorClass[Any]:
    """The remote class of an actor that is controlled beside its calls; see the module's contract.

    Args:
        held: its methods that keep calls open.
        plain: of its methods that are no coroutines, those that control it, and that it does not call itself. Where it
            has no coroutines at all, every method that is not ``held`` does.
        options: of ``ray.remote``.
    """
    methods = {name: method for name, method in inspect.getmembers(actor_class, inspect.isfunction) if name[0] != "_"}
    assert methods.keys() >= {*held, *plain}, f"{actor_class.__name__} has no { ({*held, *plain} - methods.keys()) }"
    is_async = any(_is_coroutine(method) for method in methods.values())
    control = {n: m for n, m in methods.items() if n not in held and (not is_async or _is_coroutine(m) or n in plain)}
    base = _OnItsLoop if is_async else _UnderItsLock
    members: dict[str, Any] = {name: base.beside(method) for name, method in control.items()}
    members["is_there"] = base.beside(base.is_there)
    if not is_async:
        members |= {name: _UnderItsLock.held(methods[name]) for name in held}
    names = {name: getattr(actor_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    controlled = type(actor_class.__name__, (base, actor_class), {**names, **members})
    return ray.remote(concurrency_groups={CONTROL: CALLS if is_async else 1}, **options)(controlled)


def sign_of_life(actor: Any) -> Any:
    """The method of an actor that answers when its event loop does, or its process if it is none of `with_control`."""
    return getattr(actor, "is_there", None) or actor.__ray_ready__


class Early:
    """What was said of calls that have not begun: a control call may overtake the call that it is about.

    The oldest is forgotten after ``limit`` others: it was about a call that had ended.
    """

    def __init__(self, limit: int = 20_000) -> None:
        self._said: OrderedDict[str, Any] = OrderedDict()
        self._limit = limit

    def say(self, key: str, what: Any = True) -> None:
        """To be known when the call of this key begins."""
        self._said[key] = what
        if len(self._said) > self._limit:
            self._said.popitem(last=False)

    def take(self, key: str) -> Any:
        """The call of this key begins: what was said of it last, None if nothing was."""
        return self._said.pop(key, None)


def _is_coroutine(method: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)


def _named_as(method: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """As functools.wraps, but Ray, which looks through what that has wrapped, finds the group of the call."""

    def named(call: Callable[..., Any]) -> Callable[..., Any]:
        call = functools.wraps(method)(call)
        del call.__dict__["__wrapped__"]
        return call

    return named


class _OnItsLoop:
    """Base of actors with coroutines."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Ray constructs such an actor on the loop of the calls that are in no group.
        self._home = asyncio.get_running_loop()
        super().__init__(*args, **kwargs)

    async def is_there(self) -> None:
        """A sign of life of the actor's own loop."""

    @staticmethod
    def beside(method: Callable[..., Any]) -> Callable[..., Any]:
        """The method in the control group; the actor itself calls it as it is."""

        @_named_as(method)
        async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            async def at_home() -> Any:
                result = method(self, *args, **kwargs)
                return await result if inspect.isawaitable(result) else result

            if asyncio.get_running_loop() is self._home:
                return await at_home()
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(at_home(), self._home))

        return ray.method(concurrency_group=CONTROL)(call)


class _UnderItsLock:
    """Base of actors without coroutines."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._turn = threading.RLock()
        super().__init__(*args, **kwargs)

    def is_there(self) -> None:
        """A sign of life of the actor's process."""

    @staticmethod
    def held(method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, which the others wait for."""

        @_named_as(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self._turn:
                return method(self, *args, **kwargs)

        return call

    @classmethod
    def beside(cls, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method in the control group."""
        return ray.method(concurrency_group=CONTROL)(cls.held(method))


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

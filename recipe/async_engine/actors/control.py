# SPDX-License-Identifier: Apache-2.0
"""Actors that answer control calls while many other calls are open, and that Ray restarts when they die.

Contract: a Ray actor runs a limited number of calls at once, 1,000 by default, and further calls wait in order. Methods
whose calls stay open for long (a trajectory, an answer, a score) share this limit. All other methods (an abort, a
cancellation, a weight sync, a health check) are control methods: they have a concurrency group of their own and never
wait for the long calls. Ray runs each group on its own event loop and thread. There, a control call is only forwarded
to the actor's main loop, so that all of the actor's code still runs on one thread. In an actor without coroutines, a
lock lets only one call run at a time instead. Shown by tests/integration/test_control.py, with real actors at small
limits, and test_restarts.py.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

CONTROL = "control"
CALLS = 256
"""Number of control calls that an actor can run at once. Calls that wait long, for example for weights, count too."""


def with_control(
    actor_class: type, held: Collection[str], plain: Collection[str] = (), **options: Any
) -> ray.actor.ActorClass[Any]:
    """Return a remote class with a concurrency group for control calls, as the module's contract describes.

    Args:
        held: names of the methods whose calls stay open for long.
        plain: names of methods without ``async`` that are to be control methods, in a class that also has coroutines.
            In the remote class they are coroutines, so the actor must not call them itself. A class without coroutines
            does not need ``plain``, because every method that is not in ``held`` becomes a control method.
        options: options for ``ray.remote``.
    """
    methods = {name: method for name, method in inspect.getmembers(actor_class, inspect.isfunction) if name[0] != "_"}
    assert methods.keys() >= {*held, *plain}, f"{actor_class.__name__} has no { ({*held, *plain} - methods.keys()) }"
    is_async = any(_is_coroutine(method) for method in methods.values())
    control = {n: m for n, m in methods.items() if n not in held and (not is_async or _is_coroutine(m) or n in plain)}
    base = _OnMainLoop if is_async else _Locked
    members: dict[str, Any] = {name: base.as_control(method) for name, method in control.items()}
    members["is_there"] = base.as_control(base.is_there)
    if not is_async:
        members |= {name: _Locked.held(methods[name]) for name in held}
    names = {name: getattr(actor_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    controlled = type(actor_class.__name__, (base, actor_class), {**names, **members})
    return ray.remote(concurrency_groups={CONTROL: CALLS if is_async else 1}, **options)(controlled)


def sign_of_life(actor: Any) -> Any:
    """Return the remote method whose answer shows that an actor works.

    It is `is_there`, or Ray's own check of the process if the actor's class was not made by `with_control`.
    """
    return getattr(actor, "is_there", None) or actor.__ray_ready__


class EarlyCancellations:
    """Remembers cancellations of calls that have not begun yet, because a cancellation may arrive before its call.

    Only the newest `LIMIT` cancellations are kept. Older ones are assumed to be for calls that had already ended.
    """

    LIMIT = 20_000

    def __init__(self) -> None:
        self._keys: dict[str, None] = {}

    def add(self, key: str) -> None:
        self._keys[key] = None
        if len(self._keys) > self.LIMIT:
            del self._keys[next(iter(self._keys))]

    def take(self, key: str) -> bool:
        """Return whether the call with this key was cancelled before it began, and forget the cancellation."""
        was_cancelled = key in self._keys
        self._keys.pop(key, None)
        return was_cancelled


def _is_coroutine(method: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)


def _named_as(method: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator like functools.wraps that sets no ``__wrapped__``, because Ray would take the
    concurrency group of the wrapped function instead of the wrapper's.
    """

    def named(call: Callable[..., Any]) -> Callable[..., Any]:
        call = functools.wraps(method)(call)
        del call.__dict__["__wrapped__"]
        return call

    return named


class _OnMainLoop:
    """Base class of actors that have coroutines. All calls of such an actor run on its main event loop."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Ray runs this constructor on the actor's main event loop, which also runs all calls of methods that are not
        # control methods.
        self._home = asyncio.get_running_loop()
        super().__init__(*args, **kwargs)

    async def is_there(self) -> None:
        """Do nothing. A caller that gets an answer knows that the actor's main loop runs."""

    @staticmethod
    def as_control(method: Callable[..., Any]) -> Callable[..., Any]:
        """Turn a method into a control method, whose calls Ray runs in a concurrency group of their own.

        Ray runs this group on a thread of its own, which forwards each call to the actor's main event loop.
        """

        @_named_as(method)
        async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            async def at_home() -> Any:
                result = method(self, *args, **kwargs)
                return await result if inspect.isawaitable(result) else result

            if asyncio.get_running_loop() is self._home:
                return await at_home()
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(at_home(), self._home))

        return ray.method(concurrency_group=CONTROL)(call)


class _Locked:
    """Base class of actors that have no coroutines. A lock lets only one call of such an actor run at a time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._turn = threading.RLock()
        super().__init__(*args, **kwargs)

    def is_there(self) -> None:
        """Do nothing. A caller that gets an answer knows that the actor's process runs."""

    @staticmethod
    def held(method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the method so that each call holds the actor's lock."""

        @_named_as(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self._turn:
                return method(self, *args, **kwargs)

        return call

    @classmethod
    def as_control(cls, method: Callable[..., Any]) -> Callable[..., Any]:
        """Turn a method into a control method, each call of which holds the actor's lock.

        Ray runs the calls of control methods in a concurrency group of their own.
        """
        return ray.method(concurrency_group=CONTROL)(cls.held(method))


ASK_AGAIN_S, LOOK_S = 1.0, 0.05


async def has_ended(actor: Any) -> None:
    """Wait until an actor that is being killed no longer answers."""
    while True:
        try:
            await sign_of_life(actor).remote()
        except RayTaskError:
            pass
        except RayError:
            return
        await asyncio.sleep(LOOK_S)


async def is_up_again(actor: Any) -> bool:
    """Wait until a dead actor answers again; return False if Ray will not restart it."""
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
    """Return whether this process runs an actor that Ray has restarted."""
    if not ray.is_initialized():
        return False
    context = ray.get_runtime_context()
    return context.get_actor_id() is not None and context.was_current_actor_reconstructed


class Restartable:
    """Creates actors as a Ray remote class does. Ray restarts each of these actors up to ``restarts`` times.

    The arguments of the actors' constructors are kept in the object store, in one copy for all actors. Otherwise Ray
    would delete large arguments when the actors are up, and could not restart the actors (ray-project/ray#53727).
    ``held`` is passed to `with_control`.
    """

    def __init__(self, actor_class: type, restarts: int, held: Collection[str] = (), **options: Any) -> None:
        self._remote_class = with_control(actor_class, held, max_restarts=restarts, **options)
        # Each argument and its object reference, by the argument's id(). Arguments are kept so that no other object can
        # get the same id().
        self._held: dict[int, tuple[Any, ray.ObjectRef]] = {}

    def options(self, **options: Any) -> SimpleNamespace:
        """Return an object whose ``remote`` method creates an actor with these options of Ray."""
        remote_class = self._remote_class.options(**options)
        return SimpleNamespace(remote=lambda *arguments: remote_class.remote(*map(self._hold, arguments)))

    def _hold(self, value: Any) -> ray.ObjectRef:
        if id(value) not in self._held:
            self._held[id(value)] = value, ray.put(value)
        return self._held[id(value)][1]

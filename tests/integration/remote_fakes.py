# SPDX-License-Identifier: Apache-2.0
"""Replacements for Ray's actor handles, and for the rollout servers and data behind them.

Everything above this interface is real: verl's client code and load balancer run unchanged, on this process's event
loop.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from ray import cloudpickle
from ray.exceptions import RayActorError, RayTaskError
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler
from verl.workers.rollout.replica import TokenOutput

from recipe.async_engine.engines.load_balancer import CountingBalancer
from recipe.async_engine.rollout.prompts import IndexedDataset, PromptSource, collate


class Method:
    """A method of an actor handle: ``.remote`` starts the call and returns an awaitable."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def options(self, num_returns: int) -> Method:
        """Return the same method with ``num_returns`` awaitables per call, as Ray returns the parts of a tuple."""
        return _Several(self._function, num_returns)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        future = asyncio.get_running_loop().create_future()
        try:
            result = self._function(*args, **kwargs)
        except Exception as error:  # an actor's error is raised where the call is awaited
            future.set_exception(error)
            return future
        if inspect.isawaitable(result):
            return asyncio.ensure_future(result)
        future.set_result(result)
        return future


class _Several(Method):
    def __init__(self, function: Callable[..., Any], number: int) -> None:
        super().__init__(function)
        self._number = number

    def remote(self, *args: Any, **kwargs: Any) -> list[asyncio.Future]:
        whole = super().remote(*args, **kwargs)

        async def one(number: int) -> Any:
            try:
                return cloudpickle.loads(cloudpickle.dumps((await asyncio.shield(whole))[number]))
            except RayActorError:
                raise
            except Exception as error:
                crossed = cloudpickle.loads(cloudpickle.dumps(error))
                raise RayTaskError("method", str(error), crossed).as_instanceof_cause() from None

        return [asyncio.ensure_future(one(number)) for number in range(self._number)]


class Handle:
    """An actor handle on an object of this process."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Method:
        return Method(getattr(self._target, name))


def part(tokens: list[int], version: int | None, stop: str = "completed", submitted: int | None = None) -> TokenOutput:
    """Return a rollout server's answer; the log-prob of token t is -t."""
    extra = {"global_steps": version, "submitted_version": version if submitted is None else submitted}
    return TokenOutput(
        token_ids=tokens, log_probs=[-float(token) for token in tokens], stop_reason=stop, extra_fields=extra
    )


class ScriptedServer:
    """Answers requests from a script: an answer, an exception, a function of the request, or "hang"."""

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.calls: list[dict[str, Any]] = []
        self.dropped: list[str] = []

    async def drop_request(self, request_id: str) -> None:
        self.dropped.append(request_id)

    async def generate(self, **request: Any) -> TokenOutput:
        self.calls.append({**request, "prompt_ids": list(request["prompt_ids"])})
        step = self.script.pop(0)
        if step == "hang":
            await asyncio.get_running_loop().create_future()
        if isinstance(step, BaseException):
            raise step
        return step(**request) if callable(step) else step


def balancer_of(*servers: ScriptedServer) -> CountingBalancer:
    """Return the load balancer in front of ``server-0``, ``server-1``, ..."""
    return CountingBalancer({f"server-{n}": Handle(server) for n, server in enumerate(servers)})


class Rows:
    """A data set of ``size`` prompts."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"raw_prompt": [{"role": "user", "content": f"prompt {index}"}], "level": np.int64(index % 3)}


def make_loader(size: int, seed: int | None = None, kind: type[Rows] = Rows, **options: Any) -> StatefulDataLoader:
    """Return a data loader like verl's, one prompt at a time; shuffled if ``seed`` is given."""
    import torch

    dataset = IndexedDataset(kind(size))
    sampler = None
    if seed is not None:
        sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(seed))
    gathers = partial(collate, defaults={})
    return StatefulDataLoader(dataset, **{"batch_size": 1, **options}, sampler=sampler, collate_fn=gathers)


def make_source(size: int, epochs: int = 1, seed: int | None = None, kind: type[Rows] = Rows) -> PromptSource:
    """Return prompts read through :func:`make_loader`."""
    return PromptSource(make_loader(size, seed, kind), epochs)

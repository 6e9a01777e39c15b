# SPDX-License-Identifier: Apache-2.0
"""Changes by an agent loop to its process, or to state its trajectories share, after which no other loop can run
there.
"""

from __future__ import annotations

import asyncio
import builtins
import json
import os
import random
import resource
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
import torch
from odd_errors import WORDS
from odd_loops import Loop, OddLoop


def _patch(place: Any, *names: str) -> Callable[[Any], None]:
    def patch(loop: Any) -> None:
        for name in names:
            setattr(place, name, None)

    return patch


def _few_files(loop: Any) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def _no_threads(loop: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    closed = ThreadPoolExecutor(1)
    closed.shutdown()
    asyncio.get_running_loop().set_default_executor(closed)


def _no_tokenizer(loop: Any) -> None:
    loop.tokenizer.apply_chat_template = None


def _no_template(loop: Any) -> None:
    loop.tokenizer.chat_template = "{{ raise_exception('poisoned') }}"


def _no_client(loop: Any) -> None:
    loop.server_manager.generate = None


POISONS: dict[str, Callable[[Any], Any]] = {
    "patches torch": _patch(torch, "tensor", "zeros", "ones", "cat", "full"),
    "patches json": _patch(json, "dumps", "loads"),
    "patches asyncio": _patch(asyncio, "sleep", "wait", "gather", "create_task", "timeout"),
    "patches time": _patch(time, "time", "monotonic", "perf_counter"),
    "patches random": _patch(random, "random", "uniform", "seed"),
    "patches sockets": _patch(socket, "socket", "create_connection"),
    "patches ray": _patch(ray, "get", "put", "wait"),
    "patches numpy": _patch(np, "array", "zeros", "asarray", "fromiter"),
    "patches builtins": _patch(builtins, "isinstance", "len", "sum"),
    "another device": lambda loop: torch.set_default_device("meta"),
    "another type": lambda loop: torch.set_default_dtype(torch.float16),
    "numpy raises": lambda loop: np.seterr(all="raise"),
    "a shallow stack": lambda loop: sys.setrecursionlimit(120),
    "empties the environment": lambda loop: os.environ.clear(),
    "empties modules": lambda loop: sys.modules.clear(),
    "few files": _few_files,
    "no threads": _no_threads,
    "no tokenizer": _no_tokenizer,
    "no template": _no_template,
    "no client": _no_client,
    "another factory of tasks": lambda loop: asyncio.get_running_loop().set_task_factory(lambda *_, **__: None),  # type: ignore
    "every task": lambda loop: [task.cancel() for task in asyncio.all_tasks()],
}


def and_raises(poison: Callable[[Any], Any]) -> Loop:
    """Return a loop that does this and raises."""

    async def run(loop: OddLoop, sampling_params: dict[str, Any], sample: dict[str, Any]) -> Any:
        poison(loop)
        raise ValueError(WORDS)

    return run


def and_gets_away(poison: Callable[[Any], Any]) -> Loop:
    """Return a loop that does this after it has ended."""

    async def run(loop: OddLoop, sampling_params: dict[str, Any], sample: dict[str, Any]) -> Any:
        asyncio.get_running_loop().call_later(0.5, poison, loop)
        return await loop.sound(sampling_params)

    return run


POISONING = {
    **{name: and_raises(poison) for name, poison in POISONS.items()},
    **{f"{name}, later": and_gets_away(poison) for name, poison in POISONS.items()},
}

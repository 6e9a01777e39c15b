# SPDX-License-Identifier: Apache-2.0
"""The inside of a scoring process: loads the reward function once, then calls it.

Contract: imports nothing of verl, torch or Ray unless the reward function does, so that a process which was ended is
replaced in a moment. The processes are forks of one that has loaded the function already (`PRELOAD`), if its loading
succeeds there. A process leads a session of its own, so that what it has started ends with it, and what it prints goes
nowhere: an endless print would fill a disk. Shown by tests/integration/test_reward_pool.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import importlib.util
import json
import os
import resource
import select
import signal
from collections.abc import Callable
from typing import Any

PRELOAD = "RECIPE_REWARD_FUNCTION"
"""Environment variable: a function's [module path, name] in JSON, loaded when this module is imported."""

OUT_OF_MEMORY = 112
"""Exit status of a process whose call had a MemoryError."""

_loaded: dict[tuple[str, str], Callable[..., Any]] = {}
_score: Callable[..., Any] | None = None


def load(path: str, name: str) -> Callable[..., Any]:
    """A function of a Python file, or of a module named ``pkg://...``, loaded once in a process."""
    if (path, name) not in _loaded:
        if path.startswith("pkg://"):
            module = importlib.import_module(path.removeprefix("pkg://"))
        else:
            spec = importlib.util.spec_from_file_location("reward_function", path)
            if spec is None or spec.loader is None:
                raise ImportError(f"{path} is no Python file")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        _loaded[path, name] = getattr(module, name)
    return _loaded[path, name]


def begin(path: str, name: str, memory_bytes: int | None, started: Any, alive: Any) -> None:
    """Make this process one that scores.

    Args:
        path, name: of the reward function, see `load`.
        memory_bytes: of address space.
        started: a queue that is told this process's id.
        alive: the reading end of a pipe whose writing end closes with the reward worker.
    """
    global _score
    with contextlib.suppress(PermissionError):
        os.setsid()
    started.put(os.getpid())
    end_with(alive.fileno())
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    try:
        _score = load(path, name)
    except Exception as error:  # every call reports it; a process that ends at its start would end the whole pool
        _score = functools.partial(_fail, error)


def end_with(pipe: int) -> None:
    """SIGIO, which ends a process whatever it is doing, when the last writing end of this pipe is closed."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    # Opened anew: the owner of the signal belongs to the open file, which other processes share.
    own = os.open(f"/proc/self/fd/{pipe}", os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    # Closed before there was anyone to tell.
    if select.select([own], [], [], 0)[0]:
        os._exit(1)


def score(settings: dict[str, Any], arguments: dict[str, Any]) -> Any:
    """Call the reward function."""
    assert _score is not None
    try:
        return _score(**{**arguments, **settings})
    except TimeoutError as error:
        # Else it would look like the end of the call's own time.
        raise RuntimeError(f"the reward function raised TimeoutError: {error}") from error
    except MemoryError:
        # What fills the memory may stay, as a leak does: the next call gets a process without it.
        os._exit(OUT_OF_MEMORY)


def _fail(error: Exception, **arguments: Any) -> None:
    raise error


if PRELOAD in os.environ:
    # Its error is the scoring process's to raise, where someone can see it.
    with contextlib.suppress(Exception):
        load(*json.loads(os.environ[PRELOAD]))

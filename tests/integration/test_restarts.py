# SPDX-License-Identifier: Apache-2.0
"""Real actors that Ray starts again."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time

import numpy as np
import ray

from recipe.async_engine.actors.control import Restartable, is_up_again, was_restarted

SOON = 60.0
LARGE = 1 << 20
"""Bytes; Ray sends less than 100 KiB with the call."""
DELETED_S = 3.0


async def test_actor_is_started_again_with_large_arguments_that_nobody_else_holds(cluster: None) -> None:
    class Holder:  # made here, so that Ray sends it by value: its processes cannot import test modules
        def __init__(self, large: np.ndarray, small: None) -> None:
            self.sum, self.small = int(large.sum()), small

        def process(self) -> tuple[int, int, None, bool]:
            return os.getpid(), self.sum, self.small, was_restarted()

    holders = Restartable(Holder, restarts=1)
    large = np.ones(LARGE, dtype=np.uint8)
    first, second = (holders.options(num_cpus=0).remote(large, None) for _ in range(2))
    pid, *made_of = ray.get(first.process.remote(), timeout=SOON)
    assert made_of == [LARGE, None, False]
    ray.get(second.process.remote(), timeout=SOON)
    assert len(holders._held) == 2, "each argument once"
    del large
    gc.collect()
    time.sleep(DELETED_S)
    os.kill(pid, signal.SIGKILL)
    assert await asyncio.wait_for(is_up_again(first), SOON)
    new_pid, *made_of = ray.get(first.process.remote(), timeout=SOON)
    assert new_pid != pid and made_of == [LARGE, None, True]
    assert not was_restarted()
    # Once, and no more.
    os.kill(new_pid, signal.SIGKILL)
    assert not await asyncio.wait_for(is_up_again(first), SOON)

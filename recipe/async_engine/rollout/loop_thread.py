# SPDX-License-Identifier: Apache-2.0
"""An event loop on a thread of its own, for one owner who is asked by other threads, and what these wait on."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any


class LoopThread:
    """An event loop on a thread of its own. ``on_error``: told what a task ended with, unless it was cancelled."""

    def __init__(self, name: str, on_error: Callable[[BaseException], None]) -> None:
        self.loop = asyncio.new_event_loop()
        self._on_error = on_error
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the loop, with this task."""
        self.spawn(work)
        self._thread.start()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Another task; called on the thread itself."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Do ``work`` on the thread; callable from any other."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def end_tasks(self) -> None:
        """Return when every task has ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self, timeout_s: float) -> None:
        """End the thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)


class Changes:
    """A lock, and threads that wait under it until something holds: each is woken by the change that makes it hold.

    Whoever changes what the lock guards calls :meth:`made` before it lets go. A thread in :meth:`wait_until` sleeps
    through every change that leaves its condition false. A context manager, which holds the lock; one thread may enter
    it several times. Shown by tests/integration/test_changes.py.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: dict[threading.Condition, Callable[[], bool]] = {}

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def made(self) -> None:
        """Something has changed; the lock is held."""
        for waiter, holds in self._waiting.items():
            if holds():
                waiter.notify_all()

    def wait_until(self, holds: Callable[[], bool], deadline: float) -> bool:
        """Let go of the lock until ``holds`` is true, which is asked under it and must be cheap.

        Returns whether it is; False at ``deadline``, on the clock of `time.monotonic`.
        """
        waiter = threading.Condition(self._lock)
        self._waiting[waiter] = holds
        try:
            while not holds():
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                waiter.wait(left_s)
            return True
        finally:
            del self._waiting[waiter]

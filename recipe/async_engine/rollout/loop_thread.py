# SPDX-License-Identifier: Apache-2.0
"""`LoopThread`, an event loop on its own thread, and `Changes`, a lock that lets threads wait for conditions."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any


class LoopThread:
    """An event loop on its own thread. ``on_error`` is called with the error of each task that fails."""

    def __init__(self, name: str, on_error: Callable[[BaseException], None]) -> None:
        self.loop = asyncio.new_event_loop()
        self._on_error = on_error
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self.spawn(work)
        self._thread.start()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task on the event loop. After :meth:`start`, this may be called only on the event loop's thread."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run ``work`` on the event loop, and return a future of its result. This may be called on any other thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def end_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self, timeout_s: float) -> None:
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
    """A lock for some state. Threads can also wait until a condition on the state is true.

    A thread that changes the state calls :meth:`made` before it releases the lock. A thread in :meth:`wait_until` wakes
    up only when its condition has become true. A ``with`` block on this object holds the lock, which is reentrant.
    Shown by tests/integration/test_changes.py.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: dict[threading.Condition, Callable[[], bool]] = {}

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def made(self) -> None:
        """Wake the waiting threads whose conditions are true now. The caller must hold the lock."""
        for waiter, holds in self._waiting.items():
            if holds():
                waiter.notify_all()

    def wait_until(self, holds: Callable[[], bool], deadline: float) -> bool:
        """Wait, with the lock released, until ``holds`` returns true. The caller must hold the lock.

        Args:
            holds: the condition, a cheap function that is called while the lock is held.
            deadline: a time of the clock `time.monotonic`.

        Returns:
            True if the condition has become true, or False if the deadline passed first.
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

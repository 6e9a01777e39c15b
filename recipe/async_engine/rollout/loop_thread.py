# SPDX-License-Identifier: Apache-2.0
"""An event loop on a thread of its own, for one owner who is asked by other threads."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any


class LoopThread:
    """See the module. ``on_error``: told what a task ended with, unless it was cancelled."""

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

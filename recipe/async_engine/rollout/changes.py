# SPDX-License-Identifier: Apache-2.0
"""A lock, and threads that wait under it until something holds: each is woken by the change that makes it hold.

Contract: whoever changes what the lock guards calls :meth:`Changes.made` before it lets go. A thread in
:meth:`Changes.wait_until` sleeps through every change that leaves its condition false, so a change costs one look at
each condition that somebody waits for, and no thread of its own. Shown by tests/integration/test_changes.py.
"""

import threading
import time
from collections.abc import Callable


class Changes:
    """See the module's contract; a context manager, which holds the lock. One thread may enter it several times."""

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

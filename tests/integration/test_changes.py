# SPDX-License-Identifier: Apache-2.0
"""A thread that waits for something is woken by the change that brings it, and by no other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.async_engine.rollout.loop_thread import Changes

SOON = 20.0


class Waiting:
    """A thread that waits until a number is reached; counts how often it was awake."""

    def __init__(self, changes: Changes, reached: Callable[[], bool]) -> None:
        self.looks_of_its_own, self.found = 0, None

        def holds() -> bool:
            self.looks_of_its_own += threading.current_thread() is self._thread
            return reached()

        def wait() -> None:
            with changes:
                self.found = changes.wait_until(holds, time.monotonic() + SOON)

        self._thread = threading.Thread(target=wait)
        self._thread.start()

    def end(self) -> bool | None:
        self._thread.join(SOON)
        return self.found


def asleep(changes: Changes, count: int) -> None:
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline:
        with changes:
            if len(changes._waiting) == count:
                return
        time.sleep(0.001)
    raise AssertionError("the threads do not wait")


@settings(max_examples=30)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_each_thread_wakes_once_whatever_number_of_changes_comes_before_its_own(targets: list[int]) -> None:
    changes, number = Changes(), [0]
    waiting = [Waiting(changes, lambda target=target: number[0] >= target) for target in targets]
    asleep(changes, len(targets))
    for _ in range(max(targets)):
        with changes:
            number[0] += 1
            changes.made()
    assert [each.end() for each in waiting] == [True] * len(targets)
    # Before it slept, and once it was woken; the third may be a wait that the system ended by itself.
    assert all(each.looks_of_its_own <= 3 for each in waiting)


def test_what_holds_already_is_not_waited_for_and_what_never_does_ends_at_the_deadline() -> None:
    changes = Changes()
    with changes:
        assert changes.wait_until(lambda: True, time.monotonic() - 1)
        assert not changes.wait_until(lambda: False, time.monotonic() + 0.01)
        assert not changes._waiting


def test_lock_is_free_while_a_thread_waits_though_it_was_taken_twice() -> None:
    changes, done = Changes(), [False]

    def wait() -> None:
        with changes, changes:
            assert changes.wait_until(lambda: done[0], time.monotonic() + SOON)

    thread = threading.Thread(target=wait)
    thread.start()
    asleep(changes, 1)
    with changes:
        done[0] = True
        changes.made()
    thread.join(SOON)
    assert not thread.is_alive()

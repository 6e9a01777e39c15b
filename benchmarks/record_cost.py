# SPDX-License-Identifier: Apache-2.0
"""CPU time that a run spends on its record of events for every token, request and trajectory.

    python benchmarks/record_cost.py

It measures CPU seconds, so other load on the machine hardly matters, and reports the minimum of `REPEATS` repeats.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable

from recipe.async_engine.record.activity import AwayActivity, EngineActivity, Work
from recipe.async_engine.record.event_file import EventFile
from recipe.async_engine.record.events import TRAJECTORIES, Away, Class, Event

PLACES, REPEATS, COUNT = 64, 9, 20_000


def microseconds(work: Callable[[int], None]) -> float:
    """Return microseconds per item of ``COUNT``, as the minimum over some repeats."""
    found = []
    for _ in range(REPEATS):
        began = time.process_time()
        work(COUNT)
        found.append((time.process_time() - began) / COUNT)
    return 1e6 * min(found)


def busy_engine() -> tuple[EngineActivity, list[str]]:
    engine, names = EngineActivity(time.monotonic, PLACES), [f"request {n}" for n in range(PLACES)]
    engine.open()
    engine.take()
    for name in names:
        begin(engine, name)
    return engine, names


def begin(engine: EngineActivity, name: str) -> None:
    engine.expect(name, Work.NEW)
    engine.enter(name)
    engine.output(name, 1)


def tokens(count: int) -> None:
    engine, names = busy_engine()
    for n in range(count):
        engine.output(names[n % PLACES], n)


def requests(count: int) -> None:
    engine, names = busy_engine()
    for n in range(count):
        name = names[n % PLACES]
        engine.answer(name, 1)
        engine.leave(name)
        engine.forget(name)
        begin(engine, name)


def trajectories(count: int) -> None:
    """Record trajectories with one request and a reward each, and write their three rows."""
    activity = AwayActivity(time.monotonic)
    with tempfile.TemporaryDirectory() as folder:
        file = EventFile(folder, {})
        for first in range(0, count, 1000):
            rows = []
            for n in range(1000):
                tools = activity.tool_time("loop")
                tools.asks()
                tools.is_answered()
                tools.end()
                with activity.at(Away.REWARD):
                    pass
                row = Event(TRAJECTORIES, "generating", 1.0 * n, 2.0 * n, 1.0, 1, first + n, 0, 50, "attempt 1")
                rows += [row, row._replace(what="reward"), row._replace(what="ready")]
            activity.lane.take()
            file.write(rows)
        file.close()


def questions(count: int) -> None:
    engine, _ = busy_engine()
    for n in range(count):
        engine.close(Class.WAIT_WEIGHTS) if n % 2 else engine.open()
        engine.take()


def main() -> None:
    for name, work in (("token", tokens), ("request", requests), ("trajectory", trajectories), ("question", questions)):
        print(f"{name}: {microseconds(work):.2f} us of CPU")


if __name__ == "__main__":
    main()

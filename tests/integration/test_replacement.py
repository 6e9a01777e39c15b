# SPDX-License-Identifier: Apache-2.0
"""What takes the place of a lost replica, with replicas of this process; real ones in tests/e2e/test_replacement.py."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from recipe.async_engine.actors import replacement
from recipe.async_engine.actors.replacement import Replacements, Restarts, clear_replica, cleared_on_failure
from recipe.async_engine.core.errors import NothingFree

SOON_S = 5.0


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + SOON_S
    while not (result := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return result


def test_lost_part_is_cleared_away_before_another_one_starts_and_handed_out_once() -> None:
    events: list[Any] = []
    replacements = Replacements(Restarts(1), SOON_S, lambda lost: events.append(("clear", lost)))

    def start() -> str:
        events.append("start")
        return "new"

    replacements.begin("a replica", "old", start)
    assert wait_for(replacements.take) == ["new"]
    assert events == [("clear", "old"), "start"]
    assert (replacements.take(), replacements.under_way, replacements._restarts.begun) == ([], 0, 1)


def test_failed_start_is_repeated_until_the_budget_is_used_up(caplog: pytest.LogCaptureFixture) -> None:
    replacements = Replacements(Restarts(3), SOON_S, lambda lost: None)

    def start() -> None:
        raise OSError("no accelerator is free")

    replacements.begin("a replica", "old", start)
    wait_for(lambda: not replacements.take() and replacements.under_way == 0)
    assert replacements._restarts.begun == 3
    assert caplog.text.count("no accelerator is free") == 3
    assert "async_training.max_replica_restarts=3" in caplog.text


class Cluster:
    """Where ``free`` replicas can be started."""

    def __init__(self) -> None:
        self.free, self.asked, self.started = 0, 0, 0

    def start(self) -> int:
        self.asked += 1
        if self.started >= self.free:
            raise NothingFree("the 1 accelerators are not free")
        self.started += 1
        return self.started


def test_attempts_that_find_nothing_free_are_made_again_and_use_up_no_budget(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster()
    replacements = Replacements(Restarts(2), SOON_S, lambda lost: None)
    for name in "abc":
        replacements.begin(f"replica {name}", name, cluster.start)
    wait_for(lambda: not replacements.take() and cluster.asked > 20)
    assert replacements._restarts.begun <= 2
    cluster.free = 5
    came: list[int] = []
    wait_for(lambda: came.extend(replacements.take()) or len(came) == 2)
    assert sorted(came) == [1, 2]
    assert (replacements.take(), replacements.under_way, replacements._restarts.begun, cluster.started) == ([], 0, 2, 2)
    # Said once of each, not at each attempt; the third has no budget left.
    assert 2 <= caplog.text.count("tried again at each weight sync") <= 3
    assert caplog.text.count("is not started: the run has made 2 attempts (async_training.max_replica_restarts=2)") == 1


def test_another_error_after_a_wait_is_said_and_counts(caplog: pytest.LogCaptureFixture) -> None:
    errors: list[Exception] = [NothingFree("nothing is free"), OSError("no port is free")]

    def start() -> None:
        raise errors.pop(0)

    replacements = Replacements(Restarts(1), SOON_S, lambda lost: None)
    replacements.begin("a replica", "old", start)
    wait_for(lambda: not replacements.take() and replacements.under_way == 0)
    assert not errors and replacements._restarts.begun == 1
    assert "a replica could not be started: no port is free" in caplog.text


def test_past_the_budget_a_lost_part_is_cleared_away_and_not_replaced() -> None:
    cleared: list[Any] = []
    replacements = Replacements(Restarts(0), SOON_S, cleared.append)
    replacements.begin("a replica", "old", lambda: pytest.fail("it was started"))
    wait_for(lambda: cleared == ["old"])
    assert (replacements._restarts.begun, replacements.take()) == (0, [])


def test_start_that_takes_too_long_is_given_up_and_cleared_away_when_it_is_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    late = threading.Event()
    cleared: list[str] = []
    replacements = Replacements(Restarts(1), 0.02, cleared.append)

    def start() -> str:
        assert late.wait(SOON_S)
        return "new"

    replacements.begin("a replica", "old", start)
    wait_for(lambda: not replacements.take() and replacements.under_way == 0)
    assert "not up after 0.02 s" in caplog.text
    late.set()
    wait_for(lambda: cleared == ["old", "new"])


@pytest.fixture
def start_killed_replica(cluster: None) -> Callable[[], Any]:
    """Makes a replica of one worker on an accelerator of its own, whose process is killed then."""
    import ray
    from ray.util import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    @ray.remote(num_cpus=1, num_gpus=0.5)
    class Worker:
        def process(self) -> int:
            return os.getpid()

    def start() -> Any:
        group = placement_group([{"CPU": 2, "GPU": 1}])
        ray.get(group.ready(), timeout=SOON_S)
        worker = Worker.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0)).remote()
        os.kill(ray.get(worker.process.remote(), timeout=60), signal.SIGKILL)
        return SimpleNamespace(servers=[], workers=[worker], resource_pool=SimpleNamespace(pgs=[group]))

    return start


def test_accelerators_of_a_lost_replica_are_free_when_it_is_cleared_away(
    start_killed_replica: Callable[[], Any],
) -> None:
    import ray

    for _ in range(5):  # one alone may be freed before anybody looks
        replica = start_killed_replica()
        clear_replica(replica)
        assert ray.available_resources()["GPU"] == 2


def test_accelerators_that_stay_held_are_told_with_the_deadline(
    start_killed_replica: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = start_killed_replica()
    with monkeypatch.context() as patch:
        patch.setattr(replacement, "remove_placement_group", lambda group: None)
        with pytest.raises(
            TimeoutError, match=r"did not free the resources of a lost replica, placement groups \w+, within 0\.2 s"
        ):
            clear_replica(replica, timeout_s=0.2)
    clear_replica(replica)


def test_failed_start_gives_back_what_it_had_and_keeps_its_error(start_killed_replica: Callable[[], Any]) -> None:
    import ray

    with pytest.raises(OSError, match="no port is free"), cleared_on_failure([start_killed_replica()]):
        raise OSError("no port is free")
    assert ray.available_resources()["GPU"] == 2

# SPDX-License-Identifier: Apache-2.0
"""What the main hears of a trainer's process and of Ray's control process, with a real Ray; and the watch on actors."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cloudpickle import register_pickle_by_value
from ray.exceptions import RayActorError
from surroundings import fresh_ray

from recipe.async_engine.actors import watch as watch_of_run
from recipe.async_engine.actors.watch import RunWatch
from recipe.async_engine.config.sections import Timeouts
from recipe.async_engine.core.errors import CannotGoOn
from recipe.async_engine.run import supervisor
from recipe.async_engine.run.runner import Ended
from recipe.async_engine.run.supervisor import control_probe, listen

LIMIT_S, SOON_S = 4.0, 60.0


@pytest.fixture(scope="module", autouse=True)
def own_ray() -> Iterator[None]:
    # Actors have their class from here: Ray's workers cannot import this module.
    register_pickle_by_value(sys.modules[__name__])
    with fresh_ray(num_cpus=16):
        yield


class Trainer:
    """Does what `TaskRunner` does for its main."""

    def __init__(self) -> None:
        self.words: dict[str, str] | None = None

    def run(self, steps: int, last: str) -> Iterator[Any]:
        for step in range(steps):
            yield step
            time.sleep(1)
        if last == "waits":
            time.sleep(1000)
        if last == "dies":
            time.sleep(3)
            os._exit(70)
        yield Ended({}, None)
        if last == "does not close":
            time.sleep(1000)

    def say(self, words: dict[str, str]) -> None:
        self.words = words

    def beat(self) -> dict[str, str] | None:
        return self.words

    def pid(self) -> int:
        return os.getpid()

    def keep_the_lock(self, seconds: int) -> None:
        """One call of C that does not give Python's lock back."""
        import ctypes

        ctypes.PyDLL(None).sleep(seconds)


class Run:
    def __init__(self, steps: int, last: str, heartbeat_s: float = LIMIT_S) -> None:
        remote = ray.remote(concurrency_groups={"beside": 2})(Trainer)
        self.actor = remote.options(num_cpus=0).remote()
        ray.get(self.actor.pid.remote(), timeout=SOON_S)
        self.beside: dict[str, str] = {"concurrency_group": "beside"}
        self.events = self.actor.run.options(num_returns="streaming").remote(steps, last)
        self.timeouts = Timeouts(startup=SOON_S, heartbeat=heartbeat_s)

    def hear(self, ask: Callable[[], Any] = ray.nodes) -> Iterator[Any]:
        beat = self.actor.beat.options(**self.beside).remote
        with control_probe(self.timeouts.heartbeat, ask) as control:
            yield from listen(self.events, beat, control, self.timeouts)

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.actor, method).options(**self.beside).remote(*arguments)


@pytest.fixture
def runs() -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(*arguments: Any) -> Run:
        made.append(Run(*arguments))
        return made[-1]

    yield make
    for run in made:
        ray.kill(run.actor)


def test_events_come_in_order_up_to_the_end(runs: Callable[..., Run]) -> None:
    assert list(runs(3, "ends").hear()) == [0, 1, 2, Ended({}, None)]


def test_trainer_that_is_silent_but_answers_is_waited_for(runs: Callable[..., Run]) -> None:
    run = runs(1, "waits", 8.0)
    heard = run.hear()
    assert next(heard) == 0
    threading.Timer(12.0, ray.kill, [run.actor]).start()
    with pytest.raises(RayActorError):  # not CannotGoOn, which would have come before
        next(heard)


def test_trainer_that_is_stopped_is_not_waited_for(runs: Callable[..., Run]) -> None:
    run = runs(4, "waits")
    pid = ray.get(run.call("pid"), timeout=SOON_S)
    heard = run.hear()
    assert [next(heard) for _ in range(4)] == [0, 1, 2, 3]  # and heartbeats
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(CannotGoOn, match=r"async_training\.timeouts\.heartbeat"):
            next(heard)
    finally:
        os.kill(pid, signal.SIGCONT)


def test_trainer_in_which_one_call_keeps_pythons_lock_is_not_waited_for(runs: Callable[..., Run]) -> None:
    run = runs(4, "waits")
    heard = run.hear()
    assert [next(heard) for _ in range(4)] == [0, 1, 2, 3]  # and heartbeats
    run.call("keep_the_lock", 600)
    with pytest.raises(CannotGoOn, match="keeps Python's lock"):
        next(heard)


def test_trainer_that_is_not_started_is_waited_for_until_its_own_deadline() -> None:
    never = ray.remote(Trainer).options(num_cpus=1000).remote()
    events = never.run.options(num_returns="streaming").remote(1, "ends")
    with (
        control_probe(30.0) as control,
        pytest.raises(CannotGoOn, match=r"async_training\.timeouts\.startup"),
    ):
        list(listen(events, never.beat.remote, control, Timeouts(startup=2.0, heartbeat=30.0)))
    ray.kill(never)


def test_what_the_trainers_watch_said_is_the_cause_of_its_processs_end(runs: Callable[..., Run]) -> None:
    run = runs(1, "dies")
    words = {"name": "CannotGoOn", "message": "who waits for whom"}
    ray.get(run.call("say", words), timeout=SOON_S)
    assert list(run.hear()) == [0, Ended({}, {**words, "traceback": ""})]


def test_what_the_trainers_watch_said_is_the_cause_also_where_its_end_is_not_seen(runs: Callable[..., Run]) -> None:
    """A stopped fork of the trainer's process, a worker of its data loader for example, keeps its connections."""
    run = runs(3, "waits")
    words = {"name": "CannotGoOn", "message": "who waits for whom"}
    ray.get(run.call("say", words), timeout=SOON_S)
    pid = ray.get(run.call("pid"), timeout=SOON_S)
    heard = run.hear()
    assert [next(heard) for _ in range(3)] == [0, 1, 2]  # and heartbeats
    os.kill(pid, signal.SIGSTOP)
    try:
        assert list(heard) == [Ended({}, {**words, "traceback": ""})]
    finally:
        os.kill(pid, signal.SIGCONT)


def test_death_of_a_trainer_without_a_word_is_rays_error(runs: Callable[..., Run]) -> None:
    with pytest.raises(RayActorError):
        list(runs(1, "dies").hear())


def test_run_that_is_over_is_not_waited_for(runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "CLOSE_S", 1.0)
    assert list(runs(1, "does not close").hear()) == [0, Ended({}, None)]


def test_control_process_that_answers_no_more_ends_the_run(runs: Callable[..., Run]) -> None:
    def ask() -> None:
        time.sleep(1000)

    with pytest.raises(CannotGoOn, match="has not answered for 4 s"):
        list(runs(1, "waits").hear(ask))


def test_death_of_a_held_actor_ends_the_run_while_it_waits_for_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_of_run, "HELD_AGAIN_S", 2.0)
    monkeypatch.setattr(watch_of_run, "BLAME_S", 2.0)
    remote = ray.remote(Trainer)
    held = {name: remote.options(num_cpus=0).remote() for name in ("training worker 0", "training worker 1")}
    ray.get([actor.pid.remote() for actor in held.values()], timeout=SOON_S)
    # One has work meanwhile, as a rank in a collective whose other side is gone.
    held["training worker 0"].keep_the_lock.remote(600)
    failed: list[BaseException] = []
    watch = RunWatch(SOON_S, tmp_path, leave=lambda status: None)
    watch.follow(lambda: 0.0, str, failed.append)
    watch.hold(held)
    watch.start()
    time.sleep(3.0)
    assert not failed
    error = RuntimeError("connection closed by peer")
    assert watch.cause_of(error) is error
    ray.kill(held["training worker 1"])
    deadline = time.monotonic() + SOON_S
    while not failed:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    watch.stop()
    assert isinstance(failed[0], CannotGoOn)
    assert str(failed[0]).startswith("training worker 1 died")
    assert str(watch.cause_of(error)).startswith("training worker 1 died"), "the other rank's collective may fail first"
    ray.kill(held["training worker 0"])

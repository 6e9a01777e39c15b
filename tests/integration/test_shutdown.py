# SPDX-License-Identifier: Apache-2.0
"""Signals of a process of its own, which does in its main thread what a run's main does: wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from omegaconf import OmegaConf

from recipe.async_engine.record.run_record import RunRecord
from recipe.async_engine.run import driver
from recipe.async_engine.run.shutdown import EndingOnSignal, StartedProcesses, end_in_order
from recipe.mains.run import PARTS

MAIN = """
import sys, threading, time
from recipe.async_engine.run.shutdown import EndAtOnce, EndingOnSignal

ends, deadline_s = sys.argv[1] == "ends", float(sys.argv[2])
asked = threading.Event()

def stop(name):
    print(name, flush=True)
    asked.set()

try:
    with EndingOnSignal() as ending:
        ending.ask(stop, deadline_s)
        print("ready", flush=True)
        while not (ends and asked.is_set()):
            try:
                time.sleep(0.01)
            except KeyboardInterrupt:
                # As Ray's calls do, which lose what kind it was.
                raise KeyboardInterrupt from None
    sys.exit(ending.status)
except EndAtOnce as end:
    sys.exit(end.status)
"""


def waiting_main(*arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_asks_the_run_to_end_and_gives_its_status(number: signal.Signals) -> None:
    process = waiting_main("ends", "60")
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert out == f"{number.name}\n"
    assert process.returncode == 128 + number
    assert "async_training.timeouts.stop" in err


def test_second_signal_ends_it_at_once() -> None:
    process = waiting_main("goes on", "60")
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == "SIGTERM\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 128 + signal.SIGINT
    process.communicate()


def test_deadline_ends_it_like_a_second_signal() -> None:
    process = waiting_main("goes on", "0.2")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 128 + signal.SIGTERM
    assert time.monotonic() - began >= 0.2
    process.communicate()


BESIDE = """
import os, signal, sys, time
from recipe.async_engine.run import supervisor
from recipe.async_engine.run.shutdown import EndAtOnce, EndingOnSignal, end_in_order
from recipe.async_engine.run.supervisor import LastResort
"""


def ended(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BESIDE + code], capture_output=True, text=True, timeout=60, check=False
    )


def test_signal_before_there_is_a_trainer_ends_the_run_at_once_and_in_order() -> None:
    process = ended(
        """
try:
    with EndingOnSignal():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            print("ended")
except EndAtOnce as end:
    sys.exit(end.status)
"""
    )
    assert (process.returncode, process.stdout) == (128 + signal.SIGTERM, "ended\n")


def test_signal_that_comes_while_the_run_ends_ends_only_the_step_under_way() -> None:
    process = ended(
        """
def waits():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)

with EndingOnSignal():
    first = end_in_order({"waiting": waits, "reporting": lambda: print("reported")})
print(type(first).__name__)
"""
    )
    assert process.stdout == "reported\nEndAtOnce\n", process.stderr


def test_each_step_of_ending_is_made_and_the_first_error_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    made = []

    def fails(error: Exception) -> None:
        made.append("fails")
        raise error

    first = OSError(28, "No space left on device")
    steps = {"one": lambda: fails(first), "two": lambda: fails(ValueError()), "three": lambda: made.append("three")}
    assert end_in_order(steps) is first
    assert made == ["fails", "fails", "three"]
    assert "one failed: OSError: [Errno 28]" in capsys.readouterr().err


class Unwritable(RunRecord):
    def close(self, peak_memory_gib: float | None) -> dict[str, Any]:
        raise OSError(28, "No space left on device")


def run_of(record: RunRecord, start: Callable[[], None]) -> driver._Run:
    timeouts = SimpleNamespace(startup=60.0, heartbeat=60.0, stop=60.0)
    plan = SimpleNamespace(settings=SimpleNamespace(async_training=SimpleNamespace(timeouts=timeouts)), total_steps=1)
    config = OmegaConf.create({"ray_kwargs": {}})
    run = driver._Run(config, PARTS, None, plan, record, EndingOnSignal(), ray_of_its_own=True)  # type: ignore[arg-type]
    run._start = start  # type: ignore[method-assign]
    run._follow = lambda *_: None  # type: ignore[method-assign]
    return run


def test_summary_that_cannot_be_written_hides_no_error_and_keeps_no_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    children: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        children.append(subprocess.Popen(["sleep", "600"]))
        raise ValueError("the first error")

    with pytest.raises(ValueError, match="the first error"):
        run_of(Unwritable(tmp_path, "fully_async"), start).run("fully_async", "")
    assert children[0].wait(20) == -signal.SIGKILL
    assert "writing summary.json failed: OSError: [Errno 28]" in capsys.readouterr().err


def test_run_whose_summary_cannot_be_written_has_failed(tmp_path: Path) -> None:
    with pytest.raises(driver.RunFailed, match="No space left on device"):
        run_of(Unwritable(tmp_path, "fully_async"), lambda: None).run("fully_async", "")


def test_main_that_is_stuck_is_ended_by_force_even_if_that_cannot_be_reported() -> None:
    process = ended(
        """
supervisor.LOOK_S, supervisor.FORCE_S = 0.05, 0.5
def end(why):
    print(why, flush=True)
    time.sleep(60)
last = LastResort(end)
last.allow("this", 3)
time.sleep(1)
last.allow("that (timeouts.startup)", 0.2)
time.sleep(60)
"""
    )
    assert process.returncode == 1
    assert process.stdout == "that (timeouts.startup) took longer than 0.2 s; the run is ended by force\n"


def test_process_whose_parent_was_killed_after_a_look_is_ended() -> None:
    parent = (
        "import subprocess, sys; child = subprocess.Popen(['sleep', '60'], stdin=-3, stdout=-3, stderr=-3); "
        "print(child.pid, flush=True); sys.stdin.read()"
    )
    started = StartedProcesses()
    middle = subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert middle.stdout is not None
    child = int(middle.stdout.readline())
    started.look()
    middle.kill()
    middle.communicate()
    started.look()
    assert started.end(grace_s=0.1) == [child]


@pytest.mark.parametrize(
    ("number", "state"), [(signal.SIGKILL, "has ended"), (signal.SIGSTOP, "is stopped")], ids=["killed", "stopped"]
)
def test_error_is_blamed_on_a_needed_process_that_does_not_run_any_more(number: int, state: str) -> None:
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", "/raylet/raylet", "1"])
    try:
        needed = StartedProcesses()
        needed.look_for_needed()
        error = ConnectionError("socket closed")
        assert needed.cause_of(error) is error
        os.kill(server.pid, number)
        process = psutil.Process(server.pid)
        while process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
            time.sleep(0.01)
        assert str(needed.cause_of(error)) == f"Ray's raylet (process {server.pid}) {state}"
        # A signal ends the run whatever else has ended by it.
        assert isinstance(needed.cause_of(KeyboardInterrupt()), KeyboardInterrupt)
        # Leaving Ray would wait for one that is stopped.
        needed.end_stopped()
        assert server.wait(10) == -signal.SIGKILL
    finally:
        server.kill()
        server.wait()


def test_process_that_is_stopped_is_ended_and_those_from_before_are_left_alone() -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(1000)"]
    before = subprocess.Popen(sleeper)
    started = StartedProcesses()
    stopped, ending = subprocess.Popen(sleeper), subprocess.Popen([sys.executable, "-c", "pass"])
    try:
        os.kill(stopped.pid, signal.SIGSTOP)
        started.look()
        assert started.end(grace_s=1.0) == [stopped.pid]
        assert stopped.wait(10) == -signal.SIGKILL
        assert ending.wait(10) == 0
        assert before.poll() is None
    finally:
        before.kill()
        before.wait()

# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Signals of a process of its own, which does in its main thread what a run's main does: wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from recipe.async_engine.run.ending import StartedProcesses

MAIN = """
import sys, threading, time
from recipe.async_engine.run.ending import EndAtOnce, EndingOnSignal

ends, deadline_s = sys.argv[1] == "ends", float(sys.argv[2])
asked = threading.Event()

def stop(name):
    print(name, flush=True)
    asked.set()

try:
    with EndingOnSignal(stop, deadline_s) as ending:
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

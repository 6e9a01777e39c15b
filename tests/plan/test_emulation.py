# SPDX-License-Identifier: Apache-2.0
"""The emulated devices of a run get their settings, and work on one takes at least the device's time."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.emulation.devices import SLEEP_S, VARIABLE, Device, Emulation, emulation, records


def test_a_process_finds_the_devices_of_its_run() -> None:
    meant = Emulation(model="qwen2.5-0.5b", token_scale=64, time_scale=0.1, record="somewhere")
    assert emulation(meant.environment()) == meant


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model": "none"}', "model='none' is not known; there are .*qwen2.5-7b"),
        ('{"device": "none"}', "device='none' is not known; there are .'h100'."),
        ('{"modle": "qwen2.5-7b"}', "(?s)modle\n.*It is a JSON object with some of .*'model'"),
        ("qwen2.5-7b", f"(?s){VARIABLE}=qwen2.5-7b does not say .*Invalid JSON"),
        ("[]", f"{VARIABLE}=.. does not say .*"),
        ('{"token_scale": "64"}', "(?s)token_scale\n.*valid integer"),
        ('{"replica_devices": 0}', "(?s)replica_devices\n.*greater than or equal to 1"),
        ('{"time_scale": -1}', "(?s)time_scale\n.*greater than 0"),
        ('{"dies_after_s": 3}', "dies_after_s and dies_once go together"),
    ],
)
def test_what_is_not_known_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        Emulation.parse(text)
    assert VARIABLE in str(refused.value)
    with pytest.raises(ValueError, match=f"{VARIABLE} is not set"):
        emulation({})


def test_work_takes_at_least_the_devices_time_and_says_what_was_late(tmp_path: Path) -> None:
    device = Device(Emulation(record=str(tmp_path)), "engine", 1)
    began = time.monotonic()
    with device.work("step", 0.05, sequences=3):
        pass
    assert time.monotonic() - began >= 0.05
    with device.work("step", 0.01):
        time.sleep(0.03)
    ((_, lines),) = records(tmp_path).items()
    assert [line["kind"] for line in lines] == ["step", "step"]
    assert lines[0]["sequences"] == 3 and lines[0]["device_s"] == 0.05
    assert lines[1]["late_s"] >= 0.02


def test_an_engine_step_is_decoding_and_prefills() -> None:
    device = Device(Emulation(token_scale=4), "engine", 2)
    decoding = device.engine_step_s(8, 100, [])
    assert decoding == device.times.decode_step_s(8, 100)
    assert device.engine_step_s(8, 100, [(20, 0), (5, 10)]) == pytest.approx(
        decoding + device.times.prefill_s(20) + device.times.prefill_s(5, 10)
    )
    assert Device(Emulation(decode_step_s=0.08), "engine", 1).engine_step_s(8, 100, [(20, 0)]) == 0.08


def test_shared_devices_pay_for_sleep_and_waking_with_each_load() -> None:
    apart, shared = (Device(Emulation(shared=shared), "engine", 1) for shared in (False, True))
    assert apart.load_s() == apart.times.load_s()
    assert shared.load_s() == pytest.approx(apart.load_s() + 2 * SLEEP_S)


def test_one_engine_dies_at_its_time(tmp_path: Path) -> None:
    program = (
        "import time\n"
        "from benchmarks.emulation.devices import Device, Emulation\n"
        f"device = Device(Emulation(dies_after_s=0.05, dies_once={str(tmp_path / 'died')!r}), 'engine', 1)\n"
        "device.end_if_due()\n"
        "time.sleep(0.06)\n"
        "device.end_if_due()\n"
    )
    ended = [subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode for _ in range(2)]
    assert ended == [1, 0]

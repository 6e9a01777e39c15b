# SPDX-License-Identifier: Apache-2.0
"""The emulated devices of a run, and the timing of work on such a device.

Contract: `EMULATED_DEVICES` has the run's emulation as JSON, with the fields of `Emulation`; every process of the run
reads it there, under stock verl's mains and this package's alike. `Device.work` returns when the device's time has
passed, or when the real work has ended if that is later. The record shows work that was too slow to be emulated: a
comparison in which `late_s` is not small measures this machine instead of the device. Shown by
tests/plan/test_emulation.py and, in a run, tests/e2e/test_fully_async.py.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from benchmarks.emulation.models import MODELS
from recipe.plan.device import H100, DeviceProfile, DeviceTimes
from recipe.plan.memory.shape import shape_of

VARIABLE = "EMULATED_DEVICES"
SLEEP_S = 0.5
"""Assumed seconds to put an engine to sleep, and to wake it, without its weights."""
PROFILES: Mapping[str, DeviceProfile] = {"h100": H100}

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Emulation:
    """The devices of a run.

    Attributes:
        device, model: names in `PROFILES` and `benchmarks.emulation.models.MODELS`.
        replica_devices: number of devices that one rollout replica stands for.
        trainer_devices: number of devices that one trainer or log-prob rank stands for.
        shared: whether trainer and engines take turns on the devices, so that an engine sleeps between two loads.
        token_scale, time_scale: those of `DeviceTimes`.
        decode_step_s: the time of every engine step, in place of the device's.
        computes: whether devices compute anything; otherwise tokens are random, a decode step uses no core at all, and
            an update has as few sequences as possible.
        record: folder in which each process writes a file of what it did when, one line per piece of work.
        dies_after_s: seconds after its first step at which an engine ends its process; only the first engine to get
            there does, and creates the file `dies_once`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    device: str = "h100"
    model: str = "qwen2.5-7b"
    replica_devices: Count = 1
    trainer_devices: Count = 1
    shared: bool = False
    token_scale: Count = 1
    time_scale: Positive = 1.0
    decode_step_s: Positive | None = None
    computes: bool = True
    record: str | None = None
    dies_after_s: Positive | None = None
    dies_once: str | None = None

    def __post_init__(self) -> None:
        for name, known in (("device", PROFILES), ("model", MODELS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{VARIABLE}: {name}={getattr(self, name)!r} is not known; there are {sorted(known)}.")
        if (self.dies_after_s is None) != (self.dies_once is None):
            raise ValueError(f"{VARIABLE}: dies_after_s and dies_once go together; set both or none.")

    @classmethod
    def parse(cls, text: str) -> Emulation:
        """Parse JSON; raise ValueError that names the variable and everything that is wrong in it."""
        try:
            return TypeAdapter(cls).validate_json(text)
        except ValidationError as error:
            raise ValueError(
                f"{VARIABLE}={text} does not say what the devices are: {error}\n"
                f"It is a JSON object with some of {[field.name for field in fields(cls)]}."
            ) from error

    def environment(self) -> dict[str, str]:
        """Return the environment variables that a run on these devices needs."""
        # verl then uses the engine that `benchmarks.emulation.trainer` registers, where that module is imported.
        return {VARIABLE: json.dumps(asdict(self)), "VERL_ENGINE_VENDOR": "emulated"}

    def times(self, devices: int) -> DeviceTimes:
        shape = shape_of(MODELS[self.model])
        assert shape is not None, self.model
        profile = PROFILES[self.device]
        return DeviceTimes(profile, shape, devices, token_scale=self.token_scale, time_scale=self.time_scale)


class Device:
    """One emulated device: a replica's engine, or a rank of the trainer."""

    def __init__(self, emulation: Emulation, name: str, devices: int) -> None:
        self.emulation = emulation
        self.times = emulation.times(devices)
        self._name = name
        self._lock = threading.Lock()
        self._first_step: float | None = None
        folder = emulation.record
        self._record = Path(folder, f"{name}-{os.getpid()}.jsonl") if folder else None
        if self._record is not None:
            self._record.parent.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def work(self, kind: str, device_s: float, **noted: Any) -> Iterator[None]:
        """Spend at least ``device_s`` seconds in the block, sleeping after the real work if that is faster."""
        began = time.time()
        clock = time.monotonic()
        yield
        real_s = time.monotonic() - clock
        time.sleep(max(0.0, device_s - real_s))
        self._note({"kind": kind, "began": began, "device_s": device_s, "late_s": max(0.0, real_s - device_s), **noted})

    def engine_step_s(self, decoding: int, context_tokens: int, prefills: Iterable[tuple[int, int]]) -> float:
        """Return the seconds of an engine step: ``decoding`` sequences, prefills of (tokens, tokens before them)."""
        if self.emulation.decode_step_s is not None:
            return self.emulation.decode_step_s
        read = sum(self.times.prefill_s(tokens, context) for tokens, context in prefills)
        return self.times.decode_step_s(decoding, context_tokens) + read

    def load_s(self) -> float:
        """Return the seconds of an in-place weight load, including sleep and wake-up if devices are shared."""
        turn = 2 * SLEEP_S * self.times.time_scale if self.emulation.shared else 0.0
        return self.times.load_s() + turn

    def end_if_due(self) -> None:
        """End this process abruptly if it is the one that is set to die."""
        due, mark = self.emulation.dies_after_s, self.emulation.dies_once
        if due is None or mark is None:
            return
        now = time.monotonic()
        if self._first_step is None:
            self._first_step = now
        if now - self._first_step >= due:
            try:
                Path(mark).touch(exist_ok=False)
            except FileExistsError:
                return
            os._exit(1)

    def _note(self, line: Mapping[str, Any]) -> None:
        if self._record is not None:
            with self._lock, self._record.open("a") as file:
                file.write(json.dumps(line) + "\n")


def emulation(environ: Mapping[str, str] = os.environ) -> Emulation:
    """Return the emulation of this process's run."""
    if VARIABLE not in environ:
        raise ValueError(
            f"{VARIABLE} is not set: it has the emulated devices as JSON, see benchmarks.emulation.devices."
        )
    return Emulation.parse(environ[VARIABLE])


def records(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return what the devices of a run have written, by file name, without an unfinished last line."""
    found = {}
    for file in sorted(folder.glob("*.jsonl")):
        whole, _, _ = file.read_text().rpartition("\n")
        found[file.stem] = [json.loads(line) for line in whole.splitlines()]
    return found

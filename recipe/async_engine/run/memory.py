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
"""Peak memory of a run's processes on this machine.

Counted is what each process has for itself, and once the largest part that a process shares (libraries, Ray's object
store): the whole is at least that. Sampled, so short peaks can be missed. Linux's exact proportional figure would stop
each process for milliseconds at every sample.
"""

import threading

import psutil

INTERVAL_S = 3.0


class MemoryMeter:
    """Samples this process and all that descend from it, Ray's included, until :meth:`stop`."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._peak = 0
        self._thread = threading.Thread(target=self._run, name="memory-meter", daemon=True)
        self._thread.start()

    def stop(self) -> float:
        """End sampling; returns the peak in GiB."""
        self._stopped.set()
        self._thread.join(timeout=10 * self._interval_s)
        return self._peak / 2**30

    def _run(self) -> None:
        me = psutil.Process()
        while not self._stopped.wait(self._interval_s):
            parts = [_private_and_shared(process) for process in [me, *me.children(recursive=True)]]
            total = sum(private for private, _ in parts) + max((shared for _, shared in parts), default=0)
            self._peak = max(self._peak, total)


def _private_and_shared(process: psutil.Process) -> tuple[int, int]:
    """Bytes; (0, 0) for a process that ended meanwhile."""
    try:
        memory = process.memory_info()
    except psutil.Error:
        return 0, 0
    shared = getattr(memory, "shared", 0)
    return memory.rss - shared, shared

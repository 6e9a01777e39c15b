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

Counted is the proportional set size (Linux), which shares what several processes have mapped among them; elsewhere the
resident set size, which counts it once for each. Sampled, so short peaks can be missed.
"""

import threading
from pathlib import Path

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
            self._peak = max(self._peak, sum(map(_bytes, [me, *me.children(recursive=True)])))


def _bytes(process: psutil.Process) -> int:
    """0 for a process that ended meanwhile."""
    try:
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return process.memory_info().rss
    except psutil.Error:
        return 0

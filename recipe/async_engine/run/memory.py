# SPDX-License-Identifier: Apache-2.0
"""Peak memory of a run's processes on this machine.

Counted is each process's proportional share (Linux's PSS): what it has for itself, and of what it shares, with the
process it was forked from above all, its part. Sampled, so short peaks can be missed. Reading it stops a process for
milliseconds, so that is done only when an upper bound that costs nothing has risen.
"""

import threading

import psutil

INTERVAL_S = 3.0
NOTABLE_RISE = 1.02


class MemoryMeter:
    """Samples this process and all that descend from it, Ray's included, until :meth:`stop`."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._peak = 0
        self._thread = threading.Thread(target=self._run, name="memory-meter", daemon=True)
        self._thread.start()

    def stop(self) -> float:
        """End sampling; returns the peak in GiB."""
        self._stopped.set()
        self._thread.join(timeout=10 * INTERVAL_S)
        return self._peak / 2**30

    def _run(self) -> None:
        me = psutil.Process()
        highest_bound = 0.0
        while not self._stopped.wait(INTERVAL_S):
            family = [me, *me.children(recursive=True)]
            bound = sum(_bytes(process, exactly=False) for process in family)
            if bound > NOTABLE_RISE * highest_bound:
                highest_bound = bound
                self._peak = max(self._peak, sum(_bytes(process, exactly=True) for process in family))


def _bytes(process: psutil.Process, exactly: bool) -> int:
    """Of a process, 0 if it ended meanwhile: its proportional share, or its own where the system does not tell.

    Not ``exactly``: shared ones in full.
    """
    try:
        memory = process.memory_full_info() if exactly else process.memory_info()
    except psutil.Error:
        return 0
    return getattr(memory, "pss", memory.uss) if exactly else memory.rss

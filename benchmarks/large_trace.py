# SPDX-License-Identifier: Apache-2.0
"""Measures how long the trace of a run of 1,000,000 events takes and how large it is, and opens it in Perfetto.

``PYTHONPATH=.:benchmarks:tests python benchmarks/large_trace.py``.

The record is that of large_report.py, with more steps; it is opened with Perfetto's trace processor.
"""

from __future__ import annotations

import resource
import tempfile
import time
from pathlib import Path

from large_report import make
from trace_processor import loaded

from recipe.async_engine.record.event_file import files, read
from recipe.report.run import load
from recipe.report.trace import write_trace

STEPS = 820

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        run, trace = Path(name, "run"), Path(name, "trace.pftrace")
        run.mkdir()
        make(run, STEPS)
        events = read(files(run)[-1])[1].num_rows
        before, cpu_before = time.monotonic(), time.process_time()
        write_trace(load(run), trace)
        seconds, cpu = time.monotonic() - before, time.process_time() - cpu_before
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{events} events: {seconds:.1f} s, {cpu:.1f} s of one core, {memory:.1f} GiB of memory at most")
        print(f"{trace.stat().st_size / 1e6:.0f} MB")
        before = time.monotonic()
        with loaded(trace) as opened:
            (slices,), (arrows,) = (
                opened.rows("select count(*) as n from slice"),
                opened.rows("select count(*) as n from flow"),
            )
            print(f"opened in {time.monotonic() - before:.1f} s: {slices.n} slices, {arrows.n} arrows")

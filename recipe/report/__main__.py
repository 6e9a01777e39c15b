# SPDX-License-Identifier: Apache-2.0
"""The command line of the report, described in docs/report.md.

``python -m recipe.report RUN [OTHER_RUN]`` writes a report of a run or a comparison of two runs; ``--trace FILE``
writes a trace instead, and ``--follow`` prints the progress of a run.
"""

import argparse
import math
import signal
import sys
from pathlib import Path

from recipe.async_engine.record.schema import BadFile
from recipe.report.follow import follow
from recipe.report.run import Run, lacking, load

WAIT_S = 600.0
PAGES, TRACES = "bokeh", "perfetto"
"""The packages that pages and traces require; following a run requires neither."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status, which is 2 if events cannot be read or a file cannot be written."""
    parser = argparse.ArgumentParser(
        prog="python -m recipe.report", description="Writes the report of a run, or compares two runs."
    )
    parser.add_argument("run", type=Path, help="the run's folder (trainer.default_local_dir)")
    parser.add_argument("other", type=Path, nargs="?", help="another run's folder: both runs are compared")
    parser.add_argument(
        "--output",
        type=Path,
        help="the file to write; by default RUN/report.html, or OTHER/compared.html for two runs",
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto instead")
    parser.add_argument("--follow", action="store_true", help="print the run's progress until it ends")
    parser.add_argument("--wait", type=_seconds, metavar="SECONDS", help=f"for the run to begin; by default {WAIT_S:g}")
    options = parser.parse_args(arguments)
    of_two, traces, follows = options.other is not None, options.trace is not None, options.follow
    for wrong, what in (
        (of_two and (follows or traces), "--trace and --follow take a single run: leave out the other one"),
        (follows and (traces or options.output), "--follow writes no file: leave out --trace and --output"),
        (traces and options.output, "--trace names the file to write: leave out --output"),
        (options.wait is not None and not follows, "--wait has an effect only with --follow: give both"),
    ):
        if wrong:
            parser.error(what)
    if options.follow:
        return _follow(options.run, WAIT_S if options.wait is None else options.wait)
    command, needed = ("--trace", TRACES) if options.trace else ("a report", PAGES)
    if (said := lacking(command, "report", [needed])) is not None:
        sys.stderr.write(f"{said}\n")
        return 2
    try:
        output, lines = _written(options)
    except (BadFile, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write("\n".join([*lines, str(output)]) + "\n")
    return 0


def _seconds(text: str) -> float:
    seconds = float(text)
    if not (math.isfinite(seconds) and seconds >= 0):
        raise argparse.ArgumentTypeError(f"{text} is not allowed: give a number of seconds, 0 or more")
    return seconds


def _written(options: argparse.Namespace) -> tuple[Path, list[str]]:
    """Write the requested file; return its path and the lines to print about it."""
    run = _loaded(options.run)
    if options.trace:
        from recipe.report.trace import write_trace

        write_trace(run, options.trace)
        return options.trace, []
    from recipe.report.page import brief, write, write_comparison

    if options.other is None:
        output = options.output or options.run / "report.html"
        write(run, output)
        return output, brief(run)
    output = options.output or options.other / "compared.html"
    other = _loaded(options.other)
    write_comparison(run, other, output)
    return output, [f"{each.name}: {brief(each)[0]}" for each in (run, other)]


def _loaded(folder: Path) -> Run:
    run = load(folder)
    sys.stderr.write("".join(f"{note}\n" for note in run.notes))
    return run


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _follow(run: Path, wait_s: float) -> int:
    try:
        return follow(run, wait_s, _say)
    except (KeyboardInterrupt, BrokenPipeError):
        return 128 + signal.SIGINT
    except (BadFile, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())

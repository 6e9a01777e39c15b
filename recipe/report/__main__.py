# SPDX-License-Identifier: Apache-2.0
"""``python -m recipe.report RUN [OTHER_RUN]`` writes a report, or a comparison; see docs/report.md."""

import argparse
import sys
from pathlib import Path

from recipe.async_engine.storage.event_file import OtherFormat
from recipe.report import comparison
from recipe.report.page import brief, write
from recipe.report.run import NoRecord, load


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 2 if there is nothing to report on."""
    parser = argparse.ArgumentParser(
        prog="python -m recipe.report", description="Writes the report of a run, or compares two runs."
    )
    parser.add_argument("run", type=Path, help="the run's folder (trainer.default_local_dir)")
    parser.add_argument("other", type=Path, nargs="?", help="another run's folder: both are put side by side")
    parser.add_argument(
        "--output",
        type=Path,
        help="the file to write; RUN/report.html if it is not given, OTHER/compared.html of two runs",
    )
    options = parser.parse_args(arguments)
    try:
        run = load(options.run)
        if options.other is None:
            output = options.output or options.run / "report.html"
            write(run, output)
            lines = brief(run)
        else:
            output = options.output or options.other / "compared.html"
            other = load(options.other)
            comparison.write(run, other, output)
            lines = [f"{each.name}: {brief(each)[0]}" for each in (run, other)]
    except (NoRecord, OtherFormat) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write("\n".join([*lines, str(output)]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

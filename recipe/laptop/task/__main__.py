# SPDX-License-Identifier: Apache-2.0
"""``python -m recipe.laptop.task --out DIR`` creates the built-in task, which docs/builtin-task.md describes."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import fields

from recipe.laptop.task.builder import TaskDirectoryError, ensure_task
from recipe.laptop.task.settings import TaskSettings

logger = logging.getLogger("recipe.laptop.task")


def main(arguments: Sequence[str] | None = None) -> int:
    """Create the built-in task; return exit status 0, or 2 if the settings or the directory cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m recipe.laptop.task", description=__doc__)
    parser.add_argument("--out", required=True, help="the task's own directory")
    for field in fields(TaskSettings):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    chosen = vars(parser.parse_args(arguments))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        paths = ensure_task(chosen.pop("out"), TaskSettings(**chosen))
    except (ValueError, TaskDirectoryError) as error:
        logger.error("%s", error)
        return 2
    for name in ("model", "train", "val", "reward_file"):
        logger.info("%s: %s", name, getattr(paths, name))
    return 0


if __name__ == "__main__":
    sys.exit(main())

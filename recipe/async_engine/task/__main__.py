# SPDX-License-Identifier: Apache-2.0
"""``python -m recipe.async_engine.task --out DIR``: makes the built-in task. docs/builtin-task.md describes it."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from recipe.async_engine.task.builder import TaskDirectoryError, ensure_task
from recipe.async_engine.task.settings import FAMILIES, LENGTHS, TaskSettings

logger = logging.getLogger("recipe.async_engine.task")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 if the settings or the directory cannot be used."""
    default = TaskSettings()
    parser = argparse.ArgumentParser(prog="python -m recipe.async_engine.task", description=__doc__)
    parser.add_argument("--out", required=True, help="the task's own directory")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--family", choices=FAMILIES, default=default.family)
    parser.add_argument("--lengths", choices=LENGTHS, default=default.lengths)
    parser.add_argument("--train-size", type=int, default=default.train_size)
    parser.add_argument("--val-size", type=int, default=default.val_size)
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        paths = ensure_task(
            chosen.out,
            TaskSettings(chosen.seed, chosen.family, chosen.lengths, chosen.train_size, chosen.val_size),
        )
    except (ValueError, TaskDirectoryError) as error:
        logger.error("%s", error)
        return 2
    for name in ("model", "train", "val", "reward_file"):
        logger.info("%s: %s", name, getattr(paths, name))
    return 0


if __name__ == "__main__":
    sys.exit(main())

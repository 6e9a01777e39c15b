# SPDX-License-Identifier: Apache-2.0
"""``python examples/program_task.py --out DIR``: small programming problems for the reward `recipe.programs.reward`.

Each problem is a sentence and a program over numbers drawn with a seed; its test cases come from running the reference
solution. Equal arguments give equal files. A model that writes Python can learn from it. The tiny model of the built-in
task cannot, and only shows that a run with these rewards works (tests/e2e/test_program_rewards.py).
"""

from __future__ import annotations

import argparse
import json
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger("recipe.async_engine.rewards")

DATA_SOURCE = "recipe/programs"
TESTS = 4
INSTRUCTION = "Write a Python program. {} Answer with the program alone, in a block of code."


@dataclass(frozen=True)
class Template:
    """A family of problems: the sentence and the reference solution, both with ``{a}`` and ``{b}``."""

    name: str
    sentence: str
    solution: str
    draw: Callable[[random.Random], list[int]]


def _numbers(rng: random.Random) -> list[int]:
    return [rng.randint(-99, 99) for _ in range(rng.randint(3, 9))]


def _one(rng: random.Random) -> list[int]:
    return [rng.randint(1, 999)]


TEMPLATES = (
    Template("line", "It reads one integer x and prints {a} * x + {b}.", "print({a} * int(input()) + {b})", _one),
    Template("digits", "It reads one integer and prints {a} times the sum of its digits.",
             "print({a} * sum(map(int, input().strip())))", _one),
    Template("above", "It reads integers on one line and prints those above {b}, in their order, on one line.",
             "print(*[x for x in map(int, input().split()) if x > {b}])", _numbers),
    Template("every", "It reads integers on one line and prints every {a}th of them, from the first on, on one line.",
             "print(*input().split()[::{a}])", _numbers),
    Template("sorted", "It reads integers on one line and prints them sorted by their remainder by {a}, then by value.",
             "print(*sorted(map(int, input().split()), key=lambda x: (x % {a}, x)))", _numbers),
)  # fmt: skip


def make_problems(count: int, seed: int, split: str) -> list[dict[str, Any]]:
    """Return rows in verl's schema, with the reference solution in ``extra_info``."""
    rng = random.Random(f"programs-{seed}-{split}")
    return [_make(TEMPLATES[n % len(TEMPLATES)], n, rng, split) for n in range(count)]


def _make(template: Template, index: int, rng: random.Random, split: str) -> dict[str, Any]:
    numbers = {"a": rng.randint(2, 9), "b": rng.randint(-20, 20)}
    solution = template.solution.format(**numbers)
    inputs = [" ".join(map(str, template.draw(rng))) + "\n" for _ in range(TESTS)]
    outputs = [_solve(solution, given) for given in inputs]
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": INSTRUCTION.format(template.sentence.format(**numbers))}],
        "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": json.dumps({"inputs": inputs, "outputs": outputs})},
        "extra_info": {"index": index, "split": split, "template": template.name, "solution": solution},
    }


def _solve(solution: str, given: str) -> str:
    """Return the output of a reference solution, which is trusted code of this file."""
    written: list[str] = []
    space = {"input": lambda: given.rstrip("\n"), "print": lambda *words: written.append(" ".join(map(str, words)))}
    exec(solution, space)
    return "\n".join(written) + "\n"


def write(folder: Path, train_size: int, val_size: int, seed: int) -> tuple[Path, Path]:
    """Write ``train.parquet`` and ``val.parquet``; return their paths."""
    import pyarrow
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "train.parquet", folder / "val.parquet"
    for path, count in zip(paths, (train_size, val_size), strict=True):
        parquet.write_table(pyarrow.Table.from_pylist(make_problems(count, seed, path.stem)), path)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(prog="python examples/program_task.py", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-size", type=int, default=1024)
    parser.add_argument("--val-size", type=int, default=128)
    chosen = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for path in write(chosen.out, chosen.train_size, chosen.val_size, chosen.seed):
        logger.info("%s", path)


if __name__ == "__main__":
    main()

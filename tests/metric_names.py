# SPDX-License-Identifier: Apache-2.0
"""Names of metrics: in docs/metrics.md, in verl's source, and in the output of a run."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import verl

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
VERL = Path(verl.__file__).parent
FIRST, V1, FULLY_ASYNC, ONE_STEP_OFF = "v0", "v1", "fully_async", "one_step_off"
EXPERIMENTAL = {FULLY_ASYNC, ONE_STEP_OFF}
ALL = {FIRST, V1, *EXPERIMENTAL}
SOURCES = {
    "trainer/ppo/metric_utils.py": ALL,
    "trainer/ppo/core_algos.py": ALL,
    "trainer/ppo/rollout_corr_helper.py": ALL,
    "utils/debug/metrics.py": ALL,
    "utils/seqlen_balancing.py": ALL,
    "workers/engine_workers.py": ALL,
    "workers/utils/losses.py": ALL,
    "trainer/ppo/ray_trainer.py": ALL,
    "experimental/agent_loop/agent_loop.py": {FIRST},
    "trainer/ppo/v1": {V1},
    "experimental/separation": EXPERIMENTAL,
    "experimental/fully_async_policy": {FULLY_ASYNC},
    "experimental/one_step_off_policy": {ONE_STEP_OFF},
}
"""The files in which stock's trainers create metrics, with the trainers that use them."""
RENAMED = {
    # verl changes these names between creating and writing them.
    r"agent_loop/.*": r"timing_s/\g<0>",
    r"(count|monitor|static|processing_time)/.*": r"fully_async/\g<0>",
    r"timing_s/(rollouter/.*)": r"\1",
    r"timing_s/str\(Role\.RefPolicy\)": "timing_s/ref",
    r"\*/((avg|max|min)_vio/.*)": r"rollout/moe/\1",
    r"\*/((off_policy|filter_groups|rollout_failure)/.*)": r"training/\1",
    r"(maj|best|worst)@.*": r"val-core/*/reward/\g<0>",
    r"\*/(min|max|mean|minmax_diff|balanced_min|balanced_max)": r"global_seqlen/\1",
}
NO_METRICS = re.compile(r"hybrid/.*")
"""Names with a slash that are not metrics."""
NAME = re.compile(r"[\w*@-]+(/[\w*@.-]+)+")


@dataclass(frozen=True)
class Row:
    """A row of the page: patterns of names, the stock trainers that write them, and the remark on this package."""

    patterns: tuple[str, ...]
    stock: frozenset[str]
    here: str

    def has(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)


def rows() -> list[Row]:
    found = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            names, stock, here = cells
            trainers = ALL if stock == "all" else {name.strip() for name in stock.split(",") if name.strip()}
            assert trainers <= ALL, line
            patterns = [each for name in re.findall(r"`([^`]+)`", names) for each in expanded(name)]
            found.append(Row(tuple(patterns), frozenset(trainers), here))
    return found


def expanded(pattern: str) -> Iterator[str]:
    """Return the patterns for which one with ``{a,b}`` stands."""
    parts = re.split(r"\{([^}]*)\}", pattern)
    choices = [part.split(",") if number % 2 else [part] for number, part in enumerate(parts)]
    return ("".join(choice) for choice in itertools.product(*choices))


def row_of(name: str, table: Iterable[Row]) -> Row | None:
    """Return the first row with exactly this name, else the first one with a matching pattern."""
    there = [row for row in table if row.has(name)]
    return next((row for row in there if name in row.patterns), next(iter(there), None))


def undocumented(names: Iterable[str]) -> list[str]:
    """Return the names written by a run that the page lacks, or that it says do not exist here."""
    table = rows()
    found = {name: row_of(name, table) for name in names}
    return sorted(name for name, row in found.items() if row is None or row.here.startswith("not here"))


def missing(names: Iterable[str]) -> list[str]:
    """Return the names that the page promises for every run and that are not among these."""
    written = set(names)
    always = [row for row in rows() if re.match(r"the same($|:|;)", row.here)]
    plain = [name for row in always for name in row.patterns if "*" not in name]
    return sorted(set(plain) - written)


def stock_names() -> dict[str, set[str]]:
    """Return the metrics of stock verl, with ``*`` for variable parts, and the trainers that write them."""
    found: dict[str, set[str]] = {}
    for source, trainers in SOURCES.items():
        place = VERL / source
        for file in [place] if place.is_file() else sorted(place.rglob("*.py")):
            if "unittest" not in file.parts:
                for part, of in parts(ast.parse(file.read_text()), trainers):
                    for name in names_in(part):
                        found.setdefault(name, set()).update(of)
    return found


def parts(module: ast.Module, trainers: set[str]) -> Iterator[tuple[ast.AST, set[str]]]:
    """Yield a file's parts and their trainers; the experimental ones use verl's first trainer except its loop."""
    for part in module.body:
        if isinstance(part, ast.ClassDef) and part.name == "RayPPOTrainer":
            for method in part.body:
                yield method, {FIRST} if getattr(method, "name", "") == "fit" else {FIRST, *EXPERIMENTAL}
        else:
            yield part, trainers


def names_in(tree: ast.AST) -> Iterator[str]:
    """Yield dictionary keys, assignment targets and timer names that look like metrics."""
    for node in ast.walk(tree):
        for name in map(written, _names_at(node)):
            if name and NAME.fullmatch(name) and not NO_METRICS.fullmatch(name):
                yield name


def written(name: str | None) -> str | None:
    for pattern, replacement in RENAMED.items():
        if name and re.fullmatch(pattern, name):
            return re.sub(pattern, replacement, name)
    return name


def _names_at(node: ast.AST) -> Iterator[str | None]:
    if isinstance(node, ast.Dict):
        yield from map(_text, node.keys)
    elif isinstance(node, ast.Assign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (_text(target.slice) for target in targets if isinstance(target, ast.Subscript))
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("marked_timer", "simple_timer")):
        yield f"timing_s/{_text(node.args[0]) or ast.unparse(node.args[0])}"


def _text(node: ast.AST | None) -> str | None:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None

# SPDX-License-Identifier: Apache-2.0
"""Plants faults in files of the core and the settings, one at a time, and reports those that no test detects.

    python tools/mutants.py                                     25 in each file, on two cores
    python tools/mutants.py --each 1000 recipe/async_engine/core/gate.py     all there are in one

A mutant is the file with one operator, constant, condition, statement or returned value changed. Only the test modules
that call the changed function run, fastest first, in a fork that imports the changed file in place of the real one.
Survivors that no test can distinguish from the original are listed, with the reason, in `tools/equivalent_mutants.txt`;
the exit status is 1 if another one survives.
"""

import argparse
import ast
import copy
import importlib
import importlib.abc
import importlib.util
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
ROOMS = ("recipe/async_engine/core", "recipe/async_engine/config")
EQUIVALENT = CHECKOUT / "tools" / "equivalent_mutants.txt"
# Only tests that run in this process alone, because other processes would import the unchanged file.
TESTS = (
    "tests/core",
    "tests/config",
    *(
        f"tests/integration/test_{name}.py"
        for name in (
            "algorithms",
            "config_files",
            "config_fuzz",
            "data_check",
            "log_prob_columns",
            "rollout_state",
            "scheduler",
        )
    ),
)
# What tests import besides this package; imported once, for all forks.
KNOWN = ("hydra", "hypothesis", "numpy", "omegaconf", "pyarrow.parquet", "torch")
# These tests read files instead of running the code.
NOT_HERE = ("test_import_contracts.py", "test_documents.py", "test_gate_mutations.py", "test_modes_picture.py")

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    file: str  # relative to the checkout
    line: int
    function: str  # as code objects name it; "<module>" for code that runs at import
    change: str
    source: str

    def __str__(self) -> str:
        return f"{self.file}: {self.function}: {self.change}"


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the possible replacements of ``node``."""
    changed: Any = copy.deepcopy(node)
    if isinstance(changed, ast.Compare):
        for position, operator in enumerate(changed.ops):
            if type(operator) in SWAPS:
                other = copy.deepcopy(changed)
                other.ops[position] = SWAPS[type(operator)]()  # type: ignore[call-overload]
                yield other
    elif isinstance(changed, ast.BoolOp | ast.BinOp | ast.AugAssign) and type(changed.op) in SWAPS:
        changed.op = SWAPS[type(changed.op)]()
        yield changed
    elif isinstance(changed, ast.UnaryOp) and isinstance(changed.op, ast.Not):
        yield changed.operand
    elif isinstance(changed, ast.Constant) and isinstance(changed.value, bool | int | float):
        yield ast.Constant(not changed.value if isinstance(changed.value, bool) else changed.value + 1)
    elif isinstance(changed, ast.Call) and isinstance(changed.func, ast.Name) and changed.func.id in NAMES:
        changed.func.id = NAMES[changed.func.id]
        yield changed
    elif isinstance(changed, ast.If | ast.While | ast.IfExp) and isinstance(
        changed.test, ast.Name | ast.Call | ast.Attribute
    ):
        changed.test = ast.UnaryOp(ast.Not(), changed.test)
        yield changed
    elif isinstance(changed, ast.comprehension) and changed.ifs:
        changed.ifs = []
        yield changed
    elif isinstance(changed, ast.Continue):
        yield ast.Break()
    elif isinstance(changed, ast.Return) and changed.value is not None and not _is_none(changed.value):
        changed.value = ast.Constant(None)
        yield changed
    elif isinstance(changed, ast.Raise) or (
        isinstance(changed, ast.Expr) and isinstance(changed.value, ast.Call | ast.Await)
    ):
        yield ast.Pass()
    kept = isinstance(node, ast.Assign) and all(
        isinstance(place, ast.Attribute | ast.Subscript) for place in node.targets
    )
    if kept or isinstance(node, ast.AugAssign | ast.Delete):
        yield ast.Pass()


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def mutants(file: str) -> list[Mutant]:
    """Return all mutants of one file, in the order of its lines."""
    tree = ast.parse((CHECKOUT / file).read_text())
    found: list[Mutant] = []

    def visit(node: ast.AST, function: str, inside: str) -> None:
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for position, child in enumerate(value if isinstance(value, list) else [value]):
                if not isinstance(child, ast.AST):
                    continue
                for other in replacements(child):
                    _put(node, field, position, other)
                    change = f"{_shown(child)} -> {_shown(other)}"
                    line = getattr(child, "lineno", getattr(node, "lineno", 0))
                    found.append(Mutant(file, line, function, change, ast.unparse(ast.fix_missing_locations(tree))))
                    _put(node, field, position, child)
                name = getattr(child, "name", "")
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                    visit(child, inside + name, f"{inside}{name}.<locals>.")
                elif isinstance(child, ast.ClassDef):
                    visit(child, function, f"{inside}{name}.")
                else:
                    visit(child, function, inside)

    visit(tree, "<module>", "")
    return found


def _put(parent: ast.AST, field: str, position: int, child: ast.AST) -> None:
    if isinstance(value := getattr(parent, field), list):
        value[position] = child
    else:
        setattr(parent, field, child)


def _shown(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 100 else text[:97] + "..."


class Planted(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports one module from a changed source."""

    def __init__(self, mutant: Mutant) -> None:
        self._name = mutant.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self._path, self._source = str(CHECKOUT / mutant.file), mutant.source

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:
        return importlib.util.spec_from_loader(fullname, self, origin=self._path) if fullname == self._name else None

    def get_source(self, fullname: str) -> str:
        return self._source

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = self._path
        exec(compile(self._source, self._path, "exec"), module.__dict__)


def _run(tests: Sequence[str]) -> int:
    from hypothesis import settings

    settings.register_profile("mutants", database=None, derandomize=True, deadline=None)
    settings.load_profile("mutants")
    return int(pytest.main(["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-m", "not slow and not gpu", *tests]))


def _in_a_fork(work: Any, log: Path) -> int:
    """Run ``work`` in a child process, which exits with its result; return the child's id."""
    if child := os.fork():
        return child
    status = 70
    try:
        os.setsid()
        with log.open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        status = work()
    finally:
        os._exit(status)


def _end(child: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


def calls(test: str, folder: Path) -> tuple[float, dict[str, set[str]]]:
    """Return a test module's seconds and the functions that it calls, by file; raise RuntimeError if it fails."""
    report, log = folder / "calls.json", folder / "baseline.log"

    def profiled() -> int:
        seen: set[tuple[str, str]] = set()

        def note(frame: FrameType, event: str, argument: Any) -> None:
            seen.add((frame.f_code.co_filename, frame.f_code.co_qualname))

        threading.settrace(note)
        sys.settrace(note)
        status = _run([test])
        sys.settrace(None)
        report.write_text(json.dumps(sorted(pair for pair in seen if pair[0].startswith(str(CHECKOUT / "recipe")))))
        return status

    started = time.monotonic()
    _, status = os.waitpid(_in_a_fork(profiled, log), 0)
    if status:
        raise RuntimeError(f"{test} does not pass without any change:\n{log.read_text()[-3000:]}")
    functions: dict[str, set[str]] = {}
    for file, function in json.loads(report.read_text()):
        functions.setdefault(os.path.relpath(file, CHECKOUT), set()).add(function)
    return time.monotonic() - started, functions


def sample(file: str, each: int) -> list[Mutant]:
    found = mutants(file)
    chosen = random.Random(file).sample(range(len(found)), min(each, len(found)))
    return [found[position] for position in sorted(chosen)]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="files of the package; all of core and settings by default")
    parser.add_argument("--each", type=int, default=25, help="so many in each file, if it has them")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(arguments)
    os.chdir(CHECKOUT)
    for name in KNOWN:
        importlib.import_module(name)
    files = options.files or sorted(str(file) for room in ROOMS for file in Path(room).rglob("*.py"))
    modules = sorted(
        str(file)
        for place in map(Path, TESTS)
        for file in (place.glob("test_*.py") if place.is_dir() else [place])
        if file.name not in NOT_HERE
    )
    equivalent = {line.split("  # ")[0] for line in EQUIVALENT.read_text().splitlines() if line.strip()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seconds, called = {}, {}
        for module in modules:
            seconds[module], called[module] = calls(module, folder)
            print(f"{seconds[module]:6.1f} s  {module}", flush=True)

        def tests_of(mutant: Mutant) -> list[str]:
            reached = [module for module in modules if mutant.function in called[module].get(mutant.file, ())]
            return sorted(reached, key=seconds.__getitem__)

        waiting = [mutant for file in files for mutant in sample(file, options.each)]
        waiting.reverse()
        running: dict[int, tuple[Mutant, float]] = {}
        planted, survivors = Counter(mutant.file for mutant in waiting), []
        while waiting or running:
            while waiting and len(running) < options.jobs:
                mutant = waiting.pop()
                tests = tests_of(mutant)

                def planted_run(mutant: Mutant = mutant, tests: list[str] = tests) -> int:
                    sys.meta_path.insert(0, Planted(mutant))
                    return _run(tests) if tests else 0

                limit = time.monotonic() + 60 + 3 * sum(seconds[test] for test in tests)
                running[_in_a_fork(planted_run, folder / f"{len(waiting)}.log")] = (mutant, limit)
            child, status = os.waitpid(-1, os.WNOHANG)
            for late in [child for child, (_, limit) in running.items() if time.monotonic() > limit]:
                _end(late)
            if not child:
                time.sleep(0.02)
                continue
            mutant, _ = running.pop(child)
            _end(child)
            if status == 0 and str(mutant) not in equivalent:
                survivors.append(mutant)
                print(f"survives: {mutant}  (line {mutant.line})", flush=True)
            if len(waiting) % 25 == 0:
                print(f"{len(waiting)} left, {len(survivors)} alive", flush=True)
    alive = Counter(mutant.file for mutant in survivors)
    for file in files:
        print(f"{planted[file] - alive[file]:4d} of {planted[file]:4d}  {file}")
    print(f"{planted.total() - alive.total()} of {planted.total()} killed, or equivalent by {EQUIVALENT.name}")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

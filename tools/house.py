# SPDX-License-Identifier: Apache-2.0
"""Prints figures about the code base at a commit, one per line: `python tools/house.py [COMMIT]`.

An exception is a class that has one of Python's exceptions among its bases, directly or through other classes of the
package. Settings are rows of docs/configuration.md, which is generated from their types, without those of the built-in
task. The files of a way are those that docs/architecture.md lists for it under "Four ways through the house".

A private member counts as used across classes if a class names `x._member`, does not define this name itself, and
another class of the package (its base class, or that of an object it holds) does. The match is by name only, so a few
are coincidences.
"""

from __future__ import annotations

import ast
import builtins
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

PACKAGE, TESTS, DOCS = ("recipe/", "hydra_plugins/"), ("tests/",), "docs/"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SETTING = re.compile(r"^\| `(?!builtin_task)[\w.]+` \| (?:str|int|float|bool)\b", re.MULTILINE)
WAY = re.compile(r"\*\*(\w+ \w+), .*?```\n(.*?)```", re.DOTALL)
FILE_ON_WAY = re.compile(r"[a-z]\w*(?:/\w+)+")


def files(commit: str, *folders: str) -> list[str]:
    return subprocess.check_output(["git", "ls-tree", "-r", "--name-only", commit, *folders], text=True).splitlines()


def text_of(commit: str, path: str) -> str:
    return subprocess.check_output(["git", "show", f"{commit}:{path}"], text=True)


def sources(commit: str, folders: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield path and text of each Python file below ``folders``, without its licence header."""
    for path in files(commit, *folders):
        if path.endswith(".py"):
            lines = text_of(commit, path).splitlines(keepends=True)
            while lines and lines[0].startswith("#"):
                del lines[0]
            yield path, "".join(lines)


def lines_by_room(package: dict[str, str]) -> dict[str, int]:
    """Return lines by package: `recipe/async_engine`, the engine, and the packages beside it."""
    lines: Counter[str] = Counter()
    for path, text in package.items():
        lines["/".join(path.split("/")[:2])] += text.count("\n")
    return dict(lines.most_common())


def exceptions(trees: Iterable[ast.Module]) -> set[str]:
    """Return the names of the package's exception classes."""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found = {
        name for name, item in vars(builtins).items() if isinstance(item, type) and issubclass(item, BaseException)
    }
    theirs = set(found)
    while more := {node.name for node in classes if found & set(base_names(node))} - found:
        found |= more
    return found - theirs


def base_names(class_: ast.ClassDef) -> Iterator[str]:
    for base in class_.bases:
        if isinstance(base, (ast.Name, ast.Attribute)):
            yield base.id if isinstance(base, ast.Name) else base.attr


def figures_of_docs(commit: str) -> dict[str, int]:
    """Return the words of all pages, the number of settings, and the files on each way."""
    pages = {path: text_of(commit, path) for path in files(commit, DOCS) if path.endswith(".md")}
    ways = WAY.findall(pages.get("docs/architecture.md", ""))
    return {
        "words of docs/": sum(len(text.split()) for text in pages.values()),
        "settings": len(SETTING.findall(pages.get("docs/configuration.md", ""))),
        **{f"files on the way of {name.lower()}": len(set(FILE_ON_WAY.findall(way))) for name, way in ways},
    }


def lines_of(node: Any) -> int:
    return node.end_lineno - node.lineno + 1


def private_members(class_: ast.ClassDef) -> set[str]:
    """Return private names that a class defines, as methods, in its body or on `self`."""
    names = set()
    for node in ast.walk(class_):
        if isinstance(node, FUNCTIONS):
            names.add(node.name)
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
            names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def uses_of_others(classes: dict[str, ast.ClassDef]) -> Iterator[str]:
    """Yield the private members of one class of the package that another class names."""
    own = {name: private_members(class_) for name, class_ in classes.items()}
    for name, class_ in classes.items():
        others = set().union(*(members for other, members in own.items() if other != name)) - own[name]
        for node in ast.walk(class_):
            if isinstance(node, ast.Attribute) and node.attr in others:
                yield f"{name}.{node.attr}"


def main(commit: str) -> None:
    package, tests = dict(sources(commit, PACKAGE)), dict(sources(commit, TESTS))
    trees = {path: ast.parse(text) for path, text in package.items()}
    functions = [
        (lines_of(node), f"{path}:{node.name}")
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, FUNCTIONS)
    ]
    classes = {node.name: node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    outside = set(uses_of_others(classes))
    longest = max(functions)
    for label, value in {
        "files of the package": len(package),
        "lines of the package": sum(text.count("\n") for text in package.values()),
        **{f"lines of {room}": lines for room, lines in lines_by_room(package).items()},
        "lines of the tests": sum(text.count("\n") for text in tests.values()),
        "classes": sum(isinstance(node, ast.ClassDef) for tree in trees.values() for node in ast.walk(tree)),
        "exceptions": len(exceptions(trees.values())),
        **figures_of_docs(commit),
        "functions": len(functions),
        "lines of a function, mean": f"{sum(size for size, _ in functions) / len(functions):.1f}",
        "lines of the longest function": f"{longest[0]} ({longest[1]})",
        "private members used across classes": len(outside),
    }.items():
        sys.stdout.write(f"{label}: {value}\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "HEAD")

# SPDX-License-Identifier: Apache-2.0
"""Reads sources of verl, vLLM, SGLang and Ray as text and finds names in them without importing them.

So releases can be read that cannot be imported here, because they need an accelerator or other dependencies. A name is
"package.module:Class.member". It is followed through imports of other modules, and a member through the bases of its
class; attributes that a class only sets on ``self`` are members too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef | ast.Assign | ast.AnnAssign | ast.Module | ast.ImportFrom


@dataclass(frozen=True)
class Found:
    """A definition and its location, which may differ from the place at which it was looked up."""

    node: Definition
    module: str
    qualified: str

    @property
    def place(self) -> str:
        return f"{self.module}:{self.qualified}"


@dataclass
class Upstream:
    """Sources below ``roots``, the folders of packages by name.

    ``changed``: modules to be read instead of their files; None stands for a missing one.
    """

    roots: Mapping[str, Path]
    changed: Mapping[str, ast.Module | None] = field(default_factory=dict)
    _read: dict[str, ast.Module | None] = field(default_factory=dict)

    def with_change(self, module: str, tree: ast.Module | None) -> Upstream:
        """Return the same sources with one module replaced."""
        return Upstream(self.roots, {**self.changed, module: tree}, self._read)

    def path(self, module: str) -> Path | None:
        """Return the file of a module, or None."""
        package, *names = module.split(".")
        if package not in self.roots:
            return None
        base = self.roots[package].joinpath(*names)
        files = (base / "__init__.py", base.with_name(f"{base.name}.py"), base.with_name(f"{base.name}.pyi"))
        return next((file for file in files if file.is_file()), None)

    def _is_namespace(self, module: str) -> bool:
        package, *names = module.split(".")
        return package in self.roots and self.roots[package].joinpath(*names).is_dir()

    def module(self, name: str) -> ast.Module | None:
        if name in self.changed:
            return self.changed[name]
        if name not in self._read:
            path = self.path(name)
            if path is not None:
                self._read[name] = ast.parse(path.read_text())
            else:
                self._read[name] = ast.parse("") if self._is_namespace(name) else None
        return self._read[name]

    def modules_read(self) -> list[str]:
        return [name for name, tree in self._read.items() if tree is not None]

    def find(self, place: str) -> Found | None:
        """Return the definition that ``place`` names, or None."""
        module, _, qualified = place.partition(":")
        if not qualified:
            tree = self.module(module)
            return None if tree is None else Found(tree, module, "")
        name, *members = qualified.split(".")
        found = self._in_module(module, name, set())
        for member in members:
            if found is None:
                return None
            if isinstance(found.node, ast.Module):
                found = self._in_module(found.module, member, set())
            else:
                found = self.member(found, member)
        return found

    def _in_module(self, module: str, name: str, seen: set[str]) -> Found | None:
        tree = self.module(module)
        if tree is None or module in seen:
            return None
        starred = []
        for node in statements(tree):
            if defines(node, name):
                return Found(node, module, name)
            if not isinstance(node, ast.ImportFrom):
                continue
            origin = self._origin(module, node)
            for alias in node.names:
                if alias.name == "*":
                    starred.append(origin)
                elif (alias.asname or alias.name) == name:
                    if (found := self._in_module(origin, alias.name, seen | {module})) is not None:
                        return found
                    if self.module(origin) is None:  # compiled, or of another package
                        return Found(node, module, name)
        for origin in starred:
            if (found := self._in_module(origin, name, seen | {module})) is not None:
                return found
        submodule = self.module(f"{module}.{name}")
        return None if submodule is None else Found(submodule, f"{module}.{name}", "")

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        path = self.path(module)
        package = module if path is not None and path.name == "__init__.py" else module.rpartition(".")[0]
        for _ in range(node.level - 1):
            package = package.rpartition(".")[0]
        return f"{package}.{node.module}" if node.module else package

    def member(self, owner: Found, name: str) -> Found | None:
        """Return a member of a class or of its bases: the definition that an instance has."""
        for base in self.lineage(owner):
            assert isinstance(base.node, ast.ClassDef)
            if (node := _members(base.node).get(name)) is not None:
                return Found(node, base.module, f"{base.qualified}.{name}")
        return None

    def lineage(self, owner: Found) -> Iterator[Found]:
        """Yield a class and its bases, as far as these sources contain them."""
        if not isinstance(owner.node, ast.ClassDef):
            return
        yield owner
        for base in owner.node.bases:
            expression = base.value if isinstance(base, ast.Subscript) else base
            found = self.find(f"{owner.module}:{ast.unparse(expression)}")
            if found is not None and found.place != owner.place:
                yield from self.lineage(found)


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a module or a class, including those in ``if``, ``try`` and ``with``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from statements(node)
        elif isinstance(node, ast.stmt):
            yield node


def defines(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name == name
    return name in targets(node)


def targets(node: ast.AST) -> list[str]:
    """Return the names and ``self.`` attributes that an assignment sets."""
    if isinstance(node, ast.Assign):
        expressions = [part for target in node.targets for part in getattr(target, "elts", [target])]
    elif isinstance(node, ast.AnnAssign):
        expressions = [node.target]
    else:
        return []
    return [name for expression in expressions if (name := dotted(expression)) is not None]


def dotted(expression: ast.expr) -> str | None:
    """Return ``a.b.c`` as text; None for any other expression."""
    if isinstance(expression, ast.Name):
        return expression.id
    if isinstance(expression, ast.Attribute) and (owner := dotted(expression.value)) is not None:
        return f"{owner}.{expression.attr}"
    return None


@lru_cache(maxsize=4096)
def _members(owner: ast.ClassDef) -> dict[str, Definition]:
    """Return the definitions in the body of a class and, for other names, what its methods set on ``self``."""
    own: dict[str, Definition] = {}
    set_later: dict[str, Definition] = {}
    for node in statements(owner):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.setdefault(node.name, node)
        for name in targets(node):
            own.setdefault(name, node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for part in ast.walk(node):
                for name in targets(part):
                    if name.startswith("self."):
                        set_later.setdefault(name.removeprefix("self."), part)
    return set_later | own

# SPDX-License-Identifier: Apache-2.0
"""Simulates changes that a new release of an upstream package might bring, on a copy of a module."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable

from contract import Contract
from upstream import Found, Function, Upstream, targets


def changed(kind: str, contract: Contract, upstream: Upstream) -> Upstream | None:
    """Return the sources with such a change to the contract's place; None if the change does not apply to it."""
    found = upstream.find(contract.place)
    assert found is not None, contract.place
    if kind == "module moved":
        module = contract.place.partition(":")[0]
        return upstream.with_change(module, None)
    new = _CHANGES[kind](contract, found)
    if new is None:
        return None
    tree = upstream.module(found.module)
    assert tree is not None
    return upstream.with_change(found.module, _replaced(tree, found.node, new))


def _replaced(tree: ast.AST, old: ast.AST, new: ast.AST) -> ast.Module:
    """Return a copy of a module with one definition replaced; the rest is shared."""

    def rebuilt(node: ast.AST) -> ast.AST:
        if node is old:
            return new
        if not isinstance(node, ast.Module | ast.stmt | ast.ExceptHandler) or not _spans(node, old):
            return node
        parts = {name: _each(value) for name, value in ast.iter_fields(node)}
        return ast.copy_location(type(node)(**parts), node)

    def _each(value: object) -> object:
        if isinstance(value, list):
            return [rebuilt(part) if isinstance(part, ast.AST) else part for part in value]
        return value

    copied = rebuilt(tree)
    assert isinstance(copied, ast.Module)
    return copied


def _spans(node: ast.AST, other: ast.AST) -> bool:
    if isinstance(node, ast.Module):
        return True
    first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
    return first <= getattr(other, "lineno", 0) and getattr(other, "end_lineno", 0) <= last


def _with_own_arguments(function: Function) -> Function:
    """Return a copy whose arguments may be changed; the rest is shared."""
    new = copy.copy(function)
    new.args = copy.deepcopy(function.args)
    return new


def _renamed(contract: Contract, found: Found) -> ast.AST | None:
    """Rename a function, class or value."""
    new = copy.copy(found.node)
    if isinstance(new, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        new.name = f"{new.name}_by_another_name"
        return new
    if isinstance(new, ast.Assign | ast.AnnAssign):
        return ast.copy_location(ast.Pass(), new)
    return None


def _with_required_argument(contract: Contract, found: Found) -> ast.AST | None:
    if not isinstance(found.node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    if contract.takes is None and contract.passes is None:
        return None
    new = _with_own_arguments(found.node)
    new.args.kwonlyargs.append(ast.arg("required_from_now_on"))
    new.args.kw_defaults.append(None)
    return new


def _with_renamed_argument(contract: Contract, found: Found) -> ast.AST | None:
    """Rename the last parameter that the contract names."""
    if not isinstance(found.node, ast.FunctionDef | ast.AsyncFunctionDef) or contract.takes in (None, "self", "cls"):
        return None
    new = _with_own_arguments(found.node)
    named = [*new.args.args, *new.args.kwonlyargs]
    if not named:
        return None
    named[-1].arg += "_now"
    return new


def _with_changed_default(contract: Contract, found: Found) -> ast.AST | None:
    if not isinstance(found.node, ast.FunctionDef | ast.AsyncFunctionDef) or contract.takes is None:
        return None
    new = _with_own_arguments(found.node)
    if not new.args.defaults:
        return None
    new.args.defaults[-1] = ast.Constant("another default")
    return new


def _with_changed_body(contract: Contract, found: Found) -> ast.AST | None:
    if contract.body is None or not isinstance(found.node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    new = copy.copy(found.node)
    new.body = [*ast.parse("raise NotImplementedError").body, *new.body]
    return new


def _without_statement(contract: Contract, found: Found) -> ast.AST | None:
    """Remove every statement that the contract expects."""
    if not contract.says or not isinstance(found.node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    new = copy.copy(found.node)
    new.body = [ast.Pass()]
    return new


class _Renaming(ast.NodeTransformer):
    """Renames members of a class wherever the class itself uses them."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr in self._names and isinstance(node.value, ast.Name) and node.value.id == "self":
            node.attr += "_by_another_name"
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if node.name in self._names:
            node.name += "_by_another_name"
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        return ast.Pass() if set(targets(node)) & set(self._names) else self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        return ast.Pass() if set(targets(node)) & set(self._names) else self.generic_visit(node)


def _without_members(contract: Contract, found: Found) -> ast.AST | None:
    if not contract.has or not isinstance(found.node, ast.ClassDef):
        return None
    return _Renaming(contract.has).visit(copy.deepcopy(found.node))


def _with_another_value(contract: Contract, found: Found) -> ast.AST | None:
    if contract.value is None or not isinstance(found.node, ast.Assign | ast.AnnAssign):
        return None
    new = copy.copy(found.node)
    new.value = ast.Constant("another value")
    return new


_CHANGES: dict[str, Callable[[Contract, Found], ast.AST | None]] = {
    "renamed": _renamed,
    "a new required argument": _with_required_argument,
    "an argument renamed": _with_renamed_argument,
    "another default": _with_changed_default,
    "another body": _with_changed_body,
    "a statement gone": _without_statement,
    "members gone": _without_members,
    "another value": _with_another_value,
}
# Each kind of change, with the least number of contracts that it applies to, so that none goes untested.
KINDS = {
    "renamed": 300,
    "a new required argument": 200,
    "an argument renamed": 100,
    "another default": 50,
    "another body": 150,
    "a statement gone": 10,
    "members gone": 40,
    "another value": 5,
    "module moved": 300,
}

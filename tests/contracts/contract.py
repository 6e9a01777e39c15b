# SPDX-License-Identifier: Apache-2.0
"""Contracts on functions, classes and values of verl, vLLM, SGLang or Ray, and a check whether sources meet them.

The tables beside this file, one for each package, have a line for each contract: its place, and any of

- ``takes``: its exact parameters, with their defaults;
- ``passes``: the arguments of this package's calls, as a call writes them (``prompt, request_id, lora_request=_``);
- ``body``: a fingerprint of the whole definition, for code that this package repeats, replaces or relies on;
- ``says``: statements or expressions that it contains;
- ``has``: members of the class itself, including those that it sets on ``self``;
- ``value``: the value it is set to;
- ``releases``: the releases of the package in which it is used at all.

A line with none of them says that the place exists. Docstrings, annotations and comments do not count. `problems_of`
names the place in each problem.
"""

from __future__ import annotations

import ast
import hashlib
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from upstream import Found, Upstream, statements

HERE = Path(__file__).parent
TABLES = {package: HERE / f"{package}.toml" for package in ("verl", "vllm", "sglang", "ray")}
IGNORED_FIELDS = {"annotation", "returns", "ctx", "type_comment", "type_params", "kind"}


@dataclass(frozen=True)
class Contract:
    """One line of a table."""

    place: str
    takes: str | None = None
    passes: str | None = None
    body: str | None = None
    says: tuple[str, ...] = ()
    has: tuple[str, ...] = ()
    value: str | None = None
    releases: str = ""

    def is_for(self, release: str) -> bool:
        return SpecifierSet(self.releases).contains(release, prereleases=True)


def read_table(package: str) -> list[Contract]:
    lines = tomllib.loads(TABLES[package].read_text())
    return [
        Contract(f"{module}:{name}" if name else module, **{key: _frozen(value) for key, value in line.items()})
        for module, names in lines.items()
        for name, line in names.items()
    ]


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def problems_of(contract: Contract, upstream: Upstream) -> list[str]:
    """Return the differences between the sources and the contract."""
    found = upstream.find(contract.place)
    if found is None:
        return [f"{contract.place}: there is no such thing any more"]
    name = contract.place.partition(":")[2]
    if "." in name and found.qualified != name:
        return [f"{contract.place}: is not of its class any more, but {found.place}"]
    return [f"{contract.place}: {problem}" for problem in _problems(contract, found, upstream)]


def _problems(contract: Contract, found: Found, upstream: Upstream) -> Iterator[str]:
    for member in contract.has:
        definition = upstream.member(found, member)
        if definition is None or definition.qualified != f"{found.qualified}.{member}":
            yield f"has no {member} of its own any more"
    if contract.takes is not None or contract.passes is not None:
        signature = signature_of(found, upstream)
        if signature is None:
            yield "takes no arguments: it is no function and no class with parameters"
        elif contract.takes is not None and signature.text != contract.takes:
            yield f"takes ({signature.text}), and is known to take ({contract.takes})"
        elif contract.passes is not None and (problem := signature.refuses(contract.passes)):
            yield f"is called with ({contract.passes}), but takes ({signature.text}): {problem}"
    if contract.body is not None and (now := fingerprint(found.node)) != contract.body:
        yield f"its code has changed (body is {now}, was {contract.body}): see whether what is done about it still fits"
    for saying in contract.says:
        if not says(found.node, saying):
            yield f"does not say `{saying}` any more"
    if contract.value is not None and (now := value_of(found)) != contract.value:
        yield f"is {now}, and is known to be {contract.value}"


@dataclass(frozen=True)
class Signature:
    """Parameters of a call, without the instance or class to which a method is bound."""

    text: str
    positional: tuple[str, ...]
    required: frozenset[str]
    by_name: frozenset[str]
    any_positional: bool
    any_named: bool

    def refuses(self, passed: str) -> str | None:
        """Return what is wrong with a call that passes this; None if nothing is."""
        call = ast.parse(f"_({passed})", mode="eval").body
        assert isinstance(call, ast.Call)
        names = [keyword.arg for keyword in call.keywords]
        given = {*self.positional[: len(call.args)], *names}
        if len(call.args) > len(self.positional) and not self.any_positional:
            return f"{len(call.args) - len(self.positional)} positional arguments too many"
        unknown = [name for name in names if name not in self.by_name and not self.any_named]
        if unknown:
            return f"no parameter {unknown[0]}"
        missing = sorted(self.required - given)
        return f"parameter {missing[0]} is required" if missing else None


def signature_of(found: Found, upstream: Upstream) -> Signature | None:
    """Return the signature of a function, or of a class's constructor."""
    if isinstance(found.node, ast.FunctionDef | ast.AsyncFunctionDef):
        decorators = {ast.unparse(decorator) for decorator in found.node.decorator_list}
        return _of_arguments(found.node.args, bound="." in found.qualified and "staticmethod" not in decorators)
    if not isinstance(found.node, ast.ClassDef):
        return None
    constructor = upstream.member(found, "__init__")
    if constructor is not None and isinstance(constructor.node, ast.FunctionDef):
        return _of_arguments(constructor.node.args, bound=True)
    return _of_fields(list(upstream.lineage(found)))


def _of_arguments(arguments: ast.arguments, bound: bool) -> Signature:
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    without_default = positional[: len(positional) - len(arguments.defaults)]
    named = [argument.arg for argument in arguments.kwonlyargs]
    required = {name for name, default in zip(named, arguments.kw_defaults, strict=True) if default is None}
    plain = ast.parse(f"def _({ast.unparse(arguments)}): ...").body[0]
    assert isinstance(plain, ast.FunctionDef)
    for node in ast.walk(plain.args):
        if isinstance(node, ast.arg):
            node.annotation = None
    first = 1 if bound else 0
    return Signature(
        ast.unparse(plain.args),
        tuple(positional[first:]),
        frozenset({*without_default[first:], *required}),
        frozenset({*positional[first:], *named} - {argument.arg for argument in arguments.posonlyargs}),
        arguments.vararg is not None,
        arguments.kwarg is not None,
    )


def _of_fields(lineage: list[Found]) -> Signature:
    fields: dict[str, ast.expr | None] = {}
    for owner in reversed(lineage):
        for node in statements(owner.node):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                fields[node.target.id] = node.value
    text = ", ".join(name if value is None else f"{name}={ast.unparse(value)}" for name, value in fields.items())
    required = frozenset(name for name, value in fields.items() if value is None)
    return Signature(text, tuple(fields), required, frozenset(fields), any_positional=False, any_named=False)


def says(node: ast.AST, saying: str) -> bool:
    """Return whether a definition's source contains a statement or expression."""
    (statement,) = ast.parse(saying).body
    wanted = _plain(statement.value if isinstance(statement, ast.Expr) else statement)
    return any(_plain(part) == wanted for part in ast.walk(node))


def value_of(found: Found) -> str | None:
    if isinstance(found.node, ast.Assign | ast.AnnAssign) and found.node.value is not None:
        return ast.unparse(found.node.value)
    return None


def fingerprint(node: ast.AST) -> str:
    """Return a fingerprint of a definition that does not depend on its docstring, annotations and layout."""
    return hashlib.sha256(repr(_plain(node)).encode()).hexdigest()[:10]


def _plain(node: Any) -> Any:
    """Return a tree as tuples that are equal in all supported releases of Python."""
    if isinstance(node, list):
        return [_plain(part) for part in node]
    if not isinstance(node, ast.AST):
        return node
    fields = [(name, value) for name, value in ast.iter_fields(node) if name not in IGNORED_FIELDS]
    parts = []
    for name, value in fields:
        if name == "body" and isinstance(value, list):
            value = [part for part in value if not _is_text(part)]
        if value not in (None, []):
            parts.append((name, _plain(value)))
    return type(node).__name__, parts


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)

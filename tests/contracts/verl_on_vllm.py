# SPDX-License-Identifier: Apache-2.0
"""Checks whether a release of vLLM has what verl imports of it in modules that this package subclasses."""

from __future__ import annotations

import ast

from upstream import Upstream

# verl's modules that every rollout imports, because they define base classes of this package.
ON_THE_WAY = (
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
    "verl.workers.rollout.vllm_rollout.vllm_rollout",
    "verl.workers.rollout.vllm_rollout.utils",
    "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer",
    "verl.utils.vllm.utils",
    "verl.utils.vllm.patch",
    "verl.third_party.vllm",
)


def missing_imports(upstream: Upstream) -> list[str]:
    """Return verl's imports of vLLM that are missing, except those for which verl handles a failure."""
    missing = []
    for module in ON_THE_WAY:
        tree = upstream.module(module)
        assert tree is not None, module
        for node in _certain(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                places = [f"{node.module}:{alias.name}" for alias in node.names]
                missing += [f"{module} imports {place}" for place in places if upstream.find(place) is None]
    return missing


def _certain(tree: ast.AST) -> list[ast.AST]:
    """Return the nodes that are in no ``try``."""
    found: list[ast.AST] = []
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.Try):
            found += [node, *_certain(node)]
    return found

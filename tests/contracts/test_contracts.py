# SPDX-License-Identifier: Apache-2.0
"""What this package counts on in verl, vLLM, SGLang and Ray is so in their sources, also what cannot run here.

A change upstream makes the test of its place red. Whatever our sources touch has a line in the tables, so that a new
touchpoint cannot be forgotten; and each kind of change is tried on a copy of the sources, and noticed by name.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from changes import KINDS, changed
from contract import Contract, problems_of, read_table
from touched import touches
from upstream import Found, Upstream, statements, targets

CHECKOUT = Path(__file__).parents[2]
PACKAGES = ("verl", "vllm", "ray")
OPTIONAL = ("sglang",)
EXTENSION = "recipe.async_engine.engines.vllm.engine_extension:StagingExtension"
# Made at run time, or not by what its class is: where the contract for it stands.
STANDS_FOR = {
    # A dictionary of them.
    "verl.single_controller.ray:RayResourcePool.pop": "verl.single_controller.ray.base:RayResourcePool",
    "verl.single_controller.base.decorator:Dispatch.ONE_TO_ALL": (
        "verl.single_controller.base.decorator:init_predefined_dispatch_mode"
    ),
    "verl.single_controller.base.decorator:Dispatch.DP_COMPUTE": (
        "verl.single_controller.base.decorator:init_predefined_dispatch_mode"
    ),
    "verl.single_controller.ray:RayWorkerGroup.execute_checkpoint_engine": (
        "verl.checkpoint_engine.base:CheckpointEngineWorker.execute_checkpoint_engine"
    ),
    "ray._raylet:Config": "ray._private.authentication.authentication_token_setup",
    # Of pydantic, below both.
    "verl.experimental.agent_loop.agent_loop:AgentLoopOutput.model_construct": (
        "verl.experimental.agent_loop.agent_loop:AgentLoopOutput"
    ),
    "verl.experimental.agent_loop.agent_loop:AgentLoopMetrics.model_validate": (
        "verl.experimental.agent_loop.agent_loop:AgentLoopMetrics"
    ),
    # Set by its name.
    "sglang.srt.managers.tokenizer_manager:TokenizerManager.update_weights_from_tensor_communicator": (
        "sglang.srt.managers.tokenizer_control_mixin:TokenizerControlMixin.init_communicators"
    ),
    # Ours, mixed into vLLM's worker.
    "vllm.v1.worker.gpu_worker:Worker.ignored_parts": "vllm.v1.worker.gpu_worker:Worker",
}


def folder_of(package: str) -> Path:
    """Of an installed package, which is not imported."""
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is not installed"
    return Path(spec.origin).parent


def release_of(package: str) -> str:
    try:
        return version(package)
    except ModuleNotFoundError:
        return version(f"{package}-cpu")


PRESENT = (*PACKAGES, *(package for package in OPTIONAL if find_spec(package) is not None))
INSTALLED = Upstream({package: folder_of(package) for package in PRESENT} | {"recipe": CHECKOUT / "recipe"})
CONTRACTS = [
    contract
    for package in PRESENT
    for contract in read_table(package)
    if contract.is_for(release_of(package).partition("+")[0])
]


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.place)
def test_contract_is_kept(contract: Contract) -> None:
    assert not problems_of(contract, INSTALLED)


@cache
def places_with_contracts() -> set[str]:
    """Those of the tables, as their sources name them, and the members that they say a class has."""
    found = set()
    for contract in CONTRACTS:
        definition = INSTALLED.find(contract.place)
        assert definition is not None, contract.place
        found |= {contract.place, definition.place}
        for name in contract.has:
            member = INSTALLED.member(definition, name)
            found |= {member.place} if member is not None else set()
    return found


@pytest.mark.parametrize("package", OPTIONAL)
def test_optional_package_has_a_table_and_is_installed(package: str) -> None:
    """Or its contracts have not been checked here."""
    assert read_table(package)
    if package not in PRESENT:
        pytest.skip(f"{package} is not installed, so the contracts with it were not checked")
    assert any(contract.place.startswith(f"{package}.") for contract in CONTRACTS)


def test_whatever_is_touched_has_a_contract() -> None:
    known = places_with_contracts()
    without = {}
    for touch in touches(CHECKOUT / "recipe", INSTALLED):
        definition = INSTALLED.find(touch.place)
        place = STANDS_FOR.get(touch.place, touch.place) if definition is None else definition.place
        # A package or a module as a whole: what is used of it is a touch of its own.
        is_module = definition is not None and isinstance(definition.node, ast.Module)
        if touch.place.partition(".")[0] not in PRESENT:
            continue
        if not is_module and not place.startswith("recipe.") and place not in known:
            without[place] = touch.where
    assert not without, "each needs a line in tests/contracts/*.toml, or in STANDS_FOR"


def lines_named_in_documents() -> list[tuple[str, int]]:
    text = (CHECKOUT / "docs" / "verl-touchpoints.md").read_text()
    named = re.findall(r"`((?:verl|vllm|sglang|ray)/[\w/]+\.py):([\d,-]+)", text)
    return [(path, int(part.partition("-")[0])) for path, lines in named for part in lines.split(",")]


@pytest.mark.parametrize(("path", "line"), lines_named_in_documents())
def test_each_line_that_the_document_names_is_of_something_with_a_contract(path: str, line: int) -> None:
    module = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    tree = INSTALLED.module(module)
    assert tree is not None, f"there is no {path}"
    names: list[str] = []
    node = enclosing(tree, line)
    while node is not None:
        names.append(targets(node)[0] if isinstance(node, ast.Assign | ast.AnnAssign) else node.name)
        # What is in a function is part of it.
        node = enclosing(node, line) if isinstance(node, ast.ClassDef) else None
    place = f"{module}:{'.'.join(names)}" if names else module
    known = places_with_contracts()
    parts = any(other.startswith(f"{place}.") for other in known)
    assert place in known or parts or module in known, f"line {line} is of {place}"


def enclosing(tree: ast.AST, line: int) -> Any:
    """The function, the class or the assignment of a module or a class that a line is of; None if there is none."""
    for node in statements(tree):
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
        if first <= line <= (node.end_lineno or first) and (hasattr(node, "name") or targets(node)):
            return node
    return None


def names_taken(upstream: Upstream) -> list[str]:
    """Names of the extension that vLLM's worker class has too: vLLM refuses to start with such a one."""
    extension, worker = upstream.find(EXTENSION), upstream.find("vllm.v1.worker.gpu_worker:Worker")
    assert extension is not None and worker is not None
    ours = {name for base in upstream.lineage(extension) for name in class_members(base)}
    theirs = {name for base in upstream.lineage(worker) for name in class_members(base)}
    return sorted(name for name in ours & theirs if not name.startswith("__"))


def class_members(owner: Found) -> set[str]:
    """Names that a class itself has, without what its instances get."""
    names = set()
    for node in statements(owner.node):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {ast.unparse(target) for target in targets}
    return names


def test_no_name_of_the_worker_extension_is_taken_in_vllm() -> None:
    assert names_taken(INSTALLED) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_upstream_is_noticed_by_name(kind: str) -> None:
    """Every contract to which such a change can be done, each in a copy of the module that has it."""
    tried, missed = 0, []
    for contract in CONTRACTS:
        copy = changed(kind, contract, INSTALLED)
        if copy is None:
            continue
        tried += 1
        problems = problems_of(contract, copy)
        if not problems or not all(problem.startswith(f"{contract.place}: ") for problem in problems):
            missed.append(contract.place)
    assert tried >= KINDS[kind] and not missed


def test_a_change_in_a_file_is_noticed(tmp_path: Path) -> None:
    """As the others, by files: a copy of the folder in which one is edited, as a new release would bring it."""
    place = "vllm.v1.engine.core_client:AsyncMPClient.pause_scheduler_async"
    contract = next(contract for contract in CONTRACTS if contract.place == place)
    original = folder_of("vllm")
    for file in ("__init__.py", "v1/engine/__init__.py", "v1/engine/core_client.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text((original / file).read_text())
    assert not problems_of(contract, Upstream({"vllm": tmp_path}))
    edited = tmp_path / "v1/engine/core_client.py"
    text = edited.read_text()
    edited.write_text(text.replace("async def pause_scheduler_async(", "async def halt_scheduler_async("))
    assert "there is no such thing" in problems_of(contract, Upstream({"vllm": tmp_path}))[0]
    edited.write_text(text.replace('self, mode: PauseMode = "abort", clear_cache', "self, tenant, mode, clear_cache"))
    assert "parameter tenant is required" in problems_of(contract, Upstream({"vllm": tmp_path}))[0]

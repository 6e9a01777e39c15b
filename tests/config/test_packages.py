# SPDX-License-Identifier: Apache-2.0
"""A run on accelerators is refused if packages that it would import are not installed."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
from test_config import ACTOR, CPU, GAE, MEGATRON, MEGATRON_SERVERS, MODEL, ROLLOUT, SERVERS, configured

from recipe.async_engine.config.facts import NodeFact, Resources
from recipe.async_engine.config.packages import MODULES, needs
from recipe.async_engine.config.validation import judge
from recipe.async_engine.inspection.node_probe import absent
from recipe.async_engine.inspection.nodes import node_problems

ATTENTION = f"{MODEL}.override_config.attn_implementation"
SDPA = {f"{MODEL}.override_config": {"attn_implementation": "sdpa"}}
BACKEND = f"{ROLLOUT}.checkpoint_engine.backend"
VANILLA = {f"{ACTOR}.megatron": {"vanilla_mbridge": True}}
ALL_MEGATRON = MEGATRON | SDPA


@pytest.mark.parametrize(
    ("changes", "packages"),
    [
        ({}, ["flash-attn", "cupy"]),
        (CPU, []),
        (SDPA, ["cupy"]),
        ({f"{MODEL}.override_config": {"model_config": {"attn_implementation": "sdpa"}}}, ["cupy"]),
        ({f"{MODEL}.override_config": {"attn_implementation": "flash_attention_3"}}, ["flash-attn", "cupy"]),
        (SDPA | {f"{MODEL}.use_liger": True}, ["liger-kernel", "cupy"]),
        (ALL_MEGATRON, ["flash-attn", "megatron-bridge", "cupy"]),
        (ALL_MEGATRON | VANILLA, ["flash-attn", "mbridge", "cupy"]),
        (SDPA | MEGATRON_SERVERS, ["flash-attn", "megatron-bridge", "cupy"]),
        (MEGATRON | SERVERS, ["flash-attn", "flash-attn", "megatron-bridge", "cupy"]),
        (MEGATRON | GAE | {"critic.strategy": "fsdp2"}, ["flash-attn", "flash-attn", "megatron-bridge", "cupy"]),
        (SDPA | {BACKEND: "nixl"}, ["cupy", "nixl"]),
        (SDPA | {BACKEND: "recipe_gloo"}, []),
    ],
)
def test_settings_ask_for_packages(changes: dict[str, Any], packages: list[str]) -> None:
    found = list(needs(configured(changes)))
    assert [need.package for need in found] == packages
    assert {module for need in found for module in need.modules} <= set(MODULES)


def test_what_to_do_about_a_missing_package_is_said() -> None:
    attention, _ = needs(configured({}))
    assert attention.advice.startswith(
        "Install flash-attn (see docs/dependencies.md), or set +actor_rollout_ref.model."
    )
    of_megatron, bridge, _ = needs(configured(ALL_MEGATRON))
    assert of_megatron.advice == "Install flash-attn (see docs/dependencies.md)."
    assert bridge.allowed == "true without megatron-bridge"
    assert list(needs(configured(ALL_MEGATRON | VANILLA)))[1].allowed == "false without mbridge"


@pytest.mark.parametrize(
    ("lacking", "refused"),
    [
        ((), set()),
        (("flash_attn",), set()),
        (("flash_attn", "kernels"), {ATTENTION}),
        (("cupy", "nixl"), {BACKEND}),
    ],
)
def test_package_that_is_looked_for_here_and_not_there_is_refused_by_the_setting(
    lacking: tuple[str, ...], refused: set[str]
) -> None:
    problems = judge(configured({}), available=Resources(None, absent=frozenset(lacking)), dataset_rows=5000)[0]
    assert {problem.setting for problem in problems} == refused
    assert all("see docs/dependencies.md" in problem.advice for problem in problems)


def test_package_that_a_node_lacks_is_named_with_the_node() -> None:
    node = NodeFact("10.0.0.1", recipe="1.2", verl="0.9.1", routes=("entry point",))
    lacks = NodeFact("10.0.0.2", recipe="1.2", verl="0.9.1", routes=("entry point",), absent=("cupy",))
    (problem,) = node_problems([node, lacks], "1.2", "/runs/a", list(needs(configured({}))))
    assert problem.startswith(f"{BACKEND} asks for cupy, which node 10.0.0.2 does not have")


def test_modules_are_looked_for_without_importing_them() -> None:
    there = ("json", "xml.dom", "no_such_package", "no_such_package.inside", "json.no_such_module")
    assert absent(there) == ("no_such_package", "no_such_package.inside", "json.no_such_module")


def test_a_release_is_looked_for_by_its_leading_parts() -> None:
    installed = version("verl")
    first, _, _ = installed.partition(".")
    there = [f"verl=={installed}", f"verl=={first}"]
    others = [f"verl=={installed}1", f"verl=={first}{first}", "no_such_package==1"]
    assert absent([*there, *others]) == tuple(others)

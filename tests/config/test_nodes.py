# SPDX-License-Identifier: Apache-2.0
"""The problems of a cluster's nodes follow from their answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from recipe.async_engine.config.facts import NodeFact
from recipe.async_engine.inspection.nodes import NodesNotReady, node_problems

GOOD = NodeFact("10.0.0.1", recipe="1.2", verl="0.9.1", routes=("entry point",))
MODEL = "actor_rollout_ref.model.path"


def test_nodes_that_are_alike_and_see_everything_are_ready() -> None:
    assert node_problems([GOOD, replace(GOOD, address="10.0.0.2")], "1.2", "/runs/a") == []


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"recipe": None}, "no verl-recipe-async in the environment of Ray's workers. Install version 1.2"),
        ({"recipe": "1.1"}, "verl-recipe-async 1.1, the main 1.2"),
        ({"routes": ()}, "VERL_USE_EXTERNAL_PLUGINS"),
        ({"verl": None}, "no verl"),
        ({"error": "did not answer within 5 s"}, "did not answer within 5 s"),
        ({"sees_folder": False}, "trainer.default_local_dir=/runs/a is not the same folder"),
        ({"faults": ((MODEL, "/m", "does not exist"),)}, f"{MODEL}=/m does not exist on node 10.0.0.2"),
    ],
)
def test_what_is_wrong_with_a_node_is_said_with_its_address(fault: dict[str, Any], said: str) -> None:
    (problem,) = node_problems([GOOD, replace(GOOD, address="10.0.0.2", **fault)], "1.2", "/runs/a")
    assert "10.0.0.2" in problem and said in problem and "10.0.0.1" not in problem


def test_different_releases_of_verl_are_named_on_each_node() -> None:
    problems = node_problems([GOOD, replace(GOOD, address="10.0.0.2", verl="0.9.2")], "1.2", "/runs/a")
    assert len(problems) == 2 and all("0.9.1, 0.9.2" in problem for problem in problems)
    told = str(NodesNotReady(problems))
    assert told.startswith("The run's processes cannot work on every node of the cluster:\n  - ")
    assert all(problem in told for problem in problems)

# SPDX-License-Identifier: Apache-2.0
"""Judges what the nodes of a cluster have answered about themselves.

Contract: `node_problems` is a pure function; each problem names the node, what is wrong there and what to change.
"""

from collections.abc import Iterator, Sequence

from recipe.async_engine.config.facts import NodeFact
from recipe.async_engine.config.packages import Need
from recipe.async_engine.core.errors import RecipeError


class NodesNotReady(RecipeError):
    """Processes of the run could not work on a node of the cluster; the message has every problem found."""

    def __init__(self, problems: Sequence[str]) -> None:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        super().__init__(f"The run's processes cannot work on every node of the cluster:{lines}")


def node_problems(facts: Sequence[NodeFact], recipe: str, folder: str, needs: Sequence[Need] = ()) -> list[str]:
    """Of all nodes; none means that the run may start.

    Args:
        recipe: this package's version where the main runs.
        folder: `trainer.default_local_dir`.
        needs: packages that nodes with accelerators were asked for.
    """
    releases = sorted({fact.verl for fact in facts if fact.verl is not None})
    found = [problem for fact in facts for problem in _problems(fact, recipe, releases, folder)]
    for fact in facts:
        for need in needs:
            if need.is_lacking(fact.absent):
                asked = f"{need.setting} asks for {need.package}, which node {fact.address} does not have in the"
                found.append(f"{asked} environment of Ray's workers. {need.advice}")
    return found


def _problems(fact: NodeFact, recipe: str, releases: Sequence[str], folder: str) -> Iterator[str]:
    node = f"node {fact.address}"
    if fact.error is not None:
        yield f"{node} {fact.error}. Repair it, or take it out of the cluster."
        return
    if fact.verl is None:
        yield f"{node} has no verl in the environment of Ray's workers. Install the same one as on the other nodes."
    elif len(releases) > 1:
        yield f"{node} has verl {fact.verl}; the cluster has {', '.join(releases)}. Install the same one everywhere."
    if fact.recipe is None:
        yield f"{node} has no verl-recipe-async in the environment of Ray's workers. Install version {recipe} there."
    elif fact.recipe != recipe:
        yield f"{node} has verl-recipe-async {fact.recipe}, the main {recipe}. Install the same one everywhere."
    elif not fact.routes:
        yield (
            f"{node} would not load this package with verl: its entry point is not installed there, or"
            " VERL_USE_EXTERNAL_PLUGINS keeps it out. Install verl-recipe-async there with pip, or set"
            " VERL_USE_EXTERNAL_MODULES=recipe.async_engine.plugin for Ray's workers."
        )
    for setting, path, fault in fact.faults:
        yield f"{setting}={path} {fault} on {node}. Put it on a file system that all nodes share, or copy it there."
    if not fact.sees_folder:
        yield (
            f"trainer.default_local_dir={folder} is not the same folder on {node}: a file that the main has written"
            " there is not seen. Choose one on a file system that all nodes share; a checkpoint is written by several."
        )

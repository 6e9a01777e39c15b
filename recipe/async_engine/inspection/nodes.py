# SPDX-License-Identifier: Apache-2.0
"""Checks that a run's processes can work on every node of the cluster, and refuses the run if they cannot.

Contract: each node with CPUs or accelerators runs one small task before anything expensive starts. The problems of all
nodes are reported at once (`node_problems`, a pure function). To check that all nodes share the run's folder, the main
process writes a marker file there, which must be visible on every node, and removes it afterwards. Shown by
tests/config/test_nodes.py, tests/integration/test_nodes.py and tests/e2e/test_nodes.py.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from recipe.async_engine import __version__
from recipe.async_engine.config.facts import NodeFact, NodeRoom, Resources
from recipe.async_engine.config.packages import Need, needs
from recipe.async_engine.config.plan import teachers
from recipe.async_engine.config.problems import lookup
from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.inspection import node_probe

PATHS = (
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.model.tokenizer_path",
    "actor_rollout_ref.model.lora_adapter_path",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path",
    "actor_rollout_ref.rollout.multi_turn.interaction_config_path",
    "critic.model.path",
    "reward.reward_model.model_path",
    "reward.custom_reward_function.path",
    "custom_reward_function.path",
    "data.custom_cls.path",
    "data.train_files",
    "data.val_files",
)
"""Settings with paths of files that processes on any node may open."""
ACCELERATORS = ("GPU", "NPU")
"""Names of accelerators among Ray's resources."""
RAY_TYPE = "accelerator_type:"
# GiB of memory of each accelerator type, by Ray's name for it (ray.util.accelerators). If a type exists in several
# sizes, this is the smallest.
BY_TYPE: Mapping[str, int] = {
    "T4": 15,
    "L4": 22,
    "A10G": 22,
    "A10": 22,
    "V100": 16,
    "L40": 44,
    "L40S": 44,
    "A100": 40,
    "A100-40G": 40,
    "A100-80G": 80,
    "H20": 95,
    "H100": 80,
    "H200": 140,
    "B200": 179,
    "GH200": 95,
}
GIB = 1 << 30


class NodesNotReady(RecipeError):
    """The run's processes could not work on a node of the cluster; the message has every problem found."""

    def __init__(self, problems: Sequence[str]) -> None:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        super().__init__(f"The run's processes cannot work on every node of the cluster:{lines}")


def node_problems(facts: Sequence[NodeFact], recipe: str, folder: str, needs: Sequence[Need] = ()) -> list[str]:
    """Return the problems of all nodes; an empty list means that the run may start.

    ``recipe`` is the version of this package in the main process, ``folder`` is the value of
    `trainer.default_local_dir`, and ``needs`` are the packages that nodes with accelerators must have.
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
            " there is missing. Choose one on a file system that all nodes share; a checkpoint is written by several."
        )


def check_nodes(config: Mapping[str, Any], timeout_s: float) -> None:
    """Check the nodes of the cluster that this process has joined; ``config`` is plain and resolved.

    Raises:
        NodesNotReady: the run's processes could not work on one of the nodes.
    """
    folder, needed = Path(lookup(config, "trainer.default_local_dir")), list(needs(config))
    with _marker(folder) as marker:
        facts = _ask(local_paths(config), str(marker), [name for need in needed for name in need.modules], timeout_s)
    if problems := node_problems(facts, __version__, str(folder), needed):
        raise NodesNotReady(problems)


def cluster_resources() -> Resources:
    """Return the resources of each node of the cluster that this process has joined, whether in use or not."""
    counted = (node["Resources"] for node in _alive())
    # verl counts accelerators the same way (single_controller/ray/base.py:226).
    rooms = [NodeRoom(int(room.get("GPU", room.get("NPU", 0))), room.get("CPU", 0)) for room in counted]
    return Resources.of(rooms, memory_by_type(ray.cluster_resources()))


def memory_by_type(resources: Iterable[str]) -> int | None:
    """Return the memory, in bytes, of the cluster's accelerator type with the least memory.

    Ray names each accelerator type in ``resources``, its list of the cluster's resources. The result is None if no type
    is named, or if the memory of one of the types is unknown.
    """
    types = [name.removeprefix(RAY_TYPE) for name in resources if name.startswith(RAY_TYPE)]
    sizes = [BY_TYPE.get(name) for name in types]
    known = [size for size in sizes if size is not None]
    return min(known) * GIB if known and len(known) == len(sizes) else None


def local_paths(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (setting, path) for each existing path named by a setting in `PATHS` or by a teacher's `model_path`.

    Names of models on the hub are not paths, and are left out.
    """
    found = []
    for setting in (*PATHS, *(f"{teacher}.model_path" for teacher in teachers(config))):
        value = lookup(config, setting)
        for path in [value] if isinstance(value, str) else list(value or []):
            if os.path.exists(os.path.expanduser(path)):
                found.append((setting, path))
    return found


def _alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _ask(paths: list[tuple[str, str]], marker: str, modules: list[str], timeout_s: float) -> list[NodeFact]:
    """Run `probe` on each node and return the results. On nodes with accelerators, it also looks for ``modules``."""
    cloudpickle.register_pickle_by_value(node_probe)
    try:
        task = ray.remote(num_cpus=0, max_retries=0)(node_probe.probe)
        asked = {
            node["NodeManagerAddress"]: task.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote(paths, marker, modules if any(node["Resources"].get(name) for name in ACCELERATORS) else [])
            for node in _alive()
            if any(node["Resources"].get(name) for name in ("CPU", *ACCELERATORS))
        }
    finally:
        cloudpickle.unregister_pickle_by_value(node_probe)
    answered, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s)
    return [_fact(address, answer if answer in answered else None, timeout_s) for address, answer in asked.items()]


def _fact(address: str, answer: Any, timeout_s: float) -> NodeFact:
    """Return what a node answered as a `NodeFact`; if it did not answer, the `NodeFact` has the error."""
    if answer is None:
        return NodeFact(address, f"did not answer within {timeout_s:g} s (async_training.timeouts.startup)")
    try:
        return NodeFact(address, **ray.get(answer, timeout=timeout_s))
    except Exception as error:  # After any error, the run cannot rely on this node.
        return NodeFact(address, f"could not be asked: {error}")


@contextmanager
def _marker(folder: Path) -> Iterator[Path]:
    """Provide a new, uniquely named file in ``folder`` for the duration of the context."""
    folder.mkdir(parents=True, exist_ok=True)
    marker = folder / f".seen-by-all-nodes-{uuid.uuid4().hex}"
    marker.touch()
    try:
        yield marker
    finally:
        marker.unlink(missing_ok=True)

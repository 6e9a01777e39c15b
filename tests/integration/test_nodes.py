# SPDX-License-Identifier: Apache-2.0
"""The nodes of a real Ray are asked whether a run can work there: what they lack is said by node, nothing is left."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray_nodes import Loopback, Nodes, closing
from surroundings import ray_folder

from recipe.async_engine.config.facts import NodeRoom
from recipe.async_engine.inspection.nodes import NodesNotReady, check_nodes, cluster_resources, local_paths

ASK_S = 60.0
REWARD = "reward.custom_reward_function"


@pytest.fixture(scope="module")
def one_node() -> Iterator[Loopback]:
    ray.shutdown()
    with ray_folder() as folder, closing(Loopback(folder, loses_nodes=False)) as nodes:
        nodes.add(accelerators=0, cpus=1)
        yield nodes


@contextmanager
def joined(nodes: Nodes, **environment: str) -> Iterator[None]:
    """The cluster is this process's; its workers have ``environment``."""
    # Forks are for a cluster's first job.
    workers = {"env_vars": environment, "py_executable": sys.executable}
    ray.init(address=nodes.ray_address, log_to_driver=False, runtime_env=workers)
    try:
        yield
    finally:
        ray.shutdown()


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """Of a run with a reward function and a model's folder on this machine."""
    (tmp_path / "model").mkdir()
    (tmp_path / "reward.py").touch()
    return {
        "trainer": {"default_local_dir": str(tmp_path / "run")},
        "actor_rollout_ref": {"model": {"path": str(tmp_path / "model")}},
        "critic": {"model": {"path": "some/model-on-the-hub"}},
        "reward": {"custom_reward_function": {"path": str(tmp_path / "reward.py")}},
        "data": {"train_files": ["hdfs://elsewhere/train.parquet"], "val_files": None},
    }


def test_what_is_looked_for_is_what_this_machine_has(config: dict[str, Any], tmp_path: Path) -> None:
    assert local_paths(config) == [
        ("actor_rollout_ref.model.path", str(tmp_path / "model")),
        (f"{REWARD}.path", str(tmp_path / "reward.py")),
    ]


def test_a_node_whose_workers_have_another_recipe_package_in_front_says_what_to_install(
    one_node: Loopback, config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "other" / "recipe").mkdir(parents=True)
    (tmp_path / "other" / "recipe" / "__init__.py").touch()
    said = r"node \S+ has no verl-recipe-async .* Install version 0\.1\.0 there"
    with joined(one_node, PYTHONPATH=str(tmp_path / "other")), pytest.raises(NodesNotReady, match=said):
        check_nodes(config, ASK_S)
    assert os.listdir(tmp_path / "run") == []


def test_a_node_whose_workers_would_not_load_the_plugin_is_named(one_node: Loopback, config: dict[str, Any]) -> None:
    said = r"node \S+ would not load this package with verl"
    with joined(one_node, VERL_USE_EXTERNAL_PLUGINS="none"), pytest.raises(NodesNotReady, match=said):
        check_nodes(config, ASK_S)


class Hiding(Loopback):
    """Its second node has empty folders in the place of ``hidden``."""

    hidden: tuple[Path, ...] = ()

    def _before(self, number: int) -> list[str]:
        if number == 1:
            return []
        mounts = " && ".join(f"mount -t tmpfs tmpfs {folder}" for folder in self.hidden)
        return ["unshare", "--mount", "sh", "-c", f'{mounts} && exec "$0" "$@"']


def test_a_node_where_everything_is_there_is_ready_and_nothing_is_left(
    one_node: Loopback, config: dict[str, Any], tmp_path: Path
) -> None:
    with joined(one_node):
        check_nodes(config, ASK_S)
    assert os.listdir(tmp_path / "run") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root hides folders from a process")
def test_a_node_without_the_runs_folder_and_its_model_is_named_and_the_others_are_not(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("run", "model/weights"):
        (tmp_path / folder).mkdir()
    config["actor_rollout_ref"]["model"]["path"] = str(tmp_path / "model" / "weights")
    monkeypatch.setattr("recipe.async_engine.inspection.node_probe.SEEN_S", 1.0)
    with ray_folder() as folder, closing(Hiding(folder)) as nodes:
        nodes.hidden = (tmp_path / "run", tmp_path / "model")
        nodes.add(0, cpus=2)
        nodes.add(3, cpus=5)
        with joined(nodes):
            assert sorted(cluster_resources().nodes, key=lambda room: room.accelerators) == [
                NodeRoom(0, 2),
                NodeRoom(3, 5),
            ]
            with pytest.raises(NodesNotReady) as raised:
                check_nodes(config, ASK_S)
    folder, model = str(raised.value).splitlines()[:0:-1]
    assert f"trainer.default_local_dir={tmp_path / 'run'} is not the same folder on node 127.0.0.3" in folder
    assert f"actor_rollout_ref.model.path={tmp_path / 'model' / 'weights'} does not exist on node 127.0.0.3" in model
    assert os.listdir(tmp_path / "run") == []

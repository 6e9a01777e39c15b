# SPDX-License-Identifier: Apache-2.0
"""What becomes of a user's manager of agent loops; tests/e2e/test_fully_async.py has one at work."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

from recipe.async_engine.rollout import trajectory_manager
from recipe.async_engine.rollout.trajectory_manager import (
    UNASKED,
    RolloutFailed,
    TrajectoryManager,
    manager_class,
    worker_over,
)
from recipe.async_engine.rollout.trajectory_worker import TrajectoryWorker

CONFIG = OmegaConf.create({"actor_rollout_ref": {"rollout": {}, "model": {}}, "async_training": {}})


@pytest.fixture(autouse=True)
def users_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "e2e"))
    yield
    sys.modules.pop("user_manager", None)


@pytest.mark.parametrize(
    "name",
    [
        None,
        "",
        "verl.experimental.agent_loop.AgentLoopManager",
        "verl.experimental.agent_loop.agent_loop.AgentLoopManager",
    ],
)
def test_verls_own_manager_is_this_packages(name: str | None) -> None:
    assert manager_class(name) is TrajectoryManager


def test_users_manager_and_its_workers_are_base_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectory_manager, "Restartable", lambda worker, *limits, **options: worker)
    made = manager_class("user_manager.UserManager")
    import user_manager

    assert issubclass(made, TrajectoryManager) and issubclass(made, user_manager.UserManager)
    worker = made(CONFIG, None).agent_loop_workers_class
    assert issubclass(worker, TrajectoryWorker) and issubclass(worker, user_manager.UserWorker)
    # The user's is asked where this package's would have asked verl's.
    order = worker.__mro__
    assert order.index(TrajectoryWorker) < order.index(user_manager.UserWorker) < order.index(AgentLoopWorker)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("user_manager.NoManager", "not a subclass of verl's AgentLoopManager"),
        ("user_manager.BatchManager", "generate_sequences of its own"),
        ("user_manager.Missing", "Class 'Missing' not found"),
        ("no_such_module.Manager", "no_such_module"),
        ("Manager", "Expected fully qualified class name"),
    ],
)
def test_manager_that_could_not_take_part_is_refused_by_name(name: str, said: str) -> None:
    with pytest.raises(RolloutFailed, match=said) as refused:
        manager_class(name)
    assert f"agent_loop_manager_class={name}" in str(refused.value)


def test_worker_of_a_users_manager_that_works_on_whole_batches_is_refused_by_name() -> None:
    with pytest.raises(RolloutFailed, match=r"Worker.* the class has a generate_sequences of its own"):
        manager_class("user_manager.BatchWorkerManager")(CONFIG, None)


@pytest.mark.parametrize("method", UNASKED[AgentLoopWorker])
def test_each_method_of_whole_batches_is_refused(method: str) -> None:
    with pytest.raises(RolloutFailed, match=f"a {method} of its own"):
        worker_over("mine.Manager", type("Mine", (AgentLoopWorker,), {method: lambda self: None}))


@pytest.mark.parametrize("other", [object, 3, None, lambda: None])
def test_workers_of_another_kind_are_refused(other: Any) -> None:
    with pytest.raises(RolloutFailed, match="not a subclass of verl's AgentLoopWorker"):
        worker_over("mine.Manager", other)

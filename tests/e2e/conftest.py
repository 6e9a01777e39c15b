# SPDX-License-Identifier: Apache-2.0
"""The built-in tasks and the folders that end-to-end tests share."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from main_runs import ENGINE
from surroundings import ray_folder

from recipe.laptop.task import TaskPaths, TaskSettings, ensure_task


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that are marked ``vllm`` where another engine generates; the mark has the reason."""
    for item in items:
        if ENGINE != "vllm" and (mark := item.get_closest_marker("vllm")):
            item.add_marker(pytest.mark.skip(reason=f"vLLM only: {mark.args[0]}"))


@pytest.fixture(scope="session")
def task(shared_folder: Path) -> TaskPaths:
    """The built-in task with answers of 6 tokens."""
    return ensure_task(shared_folder / "uniform" / "task", TaskSettings(train_size=256, val_size=32))


@pytest.fixture(scope="session")
def untrained_task(task: TaskPaths, tmp_path_factory: pytest.TempPathFactory) -> TaskPaths:
    """The same data and architecture with random weights, and a reward that any policy gets now and then.

    It is for comparing two engines: probabilities are small, so that a difference of 1e-6 is far above fp32's rounding.
    Those of the warm-started model are close to 1, where ten units in the last place are 1e-6.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("untrained")
    shutil.copytree(task.model, folder / "model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(task.model), dtype=torch.float32).save_pretrained(
        folder / "model"
    )
    reward = folder / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
        "    return float(len(solution_str) % 2)\n"
    )
    return TaskPaths(model=folder / "model", train=task.train, val=task.val, reward_file=reward)


@pytest.fixture
def ray_dir() -> Iterator[Path]:
    with ray_folder() as folder:
        yield folder


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder to which trainers of `recording` and `lora_trainer` write."""
    folder = tmp_path / "recorded"
    folder.mkdir()
    monkeypatch.setenv("RECORDED", str(folder))
    return folder

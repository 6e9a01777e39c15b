# SPDX-License-Identifier: Apache-2.0
"""A teacher for the built-in task, and the overrides of a run that learns from it."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

from recipe.laptop.task import TaskPaths, TaskSettings, ensure_task, warm_start


def make_teacher(folder: Path) -> TaskPaths:
    """Return a task whose model knows it, because its demonstrations always followed the instruction.

    None of them used a digit string of the task's validation set.
    """
    with patch.object(warm_start, "TEACHER_FOLLOWS", 1.0):
        return ensure_task(folder, TaskSettings(train_size=1024, val_size=128))


def taught_by_several(teachers: dict[str, tuple[Path, int]], **loss: object) -> list[str]:
    """Return overrides of ``preset=tiny_cpu`` for several teachers: the model and number of servers of each, by key."""
    inference = "${distillation.teacher_models.teacher_model.inference}"
    servers = sum(count for _, count in teachers.values())
    return [
        "distillation.enabled=true",
        f"distillation.n_gpus_per_node={servers}",
        f"ray_kwargs.ray_init.num_gpus={3 + servers}",
        *(
            f"+distillation.teacher_models.{key}="
            f"{{key:{key},model_path:{model},num_replicas:{count},inference:'{inference}'}}"
            for key, (model, count) in teachers.items()
        ),
        *(f"distillation.distillation_loss.{name}={value}" for name, value in loss.items()),
    ]


def taught_by(teacher: Path, **loss: object) -> list[str]:
    """Return overrides of ``preset=tiny_cpu`` to learn from ``teacher`` with these settings of verl's loss."""
    return [
        "distillation.enabled=true",
        f"distillation.teacher_models.teacher_model.model_path={teacher}",
        *(f"distillation.distillation_loss.{name}={value}" for name, value in loss.items()),
    ]

# SPDX-License-Identifier: Apache-2.0
"""The built-in task: a tiny model, a tokenizer and data, with which RL learns within minutes on two CPU cores.

Importing this package is fast: torch, transformers and pyarrow are imported only when a task is created.
"""

from recipe.laptop.task.builder import TaskDirectoryError, ensure_task
from recipe.laptop.task.settings import TaskPaths, TaskSettings

__all__ = ["TaskDirectoryError", "TaskPaths", "TaskSettings", "ensure_task"]

# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Makes the helpers of these tests importable (modules are imported by path), and shares the built-in tasks."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipe.async_engine.task import TaskPaths, TaskSettings, ensure_task

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> TaskPaths:
    """Answers of 6 tokens."""
    return ensure_task(tmp_path_factory.mktemp("uniform") / "task", TaskSettings(train_size=256, val_size=32))


@pytest.fixture(scope="session")
def long_tail_task(tmp_path_factory: pytest.TempPathFactory) -> TaskPaths:
    """One answer in 20 has 132 tokens instead of 6."""
    settings = TaskSettings(lengths="long_tail", train_size=256, val_size=32)
    return ensure_task(tmp_path_factory.mktemp("long_tail") / "task", settings)


@pytest.fixture
def ray_dir() -> Iterator[Path]:
    # Ray puts sockets below it, whose paths are limited to 107 bytes; pytest's own folders are too deep.
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)

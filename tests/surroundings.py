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
"""What tests give to the programs that they start."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recipe.async_engine.platform.detect import CPU_ENVIRONMENT


def user_environment() -> dict[str, str]:
    """This process's environment as a user's shell has it: a program chooses its platform by itself."""
    return {name: value for name, value in os.environ.items() if name not in {*CPU_ENVIRONMENT, "RAY_ADDRESS"}}


@contextmanager
def ray_folder() -> Iterator[Path]:
    """A folder for Ray, which puts sockets below it whose paths are limited to 107 bytes: pytest's own are too deep."""
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

# SPDX-License-Identifier: Apache-2.0
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


@contextmanager
def fresh_ray(**settings: int) -> Iterator[None]:
    """A Ray of this process, with a folder of its own and ``settings`` of `ray.init`, and none after it."""
    import ray

    with ray_folder() as folder:
        ray.shutdown()  # Ray starts itself where a test before has called it without one
        ray.init(include_dashboard=False, _temp_dir=str(folder), log_to_driver=False, **settings)
        yield
        ray.shutdown()

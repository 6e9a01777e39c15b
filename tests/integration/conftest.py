# SPDX-License-Identifier: Apache-2.0
"""Makes the helpers of these tests importable, and takes the platform that a main would take on this machine.

The modules are imported by path, not through `sys.path`. The platform comes first: verl reads it when it is imported.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from surroundings import ray_folder

from recipe.async_engine.platform.detect import apply_environment, choose_platform, inspect_machine

sys.path.insert(0, str(Path(__file__).parent))
apply_environment(choose_platform(os.environ, inspect_machine()))


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Ray with two logical accelerators, started for these tests and ended after them."""
    import ray

    with ray_folder() as folder:
        ray.init(num_cpus=4, num_gpus=2, include_dashboard=False, _temp_dir=str(folder), log_to_driver=False)
        yield
        ray.shutdown()

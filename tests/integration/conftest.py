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

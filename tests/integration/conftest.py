# SPDX-License-Identifier: Apache-2.0
"""The cluster that integration tests share."""

from collections.abc import Iterator

import pytest
from surroundings import ray_folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Ray with two logical accelerators, started for these tests and ended after them."""
    import ray

    with ray_folder() as folder:
        ray.shutdown()  # Ray starts itself where a test before has called it without one
        ray.init(num_cpus=4, num_gpus=2, include_dashboard=False, _temp_dir=str(folder), log_to_driver=False)
        yield
        ray.shutdown()

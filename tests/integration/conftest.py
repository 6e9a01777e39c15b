# SPDX-License-Identifier: Apache-2.0
"""The cluster that integration tests share."""

from collections.abc import Iterator

import pytest
from surroundings import fresh_ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Ray with two logical accelerators, started for these tests and stopped after them."""
    with fresh_ray(num_cpus=4, num_gpus=2):
        yield

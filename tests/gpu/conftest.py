# SPDX-License-Identifier: Apache-2.0
"""Tests that need an accelerator; without one they are skipped by name. Run them with ``make test-gpu``.

The functions under test are in the modules beside this one that are not tests; they also run on a CPU, in
tests/integration/test_weight_worker.py, test_model_engine_adapter.py, test_nccl_engine.py and
tests/e2e/test_gpu_modes.py. Figures go to one file: ``FIGURES``, or build/gpu-figures.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from surroundings import ray_folder

HERE = Path(__file__).parent
FIGURES = Path(os.environ.get("FIGURES", HERE.parents[1] / "build" / "gpu-figures.json"))

Note = Callable[..., None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def accelerators() -> int:
    """The number of accelerators; the test is skipped if there is none."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no accelerator")
    return torch.cuda.device_count()


@pytest.fixture
def two_accelerators(accelerators: int) -> int:
    if accelerators < 2:
        pytest.skip("trainer and rollout apart need two accelerators")
    return accelerators


@pytest.fixture
def three_accelerators(accelerators: int) -> int:
    if accelerators < 3:
        pytest.skip("two trainer ranks and a replica apart need three accelerators")
    return accelerators


@pytest.fixture(scope="session")
def figures(accelerators: int) -> Iterator[dict[str, Any]]:
    """Figures of the whole session, written at its end even after failures, with the hardware and versions."""
    import torch
    import vllm

    measured: dict[str, Any] = {}
    began = time.monotonic()
    yield measured
    machine = {
        "accelerator": torch.cuda.get_device_name(0),
        "accelerators": accelerators,
        "torch": torch.__version__,
        "vllm": vllm.__version__,
        "python": sys.version.split()[0],
        "seconds": round(time.monotonic() - began, 1),
    }
    FIGURES.parent.mkdir(parents=True, exist_ok=True)
    FIGURES.write_text(json.dumps({"machine": machine, "figures": measured}, indent=2) + "\n")


@pytest.fixture
def note(figures: dict[str, Any], request: pytest.FixtureRequest) -> Note:
    """Stores figures of a test under its name."""

    def keep(**found: Any) -> None:
        figures.setdefault(request.node.name, {}).update(found)

    return keep


@pytest.fixture
def ray_dir() -> Iterator[Path]:
    with ray_folder() as folder:
        yield folder

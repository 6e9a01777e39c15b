# SPDX-License-Identifier: Apache-2.0
"""Finds the accelerators of the main process's machine, and the Ray cluster that a run would join.

`inspect_machine` only looks at files; it neither imports torch nor starts a process. From its result,
`recipe.laptop.choice` chooses the platform of a run (CPU or accelerator). verl detects the kind of an accelerator by
itself, but has to be told to use the CPU. The environment variables for this must be set before torch, verl or a
rollout engine is imported.
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

ACCELERATOR_FILES = ("/dev/nvidia[0-9]*", "/dev/nvidiactl", "/dev/kfd", "/dev/davinci[0-9]*", "/dev/dxg")
ACCELERATOR_COMMANDS = ("nvidia-smi", "rocm-smi", "npu-smi")
LOCAL_RAY_ADDRESS = "local"

# A package that a rollout engine imports sets the level of the root logger to the value of this variable. Its default
# level would hide all warnings.
LOG_LEVEL = {"SAGEMAKER_CONTAINER_LOG_LEVEL": "WARNING"}


@dataclass(frozen=True)
class PlatformChoice:
    """The platform of a run: the CPU or an accelerator.

    Attributes:
        name: "cpu", the value of VERL_PLATFORM that the user has set, or None if verl detects the accelerator.
        environment: environment variables for the main process and, through Ray's ``runtime_env.env_vars``, for every
            worker. They never replace values that the user has set.
    """

    name: str | None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"


@dataclass(frozen=True)
class Machine:
    """The result of `inspect_machine`.

    Attributes:
        accelerator: path of a device file or program that indicates an accelerator, or None if there is no such file.
        cluster_address: address of a Ray cluster that was started on this machine, or None if there is none.
    """

    accelerator: str | None = None
    cluster_address: str | None = None


def cluster_to_join(environ: Mapping[str, str], machine: Machine, ray_address: str | None) -> str | None:
    """Return the setting or command that makes ray.init join a cluster, such as "RAY_ADDRESS=..."; else None.

    ray.init looks for an address in the configuration, then in the environment, then for a cluster on this machine.
    ``ray job submit`` sets RAY_ADDRESS for the command that it runs.
    """
    if ray_address:
        return None if ray_address == LOCAL_RAY_ADDRESS else f"ray_kwargs.ray_init.address={ray_address}"
    from_environment = environ.get("RAY_ADDRESS", "").strip()
    if from_environment:
        return None if from_environment == LOCAL_RAY_ADDRESS else f"RAY_ADDRESS={from_environment}"
    return f"`ray start` on this machine ({machine.cluster_address})" if machine.cluster_address else None


def inspect_machine(ray_temp_dir: str | None = None) -> Machine:
    """Look for accelerators, and for the file in which Ray saves the address of this machine's cluster."""
    return Machine(_find_accelerator(), _find_cluster(ray_temp_dir))


def _find_accelerator() -> str | None:
    files = (path for pattern in ACCELERATOR_FILES for path in sorted(glob.glob(pattern)))
    return next(chain(files, filter(None, map(shutil.which, ACCELERATOR_COMMANDS))), None)


def _find_cluster(ray_temp_dir: str | None) -> str | None:
    # Ray chooses its temporary folder in the same way (ray/_common/utils.py:327).
    temporary = next((os.environ[name] for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), "/tmp")
    folder = ray_temp_dir or os.path.join(temporary, "ray")
    note = Path(folder, "ray_current_cluster")
    return note.read_text().strip() or None if note.exists() else None

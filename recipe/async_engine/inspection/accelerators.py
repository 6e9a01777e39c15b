# SPDX-License-Identifier: Apache-2.0
"""How much memory the accelerators have: of this machine, as its driver's own program says, or by their type.

Nothing is imported or initialized for it that would take memory of an accelerator, or seconds.
"""

import logging
import shutil
import subprocess
from collections.abc import Iterable, Mapping

from recipe.async_engine.core.deadlines import DRIVER_S

logger = logging.getLogger(__name__)

MIB, GIB = 1 << 20, 1 << 30

QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
RAY_TYPE = "accelerator_type:"
# Of the types that Ray names (ray.util.accelerators); of those that exist with several sizes, the name has it or the
# smallest counts.
BY_TYPE: Mapping[str, int] = {
    "T4": 15,
    "L4": 22,
    "A10G": 22,
    "A10": 22,
    "V100": 16,
    "L40": 44,
    "L40S": 44,
    "A100": 40,
    "A100-40G": 40,
    "A100-80G": 80,
    "H20": 95,
    "H100": 80,
    "H200": 140,
    "B200": 179,
    "GH200": 95,
}


def memory_here() -> int | None:
    """Bytes of this machine's smallest one; None where the driver has no such program, or it gives no answer."""
    if shutil.which(QUERY[0]) is None:
        return None
    try:
        answer = subprocess.run(QUERY, capture_output=True, text=True, timeout=DRIVER_S, check=True).stdout
        sizes = [int(line) * MIB for line in answer.split()]
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        logger.warning("the accelerators' memory is not known, so it is not checked: %s", error)
        return None
    return min(sizes, default=None)


def memory_by_type(resources: Iterable[str]) -> int | None:
    """Memory of the smallest type of accelerator that a Ray cluster has; None where one of them is not known."""
    types = [name.removeprefix(RAY_TYPE) for name in resources if name.startswith(RAY_TYPE)]
    sizes = [BY_TYPE.get(name) for name in types]
    known = [size for size in sizes if size is not None]
    return min(known) * GIB if known and len(known) == len(sizes) else None

# SPDX-License-Identifier: Apache-2.0
"""Writes a lock file to standard output, from the environment that runs this script or from a report of pip.

    python tools/make_lock.py                                  # what is installed here: the CPU stack
    pip install --dry-run --report report.json ... && python tools/make_lock.py report.json    # accelerators

Contract: every distribution is pinned exactly, without a local build tag (`torch==2.13.0`, not `2.13.0+cpu`, so that an
index without such builds works too), except for those that are left out. No address of an index is written.
"""

import importlib.metadata
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

# Their published builds are for accelerators and fail at import beside a CPU build of torch; nothing here imports them.
BROKEN_WITHOUT_ACCELERATOR = {"torchvision", "torchaudio", "torchcodec"}
INSTALLERS = {"pip", "wheel", "verl-recipe-async"}

CPU_HEADER = """\
# Exact versions of the CPU stack and the development tools. Made by `make lock` from requirements/cpu.in.
# Install with `pip install --no-deps`: torchvision, torchaudio and torchcodec, which the stack depends on, are left
# out on purpose (their published builds do not load beside a CPU build of torch, and nothing here needs them).
"""
GPU_HEADER = """\
# Exact versions of the stack on NVIDIA accelerators: Python {python}, Linux, x86_64. Made by `make lock-gpu` from
# requirements/gpu.in. Nothing in it is compiled when it is installed; flash-attn comes later: see docs/dependencies.md.
"""


def normalized(name: str) -> str:
    """Return the name in the form that package indexes compare (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(found: Iterable[tuple[str, str]], left_out: set[str]) -> str:
    """Return a line `name==version` for each distribution, sorted by name."""
    versions = {normalized(name): version for name, version in found}
    kept = [(name, version) for name, version in sorted(versions.items()) if name not in left_out]
    return "".join(f"{name}=={version.partition('+')[0]}\n" for name, version in kept)


def of_this_environment() -> str:
    found = ((item.metadata["Name"], item.version) for item in importlib.metadata.distributions())
    return CPU_HEADER + pins(found, BROKEN_WITHOUT_ACCELERATOR | INSTALLERS)


def of_report(path: Path) -> str:
    """Return the lock file for what pip would install, from the report of a dry run."""
    report = json.loads(path.read_text())
    found = [(item["metadata"]["name"], item["metadata"]["version"]) for item in report["install"]]
    return GPU_HEADER.format(python=report["environment"]["python_version"]) + pins(found, INSTALLERS)


if __name__ == "__main__":
    sys.stdout.write(of_report(Path(sys.argv[1])) if sys.argv[1:] else of_this_environment())

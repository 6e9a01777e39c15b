# SPDX-License-Identifier: Apache-2.0
"""Writes a lock file of the environment that runs this script to standard output.

Contract: every installed distribution is pinned exactly, without a local build tag (`torch==2.13.0`, not
`2.13.0+cpu`, so that an index without such builds serves too), except the ones in `LEFT_OUT`.
"""

import importlib.metadata
import re
import sys

# Published as accelerator builds that fail at import beside a CPU build of torch; nothing here imports them.
BROKEN_WITHOUT_ACCELERATOR = {"torchvision", "torchaudio", "torchcodec"}
INSTALLERS = {"pip", "wheel", "verl-recipe-async"}
LEFT_OUT = BROKEN_WITHOUT_ACCELERATOR | INSTALLERS

HEADER = """\
# Exact versions of the CPU stack and the development tools. Made by `make lock` from requirements/cpu.in.
# Install with `pip install --no-deps`: torchvision, torchaudio and torchcodec, which the stack depends on, are left
# out on purpose (their published builds do not load beside a CPU build of torch, and nothing here needs them).
"""


def normalized(name: str) -> str:
    """The name as package indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> list[str]:
    """One `name==version` for each distribution of this environment, sorted by name."""
    versions = {normalized(item.metadata["Name"]): item.version for item in importlib.metadata.distributions()}
    return [
        f"{name}=={version.partition('+')[0]}" for name, version in sorted(versions.items()) if name not in LEFT_OUT
    ]


if __name__ == "__main__":
    sys.stdout.write(HEADER + "\n".join(pins()) + "\n")

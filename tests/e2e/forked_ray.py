# SPDX-License-Identifier: Apache-2.0
"""Runs ``ray`` in a fork: ``FORKS -m forked_ray FORKS FILE ARGUMENTS...``; Ray's own services are forks too.

It writes the fork's process id to FILE, because the caller's child is only the launcher (`recipe.laptop.prefork`).
"""

import os
import sys
from pathlib import Path

from ray.scripts.scripts import main

if __name__ == "__main__":
    _, sys.executable, file, *arguments = sys.argv
    Path(file).write_text(str(os.getpid()))
    sys.argv = ["ray", *arguments]
    main()

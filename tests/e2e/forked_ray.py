# SPDX-License-Identifier: Apache-2.0
"""``ray`` in a fork: ``FORKS -m forked_ray FORKS FILE ARGUMENTS...``; Ray's own services are forks too.

Writes the fork's process id to FILE: whoever starts it has a stand-in for its child (`recipe.laptop.prefork`).
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

# SPDX-License-Identifier: Apache-2.0
"""Comes before every test module: takes the platform that a main would take here, and makes helpers importable.

The platform comes first because verl reads it once, when it is imported, whichever module imports it. Test modules are
imported by path, not through `sys.path`, so the folders of their helpers are added to it.
"""

import os
import sys
from pathlib import Path

from recipe.async_engine.platform.detect import choose_platform, inspect_machine

sys.path[:0] = [str(Path(__file__).parent / room) for room in ("core", "integration", "e2e")]
os.environ.update(choose_platform(os.environ, inspect_machine()).environment)

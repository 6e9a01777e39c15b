# SPDX-License-Identifier: Apache-2.0
"""Makes the schedule simulator importable: test modules are imported by path, not through `sys.path`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

# SPDX-License-Identifier: Apache-2.0
"""SGLang as a rollout engine.

This module imports verl before SGLang is imported, because verl loads this package's plugin, without which SGLang does
not run on a CPU.
"""

import verl  # noqa: F401

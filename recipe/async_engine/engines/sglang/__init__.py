# SPDX-License-Identifier: Apache-2.0
"""SGLang as a rollout engine.

verl is imported before SGLang, because it loads this package's plugin, which makes a CPU ready for SGLang.
"""

import verl  # noqa: F401

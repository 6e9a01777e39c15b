# SPDX-License-Identifier: Apache-2.0
"""``python -m recipe.agents.try``. The word ``try`` cannot be imported, so the code is in `recipe.agents.trial`."""

import sys

from recipe.agents.trial import main

if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""What this package's mains bring to a run beside the engine."""

from recipe.async_engine.run.driver import Parts
from recipe.laptop import local
from recipe.mains.judges import JUDGES
from recipe.report.account import settled

PARTS = Parts(laptop=local, judges=JUDGES, account=settled)

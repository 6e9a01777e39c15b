# SPDX-License-Identifier: Apache-2.0
"""What verl's trainers and agent loops share of the log-prob servers beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OLD_LOG_PROBS = "old_log_probs"
ENTROPY = "entropy"


@dataclass(frozen=True)
class LogProbServices:
    """The log-prob servers of a run, for its agent loops.

    Attributes:
        servers: actor handles by name.
        timeout_s: longest wait for one answer's scores.
    """

    servers: Mapping[str, Any]
    timeout_s: float

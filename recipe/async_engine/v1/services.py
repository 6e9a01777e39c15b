# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
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

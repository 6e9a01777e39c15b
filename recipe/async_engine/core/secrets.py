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
"""A configuration as it may be written down: without the values that are secrets.

Contract: values of environment variables never appear, whatever their names; of other settings those whose name says
that they are a secret, and what stands before the host of a URL. Everything else is as it was. Applied to whatever
leaves a run's processes: ``config.yaml`` in its folder, and the configuration that trackers get.
Test: tests/core/test_secrets.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"
ENVIRONMENT = "env_vars"
SECRET = re.compile(r"(^|[_-])(api_?key|(access|private|secret)_?key|secret|password|passwd|credentials?|token)$", re.I)
USER_OF_URL = re.compile(r"(?<=://)[^/\s@]+@")


def without_secrets(settings: Any, name: str = "") -> Any:
    """``settings``, a plain value found under ``name``, with `HIDDEN` in the place of each secret."""
    if isinstance(settings, Mapping):
        if name == ENVIRONMENT:
            return dict.fromkeys(settings, HIDDEN)
        return {key: without_secrets(value, str(key)) for key, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [without_secrets(value, name) for value in settings]
    if not isinstance(settings, str):
        return settings
    return HIDDEN if settings and SECRET.search(name) else USER_OF_URL.sub(f"{HIDDEN}@", settings)

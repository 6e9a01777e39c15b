# SPDX-License-Identifier: Apache-2.0
"""Hides the secrets of a configuration that is to be written down.

Contract: hidden are the values of all environment variables, the values of settings whose names say that they are
secrets, and what stands before the host of a URL. Everything else is unchanged. It is applied to whatever leaves a
run's processes: ``config.yaml`` in its folder, and the configuration that trackers get. Shown by
tests/config/test_secrets.py.
"""

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"
ENVIRONMENT = "env_vars"
SECRET = re.compile(r"(^|[_-])(api_?key|(access|private|secret)_?key|secret|password|passwd|credentials?|token)$", re.I)
USER_OF_URL = re.compile(r"(?<=://)[^/\s@]+@")


def without_secrets(settings: Any, name: str = "") -> Any:
    """Return ``settings``, a plain value found under ``name``, with `HIDDEN` in place of each secret."""
    if isinstance(settings, Mapping):
        if name == ENVIRONMENT:
            return dict.fromkeys(settings, HIDDEN)
        return {key: without_secrets(value, str(key)) for key, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [without_secrets(value, name) for value in settings]
    if not isinstance(settings, str):
        return settings
    return HIDDEN if settings and SECRET.search(name) else USER_OF_URL.sub(f"{HIDDEN}@", settings)

# SPDX-License-Identifier: Apache-2.0
"""Replaces the secrets in a configuration before the configuration is written to a file or sent to a tracker.

Contract: `HIDDEN` replaces the values of all environment variables, the values of settings with names such as `api_key`
or `password`, and the user and password in URLs; everything else is unchanged. ``config.yaml`` in the run's folder and
the configuration that trackers get have their secrets replaced. Shown by tests/config/test_secrets.py.
"""

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"
ENVIRONMENT = "env_vars"
SECRET = re.compile(r"(^|[_-])(api_?key|(access|private|secret)_?key|secret|password|passwd|credentials?|token)$", re.I)
USER_OF_URL = re.compile(r"(?<=://)[^/\s@]+@")


def without_secrets(settings: Any, name: str = "") -> Any:
    """Return a copy of ``settings`` with each secret replaced by `HIDDEN`.

    ``name`` is the name of the setting or section that has the value ``settings``.
    """
    if isinstance(settings, Mapping):
        if name == ENVIRONMENT:
            return dict.fromkeys(settings, HIDDEN)
        return {key: without_secrets(value, str(key)) for key, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [without_secrets(value, name) for value in settings]
    if not isinstance(settings, str):
        return settings
    return HIDDEN if settings and SECRET.search(name) else USER_OF_URL.sub(f"{HIDDEN}@", settings)

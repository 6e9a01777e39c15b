# SPDX-License-Identifier: Apache-2.0
"""The releases of verl and Ray for which workarounds of upstream code were written.

A workaround refuses to run with any other release, because a patch of different code fails in ways that are hard to
trace.
"""

from __future__ import annotations

from packaging.specifiers import SpecifierSet

from recipe.async_engine.core.errors import WrongInstallation

VERL_SUPPORTED = "==0.9.1"
RAY_SUPPORTED = "==2.60.*"


def is_supported(found: str, supported: str) -> bool:
    """Return whether the release ``found`` meets the specifier ``supported``."""
    return SpecifierSet(supported).contains(found, prereleases=True)


def require_version(package: str, found: str, supported: str, needed_for: str) -> None:
    """Raise `WrongInstallation` if ``found`` does not meet ``supported``; ``needed_for`` names the feature."""
    if not is_supported(found, supported):
        allowed = supported.removeprefix("==")
        raise WrongInstallation(
            f"{needed_for} is written for {package} {allowed}, but {package} {found} is installed. Install a supported "
            f"release of {package}, or run on an accelerator with VERL_PLATFORM unset."
        )

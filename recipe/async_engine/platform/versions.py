# SPDX-License-Identifier: Apache-2.0
"""Guards of the few places where upstream code is worked around.

Every workaround names the release it was written against. With any other release it is refused, since a patch that
meets code it was not written for fails in ways that are hard to trace.
"""

from __future__ import annotations

from recipe.async_engine.core.errors import RecipeError

VERL_SUPPORTED = ("0.9.1",)
VLLM_SUPPORTED = ("0.28.",)
RAY_SUPPORTED = ("2.60.",)


class UnsupportedVersionError(RecipeError):
    """A workaround meets a release of verl or vLLM that it was not written for."""


def is_supported(found: str, supported: tuple[str, ...]) -> bool:
    """Whether a release is one of ``supported``: exact versions, or prefixes that end with a dot ("0.28.")."""
    public = found.partition("+")[0]
    return any(
        public == version or (version.endswith(".") and (public + ".").startswith(version)) for version in supported
    )


def require_version(package: str, found: str, supported: tuple[str, ...], needed_for: str) -> None:
    """Refuse a release that is none of ``supported``.

    Args:
        package: name for the message.
        found: the installed version.
        supported: as :func:`is_supported` takes it.
        needed_for: what cannot be done with another release.

    Raises:
        UnsupportedVersionError: naming the version found and those allowed.
    """
    if is_supported(found, supported):
        return
    allowed = ", ".join(f"{version}*" if version.endswith(".") else version for version in supported)
    raise UnsupportedVersionError(
        f"{needed_for} is written for {package} {allowed}, but {package} {found} is installed. Install a supported "
        f"release of {package}, or run on an accelerator with VERL_PLATFORM unset."
    )

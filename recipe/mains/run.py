# SPDX-License-Identifier: Apache-2.0
"""The main of every mode: composes a run of the engine and of what this package has beside it."""

from omegaconf import DictConfig

from recipe.async_engine.run import driver
from recipe.async_engine.run.driver import Parts
from recipe.laptop import local
from recipe.mains.plan_only import JUDGES
from recipe.report.account import settled

PARTS = Parts(laptop=local, judges=JUDGES, account=settled)


def main(config: DictConfig, mode: str, trainer_class: str | None = None) -> None:
    """Run ``config``, as described at `recipe.async_engine.run.driver.main`."""
    driver.main(config, mode, PARTS, trainer_class)

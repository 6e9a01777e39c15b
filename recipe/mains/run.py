# SPDX-License-Identifier: Apache-2.0
"""The main function of every mode.

It passes `recipe.async_engine.run` the parts that come from other packages: support for laptops, additional checks of
the configuration, and the computation of the time account.
"""

from omegaconf import DictConfig

from recipe.async_engine.run import driver
from recipe.async_engine.run.driver import Parts
from recipe.laptop import local
from recipe.mains.plan_only import JUDGES
from recipe.report.account import settled

PARTS = Parts(laptop=local, judges=JUDGES, account=settled)


def main(config: DictConfig, mode: str, trainer_class: str | None = None) -> None:
    driver.main(config, mode, PARTS, trainer_class)

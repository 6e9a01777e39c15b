# SPDX-License-Identifier: Apache-2.0
"""What the main of every mode does: it composes a run of the engine and of what else this package has."""

from omegaconf import DictConfig

from recipe.async_engine.run import driver
from recipe.mains.parts import PARTS


def main(config: DictConfig, mode: str, trainer_class: str | None = None) -> None:
    """Run ``config``; see `recipe.async_engine.run.driver.main`."""
    driver.main(config, mode, PARTS, trainer_class)

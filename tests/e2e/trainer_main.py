# SPDX-License-Identifier: Apache-2.0
"""Runs the main of the mode in the environment variable ``MODE``, with the trainer in ``TRAINER``."""

import os

import hydra
from omegaconf import DictConfig

MODE = os.environ["MODE"]


@hydra.main(config_path=f"pkg://recipe.{MODE}.config", config_name=f"{MODE}_ppo_trainer", version_base=None)
def main(config: DictConfig) -> None:
    from recipe.mains import run

    run.main(config, mode=MODE, trainer_class=os.environ["TRAINER"])


if __name__ == "__main__":
    main()

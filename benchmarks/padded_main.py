# SPDX-License-Identifier: Apache-2.0
"""The one-step-off main with the stages of `padded`."""

import hydra
from omegaconf import DictConfig


@hydra.main(config_path="pkg://recipe.one_step_off.config", config_name="one_step_off_ppo_trainer", version_base=None)
def main(config: DictConfig) -> None:
    from recipe.async_engine.run import driver

    driver.main(config, mode="one_step_off", trainer_class="padded.PaddedTrainer")


if __name__ == "__main__":
    main()

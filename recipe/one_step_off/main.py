# SPDX-License-Identifier: Apache-2.0
"""``python -m recipe.one_step_off.main`` runs one-step-off RL on separate trainer and rollout resources.

Its configuration is that of stock verl's one-step-off main. ``preset=tiny_cpu`` has all settings for a run on a laptop.
"""

import hydra
from omegaconf import DictConfig


@hydra.main(config_path="config", config_name="one_step_off_ppo_trainer", version_base=None)
def main(config: DictConfig) -> None:
    from recipe.mains import run

    run.main(config, "one_step_off")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""``python -m recipe.partial_rollout.main`` runs RL with training and generation in turns on the same accelerators.

It takes the same configuration as stock verl's synchronous main. ``preset=tiny_cpu`` has all settings that a run
on a laptop needs.
"""

import hydra
from omegaconf import DictConfig


@hydra.main(config_path="config", config_name="partial_rollout_ppo_trainer", version_base=None)
def main(config: DictConfig) -> None:
    from recipe.mains import run

    run.main(config, "partial_rollout")


if __name__ == "__main__":
    main()

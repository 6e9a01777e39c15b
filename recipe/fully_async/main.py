# SPDX-License-Identifier: Apache-2.0
"""``python -m recipe.fully_async.main`` runs fully-asynchronous RL on separate trainer and rollout resources.

Its configuration is that of stock verl's fully-async main. ``preset=tiny_cpu`` has all settings for a run on a laptop.
"""

import hydra
from omegaconf import DictConfig


@hydra.main(config_path="config", config_name="fully_async_ppo_trainer", version_base=None)
def main(config: DictConfig) -> None:
    from recipe.mains import run

    run.main(config, "fully_async")


if __name__ == "__main__":
    main()

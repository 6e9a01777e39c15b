# SPDX-License-Identifier: Apache-2.0
"""The fully-asynchronous main with the lengthened stages of `padded`."""

import hydra
from omegaconf import DictConfig


@hydra.main(config_path="pkg://recipe.fully_async.config", config_name="fully_async_ppo_trainer", version_base=None)
def main(config: DictConfig) -> None:
    from recipe.mains import run

    run.main(config, mode="fully_async", trainer_class="padded.PaddedFullyAsync")


if __name__ == "__main__":
    main()

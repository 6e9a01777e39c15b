# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The main of the mode that the environment variable ``MODE`` names, with the trainer that ``TRAINER`` names."""

import os

import hydra
from omegaconf import DictConfig

MODE = os.environ["MODE"]


@hydra.main(config_path=f"pkg://recipe.{MODE}.config", config_name=f"{MODE}_ppo_trainer", version_base=None)
def main(config: DictConfig) -> None:
    from recipe.async_engine.run import driver

    driver.main(config, mode=MODE, trainer_class=os.environ["TRAINER"])


if __name__ == "__main__":
    main()

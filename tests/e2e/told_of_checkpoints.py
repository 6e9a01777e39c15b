# SPDX-License-Identifier: Apache-2.0
"""A user's checkpoint callback that records its calls."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from verl.trainer.ppo.checkpoint_callback import CheckpointCallback


class Told(CheckpointCallback):
    """Appends a line to a file: step, folder, ``async_save``, and whether the checkpoint is complete."""

    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **_: Any) -> None:
        assert self.config.trainer.save_freq > 0 and trainer.global_steps >= global_step
        complete = Path(checkpoint_dir, "committed.json").exists()
        with open(os.environ["TOLD_OF_CHECKPOINTS"], "a") as file:
            file.write(json.dumps([global_step, checkpoint_dir, async_save, complete]) + "\n")

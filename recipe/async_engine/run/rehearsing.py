# SPDX-License-Identifier: Apache-2.0
"""``rehearse_only=true``: a run's processes start, rehearse (`recipe.async_engine.trainer.rehearsal`) and end."""

from __future__ import annotations

import os

from omegaconf import DictConfig, open_dict

FOLDER = "rehearsal"


def only_rehearse(config: DictConfig) -> None:
    """Where that is asked for, make a run of ``config`` that rehearses alone, in a folder of its own.

    It reads and writes no checkpoint, validates nothing and tells no tracker.
    """
    if not config.get("rehearse_only"):
        return
    with open_dict(config):
        config.async_training.rehearsal = True
        trainer = config.trainer
        trainer.default_local_dir = os.path.join(trainer.default_local_dir, FOLDER)
        trainer.resume_mode, trainer.save_freq, trainer.logger = "disable", -1, []
        trainer.val_only = trainer.val_before_train = False

# SPDX-License-Identifier: Apache-2.0
"""The rules of validation on checkpoints; `recipe.async_engine.core.validation` applies them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from recipe.async_engine.core.case import Case
from recipe.async_engine.core.problems import Problem

RESUME_MODES = ("auto", "disable", "resume_path")


def saving(case: Case) -> Iterator[Problem]:
    """What a checkpoint that commits model and ledger together cannot be made with, or a run not resumed from."""
    for section in case.trained:
        if case.get(f"{section}.checkpoint.async_save"):
            advice = "A checkpoint is committed when all of it is written; remove the setting."
            yield case.problem(f"{section}.checkpoint.async_save", "false", advice)
    mode = case.get("trainer.resume_mode", "auto")
    if mode not in RESUME_MODES:
        advice = "auto resumes from the newest complete checkpoint in trainer.default_local_dir."
        yield case.problem("trainer.resume_mode", f"one of {', '.join(RESUME_MODES)}", advice)
    path = case.get("trainer.resume_from_path")
    if mode == "resume_path" and not re.search(r"global_step_\d+$", str(path)):
        advice = "Name the checkpoint's folder, global_step_N."
        yield case.problem("trainer.resume_from_path", "a folder of a checkpoint with resume_mode=resume_path", advice)
    if mode != "disable" and case.get("trainer.default_hdfs_dir") is not None:
        advice = "verl cannot load from there. Set it to null, or trainer.resume_mode=disable."
        yield case.problem("trainer.default_hdfs_dir", "null where a run may resume", advice)

# SPDX-License-Identifier: Apache-2.0
"""Handles NaN and infinite numbers in a training batch, and missing scores in a validation.

Contract: if a log-prob, value or advantage of an answer is NaN or infinite at a trained token, the whole answer is
removed from the step's loss, logged and counted. Its log-probs, values and advantages are set to 0, because NaN times a
mask of 0 is NaN. If no answer is left, the run ends. An answer of a validation has no score if its reward is not a
finite number or its trajectory failed; the validation's means leave out each prompt that has such an answer. Other
modules check rewards and the rollout's log-probs (`recipe.async_engine.rollout.loop_output`) and gradients
(`alarm_stage`). Shown by tests/integration/test_finite_stage.py and tests/e2e/test_non_finite.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from verl import DataProto

from recipe.async_engine.rollout.loop_output import is_number
from recipe.async_engine.trainer.stages import TrainingFailed

logger = logging.getLogger(__name__)

COMPUTED = ("old_log_probs", "ref_log_prob", "values")
DERIVED = ("advantages", "returns", "rollout_is_weights")
LEFT_OUT = "fully_async/non_finite/answers_left_out"


def leave_out(batch: DataProto, names: Sequence[str]) -> int:
    """Leave answers that have NaN or an infinity at a trained token out of the loss, and return their number.

    The batch is changed in place.

    Args:
        batch: a batch with ``response_mask``, (rows, R), which is 1 for trained tokens.
        names: the columns (rows, R) to check. Columns that the batch does not have are skipped.

    Raises:
        TrainingFailed: no answer is left.
    """
    mask = batch.batch["response_mask"].bool()
    columns = {name: batch.batch[name] for name in names if name in batch.batch}
    at_fault = {name: (~torch.isfinite(column) & mask).any(dim=1) for name, column in columns.items()}
    rows = torch.stack([torch.zeros(len(batch), dtype=torch.bool), *at_fault.values()]).any(dim=0)
    for name, column in columns.items():
        batch.batch[name] = column.masked_fill(rows[:, None] | ~torch.isfinite(column), 0.0)
    if not rows.any():
        return 0
    named = ", ".join(name for name, found in at_fault.items() if found.any())
    if not (mask.any(dim=1) & ~rows).any():
        raise TrainingFailed(
            f"each answer of the batch has NaN or an infinity in its {named}: an update may have made weights NaN or "
            "infinite; resume from an earlier checkpoint with a lower learning rate"
        )
    batch.batch["response_mask"] = batch.batch["response_mask"] * ~rows[:, None]
    uids = [str(batch.non_tensor_batch["uid"][row]) for row in rows.nonzero()[:, 0].tolist()]
    logger.warning("answers to prompts %s are not trained: NaN or an infinity in their %s", ", ".join(uids), named)
    return len(uids)


def with_scores(
    data_sources: Sequence[str], uids: list[Any], infos: dict[str, list[Any]], turns: list[Any]
) -> tuple[Sequence[str], list[Any], dict[str, list[Any]], list[Any], int]:
    """Drop the prompts of a validation that have an answer without a score.

    A prompt is dropped with all its answers, because verl's means need the same number of answers to each prompt.

    Args:
        data_sources: the data source of each answer.
        uids: the uid of each answer's prompt.
        infos: the values that rewards reported for each answer, by name.
        turns: arrays, one for each batch of the validation, with the number of turns of each answer.

    Returns:
        The four arguments without the dropped answers (``infos`` in a form of which verl can take means), and the
        number of answers that have no score.
    """
    # verl's main score of a validation is "acc" if there is one, else "reward". An answer is treated as having no score
    # if either value is not a finite number. None is allowed, because it means that the answer's reward does not report
    # the value.
    scored = [infos[name] for name in ("reward", "acc") if name in infos]
    none = [not all(value is None or is_number(value) for value in row) for row in zip(*scored, strict=True)]
    without = {uid for uid, is_none in zip(uids, none, strict=True) if is_none}
    if without:
        counts = sum(none), len(none), len(without)
        logger.warning("%d of %d answers of the validation have no score; the means are without %d prompts", *counts)
        kept = [row for row, uid in enumerate(uids) if uid not in without]
        data_sources, uids = [data_sources[row] for row in kept], [uids[row] for row in kept]
        infos = {name: [values[row] for row in kept] for name, values in infos.items()}
        turns = [np.concatenate(turns)[kept]] if turns and kept else []
    return data_sources, uids, {name: _averaged(values) for name, values in infos.items()}, turns, sum(none)


def _averaged(values: list[Any]) -> list[Any]:
    """Return ``values`` in a form that verl's means accept.

    Without strings among the values, numbers are kept, and anything else becomes None. If any value is a string, all
    values except None become strings, which verl's means skip.
    """
    if any(isinstance(value, str) for value in values):
        return [None if value is None else str(value) for value in values]
    return [value if isinstance(value, float) or is_number(value) else None for value in values]

# SPDX-License-Identifier: Apache-2.0
"""Reports the state of batches, updates and validations to the run's alarms (`recipe.async_engine.core.alarms`).

Shown by tests/integration/test_alarm_stage.py.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from verl import DataProto

from recipe.async_engine.config.plan import RunPlan
from recipe.async_engine.core.alarms import Alarms
from recipe.async_engine.core.columns import OUTPUT_KEYS
from recipe.async_engine.core.groups import LedgerCounts
from recipe.async_engine.trainer.batch import last_outputs
from recipe.async_engine.trainer.stages import TrainingFailed

logger = logging.getLogger(__name__)

EMPTY_SHARE, SHORT = 0.5, 16
"""The condition of the alarm `empty_answers` is that at least the share `EMPTY_SHARE` of a batch's answers is empty. An
answer with more than `SHORT` sampled tokens never counts as empty.
"""
WINDOW_BATCHES = 4
WITHOUT_SCORE = "val-aux/num_failed"
"""Name of the metric for the number of answers in a validation that have no score."""


def new_alarms(plan: RunPlan, counts: Mapping[str, int] | None = None) -> Alarms:
    """Return the alarms of a run. If the run resumes, ``counts`` are the alarms' counts in its checkpoint."""
    limits = asdict(plan.settings.async_training.alarms)
    return Alarms(limits, WINDOW_BATCHES * plan.batch_groups, logger.warning, counts)


def note_update(model: str, output: DataProto, alarms: Alarms) -> dict[str, int]:
    """Report the gradient norms of a step's updates of ``model`` to the alarms; return how many updates were skipped.

    verl's FSDP engine skips an update whose gradient norm is NaN or infinite, and continues.
    """
    norms = np.atleast_1d(output.meta_info["metrics"].get(f"{model}/grad_norm", ()))
    of_model = "" if model == "actor" else f"{model}_"
    for norm in norms:
        alarms.note(f"{of_model}skipped_updates", not np.isfinite(norm))
    if norms.size:
        alarms.note(f"{of_model}zero_gradients", not norms.any())
    return {f"{model}/skipped_updates": int((~np.isfinite(norms)).sum())}


def note_answers(batch: DataProto, special: Collection[int], alarms: Alarms) -> dict[str, int]:
    """Report the empty answers of a batch to the alarms, and return their number as a metric.

    Args:
        batch: a batch with ``responses`` and ``response_mask``, which is 1 for sampled tokens, both (rows, R).
        special: the special tokens. An answer is empty if all its sampled tokens are special.
    """
    sampled = batch.batch["response_mask"].bool()
    # A batch may have millions of tokens, so only short answers are checked.
    short = sampled.sum(dim=1) <= SHORT
    text = ~torch.isin(batch.batch["responses"][short], torch.tensor(sorted(special), dtype=torch.long))
    empty = int((~(text & sampled[short]).any(dim=1)).sum())
    alarms.note("empty_answers", empty >= EMPTY_SHARE * len(batch))
    return {"fully_async/empty_answers": empty}


def note_rewards(batch: DataProto, alarms: Alarms) -> None:
    """Report to the alarms whether a batch's rewards are uniform.

    Rewards are uniform if, for every prompt, all its answers have the same reward. If every prompt has only one answer,
    they are uniform if all answers of the batch have the same reward. The batch has ``token_level_scores``, (rows, R),
    and the ``uid`` of each row's prompt. If a trajectory has several outputs, only the last one counts.
    """
    by_prompt: defaultdict[str, list[float]] = defaultdict(list)
    scores = batch.batch["token_level_scores"].sum(dim=-1).numpy()
    uids = batch.non_tensor_batch["uid"]
    if (keys := batch.non_tensor_batch.get(OUTPUT_KEYS)) is not None:
        rows, _ = last_outputs(keys)
        scores, uids = scores[rows], uids[rows]
    scores = scores.tolist()
    for uid, score in zip(uids, scores, strict=True):
        by_prompt[uid].append(score)
    compared = [row for row in by_prompt.values() if len(row) > 1] or [scores]
    alarms.note("uniform_rewards", len(scores) > 1 and all(len(set(row)) == 1 for row in compared))


def note_validation(metrics: Mapping[str, Any], alarms: Alarms) -> None:
    """Report to the alarms whether a validation has answers without a score."""
    alarms.note("failed_validation", metrics.get(WITHOUT_SCORE, 0) > 0)


def nothing_trained(plan: RunPlan, counts: LedgerCounts) -> TrainingFailed:
    """Return the error for a run that ended without a step, because its data gave no batch."""
    return TrainingFailed(
        f"no batch of {plan.batch_groups} prompt groups could be formed, so nothing was trained: of {counts.issued} "
        f"groups that were issued {counts.failed} failed and {counts.filtered} were filtered. Look at their errors "
        "above, at the number of prompts, and at algorithm.filter_groups"
    )

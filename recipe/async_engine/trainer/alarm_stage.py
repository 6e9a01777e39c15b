# SPDX-License-Identifier: Apache-2.0
"""Tells the run's alarms (`recipe.async_engine.core.alarms`) about batches and updates.

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
from recipe.async_engine.core.groups import LedgerCounts
from recipe.async_engine.trainer.stages import TrainingFailed

logger = logging.getLogger(__name__)

EMPTY_SHARE, SHORT = 0.5, 16
"""An answer with more than `SHORT` tokens never counts as empty. The alarm is about batches with this share of empty
answers.
"""
WINDOW_BATCHES = 4
WITHOUT_SCORE = "val-aux/num_failed"
"""The number of a validation's answers without a score, whose prompts are left out of the means."""


def new_alarms(plan: RunPlan, counts: Mapping[str, int] | None = None) -> Alarms:
    """Return the alarms of a run. ``counts`` are those of the checkpoint that it resumes from."""
    limits = asdict(plan.settings.async_training.alarms)
    return Alarms(limits, WINDOW_BATCHES * plan.batch_groups, logger.warning, counts)


def note_update(model: str, output: DataProto, alarms: Alarms) -> dict[str, int]:
    """Tell the alarms about a step's updates of ``model``, by the norms of its gradients, and return a metric.

    verl's FSDP engine skips an update whose gradient has no finite norm, and goes on.
    """
    norms = np.atleast_1d(output.meta_info["metrics"].get(f"{model}/grad_norm", ()))
    of_model = "" if model == "actor" else f"{model}_"
    for norm in norms:
        alarms.note(f"{of_model}skipped_updates", not np.isfinite(norm))
    if norms.size:
        alarms.note(f"{of_model}zero_gradients", not norms.any())
    return {f"{model}/skipped_updates": int((~np.isfinite(norms)).sum())}


def note_answers(batch: DataProto, special: Collection[int], alarms: Alarms) -> dict[str, int]:
    """Tell the alarms about a batch before it is trained, and return a metric.

    Args:
        batch: with ``responses`` and ``response_mask``, 1 for sampled tokens, (rows, R).
        special: the special tokens. An answer that has no other tokens is empty.
        alarms: the alarms of the run.
    """
    sampled = batch.batch["response_mask"].bool()
    # A batch may have millions of tokens, so only short answers are checked.
    short = sampled.sum(dim=1) <= SHORT
    text = ~torch.isin(batch.batch["responses"][short], torch.tensor(sorted(special), dtype=torch.long))
    empty = int((~(text & sampled[short]).any(dim=1)).sum())
    alarms.note("empty_answers", empty >= EMPTY_SHARE * len(batch))
    return {"fully_async/empty_answers": empty}


def note_rewards(batch: DataProto, alarms: Alarms) -> None:
    """Tell the alarms about a batch with its ``token_level_scores``, (rows, R), and the ``uid`` of each row's prompt.

    Rewards are uniform if they are equal for each prompt, or over the whole batch if each prompt has only one answer.
    """
    by_prompt: defaultdict[str, list[float]] = defaultdict(list)
    scores = batch.batch["token_level_scores"].sum(dim=-1).tolist()
    for uid, score in zip(batch.non_tensor_batch["uid"], scores, strict=True):
        by_prompt[uid].append(score)
    compared = [row for row in by_prompt.values() if len(row) > 1] or [scores]
    alarms.note("uniform_rewards", len(scores) > 1 and all(len(set(row)) == 1 for row in compared))


def note_validation(metrics: Mapping[str, Any], alarms: Alarms) -> None:
    """Tell the alarms about the metrics of a validation."""
    alarms.note("failed_validation", metrics.get(WITHOUT_SCORE, 0) > 0)


def nothing_trained(plan: RunPlan, counts: LedgerCounts) -> TrainingFailed:
    """Return the error for a run whose data ended without a step."""
    return TrainingFailed(
        f"no batch of {plan.batch_groups} prompt groups could be formed, so nothing was trained: of {counts.issued} "
        f"groups that were issued {counts.failed} failed and {counts.filtered} were filtered. Look at their errors "
        "above, at the number of prompts, and at algorithm.filter_groups"
    )

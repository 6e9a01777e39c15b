# SPDX-License-Identifier: Apache-2.0
"""The four sources of proximal log-probs, behind one interface.

Contract: after a `LogProbSource` a batch has ``old_log_probs``, whatever happened to servers: rows that they did
not score are computed by the trainer, with a warning and a metric, and the next batch is theirs again. Shown by
tests/integration/test_log_prob_columns.py and tests/e2e/test_model_engine.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import ray
import torch
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, RayError
from verl import DataProto

from recipe.async_engine.config.log_prob_servers import LogProbServers, Proximal
from recipe.async_engine.core.columns import SCORED_BY, SCORES, TOKEN_VERSIONS
from recipe.async_engine.log_prob_servers.part_scores import ResponseScores
from recipe.async_engine.trainer.log_probs.columns import server_columns
from recipe.async_engine.trainer.log_probs.loglinear import shares
from recipe.async_engine.trainer.log_probs.mismatch import mismatch_metrics

logger = logging.getLogger(__name__)

Recompute = Callable[[DataProto], tuple[torch.Tensor, torch.Tensor]]
"""By the trainer: log-probs and entropies, float32 (rows, R) each, of a batch by the newest published version."""


LogProbSource = Callable[[DataProto, int], dict[str, float]]
"""Gives a batch, trained at a version, the column ``old_log_probs``, and ``entropys`` if they were computed; returns
metrics."""


def source(which: Proximal, recompute: Recompute, servers: LogProbServers) -> LogProbSource:
    """The source of this name."""
    if which is Proximal.BYPASS:
        return bypass
    if which is Proximal.LOGLINEAR:
        return loglinear
    return partial(by_servers, recompute, servers) if which is Proximal.SERVER else partial(by_trainer, recompute)


def bypass(batch: DataProto, version: int) -> dict[str, float]:
    """Those of the policy that sampled. The loss reports the mismatch, by the current policy."""
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
    return {}


def loglinear(batch: DataProto, version: int) -> dict[str, float]:
    """Interpolated in the loss, see :mod:`recipe.async_engine.trainer.log_probs.loglinear`."""
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
    batch.batch["rollout_is_weights"] = shares(batch.batch[TOKEN_VERSIONS], version)
    return {}


def by_trainer(recompute: Recompute, batch: DataProto, version: int) -> dict[str, float]:
    """Those of the newest published version, by a forward pass of the trainer."""
    return _taken(batch, *recompute(batch))


def by_servers(recompute: Recompute, servers: LogProbServers, batch: DataProto, version: int) -> dict[str, float]:
    """Those that log-prob servers computed while the samples were generated, or waited; also the column `SCORED_BY`."""
    rows = _resolved(batch.non_tensor_batch.pop(SCORES, [None] * len(batch)), servers.timeout)
    sampled_by = batch.batch[TOKEN_VERSIONS]
    columns = server_columns(rows, sampled_by, servers, version)
    log_probs, entropy, scored_by, missing = columns.log_probs, columns.entropy, columns.versions, columns.missing
    if missing.any():
        logger.warning(
            "log-prob servers scored %d of %d trajectories (%d by another version than the one wanted); the "
            "trainer computes the rest",
            int((~missing).sum()),
            len(rows),
            columns.wrong,
        )
        computed, entropies = recompute(batch)
        log_probs = torch.where(missing[:, None], computed, log_probs)
        entropy = torch.where(missing[:, None], entropies, entropy)
        scored_by = torch.where(missing[:, None] & (sampled_by >= 0), version, scored_by)
    batch.batch[SCORED_BY] = scored_by
    return _taken(batch, log_probs, entropy) | {
        "model_engine_server/fallback_rows": int(missing.sum()),
        "model_engine_server/wrong_version_rows": columns.wrong,
        "model_engine_server/late_tokens": columns.late_tokens,
        "model_engine_server/queue_seconds_max": columns.queued_s,
    }


def _resolved(scores: Sequence[Any], timeout_s: float) -> list[ResponseScores | None]:
    """What object references stand for; what is lost or late is None."""
    deadline = time.monotonic() + timeout_s
    rows: list[ResponseScores | None] = []
    for item in scores:
        if isinstance(item, ObjectRef):
            try:
                item = ray.get(item, timeout=max(0.0, deadline - time.monotonic()))
            except (GetTimeoutError, RayError) as error:
                logger.warning("the scores of a trajectory are lost: %s", error)
                item = None
        rows.append(item)
    return rows


def scores_column(scores: Sequence[Any]) -> np.ndarray:
    """Scores, or object references of them, as a column of a batch."""
    column = np.empty(len(scores), dtype=object)
    column[:] = scores
    return column


def _taken(batch: DataProto, log_probs: torch.Tensor, entropy: torch.Tensor) -> dict[str, float]:
    batch.batch["old_log_probs"], batch.batch["entropys"] = log_probs, entropy
    return mismatch_metrics(log_probs, batch.batch["rollout_log_probs"], batch.batch["response_mask"])

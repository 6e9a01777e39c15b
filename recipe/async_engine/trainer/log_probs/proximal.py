# SPDX-License-Identifier: Apache-2.0
"""Adds the proximal log-probs to a batch, from one of four sources (`Proximal`).

Contract: after `ProximalLogProbs.fill` a batch has ``old_log_probs``, even if log-prob servers failed. A row gets the
servers' log-probs only if an acceptable version computed them for each sampled token. The trainer computes the other
rows, with a warning and a metric, and the next batch uses the servers again. Every step reports, under verl's names,
``timing_s/old_log_prob`` (the seconds of the trainer's own forward pass, or 0) and ``rollout_corr/*``. Shown by
tests/integration/test_log_prob_columns.py, tests/e2e/test_model_engine.py and, for later batches of a version,
tests/e2e/test_fully_async.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, RayError
from verl import DataProto
from verl.trainer.ppo.core_algos import agg_loss
from verl.utils.debug import marked_timer
from verl.utils.debug.metrics import calculate_debug_metrics

from recipe.async_engine.config.log_prob_servers import LogProbServers, Proximal
from recipe.async_engine.config.plan import RunPlan
from recipe.async_engine.core.columns import REFERENCE, SCORED_BY, SCORES, TOKEN_VERSIONS
from recipe.async_engine.core.scoring import Anchor
from recipe.async_engine.core.versions import NOT_SAMPLED
from recipe.async_engine.log_prob_servers.client import ResponseScores
from recipe.async_engine.trainer.log_probs.losses import mismatch_metrics, shares

logger = logging.getLogger(__name__)

IN_LOSS = "actor/rollout_corr/"

Metrics = dict[str, Any]
Timing = dict[str, float]


class ProximalLogProbs:
    """Adds proximal log-probs from the configured source.

    ``by_published_weights`` is the trainer's forward pass with the weights that were published last. It returns a batch
    with ``old_log_probs`` and ``entropys``, and the model FLOPs utilization.
    """

    def __init__(
        self, config: Any, plan: RunPlan, by_published_weights: Callable[[DataProto], tuple[DataProto, float]]
    ) -> None:
        self._source, self._servers, self._compute = plan.proximal, plan.settings.servers, by_published_weights
        self._actor = config.actor_rollout_ref.actor

    def fill(self, batch: DataProto, version: int, metrics: Metrics, timing: Timing) -> None:
        """Add ``old_log_probs`` to a batch that is trained at ``version``.

        ``metrics`` and ``timing`` are those of the current step, and are updated.
        """
        # Every step reports the duration of the trainer's forward pass, which is 0 if the trainer makes none.
        timing.setdefault("old_log_prob", 0.0)
        began = time.monotonic()
        if self._source in (Proximal.BYPASS, Proximal.LOGLINEAR):
            # Here `old_log_probs` are the behaviour policy's log-probs. From them, the loss (`losses`) computes the
            # proximal log-probs, and reports how much the two differ.
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
            if self._source is Proximal.LOGLINEAR:
                batch.batch["rollout_is_weights"] = shares(batch.batch[TOKEN_VERSIONS], version)
        else:
            if self._source is Proximal.SERVER:
                log_probs, entropy = self._by_servers(batch, version, metrics, timing)
            else:
                log_probs, entropy = self.recompute(batch, metrics, timing)
            mask = batch.batch["response_mask"]
            metrics.update(mismatch_metrics(log_probs, batch.batch["rollout_log_probs"], mask))
            batch.batch["old_log_probs"] = log_probs
            self.report_entropy(batch, entropy, metrics)
        metrics["log_probs/critical_path_seconds"] = time.monotonic() - began

    def recompute(self, batch: DataProto, metrics: Metrics, timing: Timing) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute log-probs and entropies, float32 (rows, R), in the trainer with the newest published weights."""
        with marked_timer("old_log_prob", timing, color="blue"):
            computed, mfu = self._compute(batch)
        metrics["perf/mfu/actor_infer"] = mfu
        log_probs, entropy = computed.batch.pop("old_log_probs"), computed.batch.pop("entropys")
        # The remaining columns, if any, are the experts that the routers chose; verl replays these choices in the
        # update (router replay R2).
        batch.batch.update(computed.batch)
        return log_probs, entropy

    def _by_servers(
        self, batch: DataProto, version: int, metrics: Metrics, timing: Timing
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probs and entropies from the log-prob servers, and add the column `SCORED_BY` to the batch.

        The trainer computes those rows for which the servers have no usable log-probs.
        """
        rows = _resolved(batch.non_tensor_batch.pop(SCORES, [None] * len(batch)), self._servers.timeout)
        sampled_by = batch.batch[TOKEN_VERSIONS]
        columns = server_columns(rows, sampled_by, self._servers, version)
        log_probs, entropy, scored_by, missing = columns.log_probs, columns.entropy, columns.versions, columns.missing
        if missing.any():
            logger.warning(
                "log-prob servers scored %d of %d trajectories (%d by another version than the one wanted); the "
                "trainer computes the rest",
                int((~missing).sum()),
                len(rows),
                columns.wrong,
            )
            computed, entropies = self.recompute(batch, metrics, timing)
            log_probs = torch.where(missing[:, None], computed, log_probs)
            entropy = torch.where(missing[:, None], entropies, entropy)
            scored_by = torch.where(missing[:, None] & (sampled_by >= 0), version, scored_by)
        batch.batch[SCORED_BY] = scored_by
        metrics["model_engine_server/fallback_rows"] = int(missing.sum())
        metrics["model_engine_server/wrong_version_rows"] = columns.wrong
        metrics["model_engine_server/late_tokens"] = columns.late_tokens
        metrics["model_engine_server/queue_seconds_max"] = columns.queued_s
        return log_probs, entropy

    def report_entropy(self, batch: DataProto, entropy: torch.Tensor, metrics: Metrics) -> None:
        """Add to ``metrics`` verl's metrics of ``entropy``, a tensor (rows, R), and of the batch's log-probs."""
        metrics.update(entropy_metric(entropy, batch.batch["response_mask"], self._actor))
        metrics.update(calculate_debug_metrics(batch))


def fill_reference(batch: DataProto, metrics: Metrics, compute: Callable[[DataProto], DataProto]) -> DataProto:
    """Add the reference policy's log-probs, which its servers have computed, to ``batch`` as ``ref_log_prob``.

    If some rows lack log-probs from the servers, ``compute`` makes the trainer compute all rows, and the rows that lack
    them get the trainer's values.
    """
    rows = batch.non_tensor_batch.pop(REFERENCE, [None] * len(batch))
    column = torch.zeros(batch.batch["responses"].shape)
    missing = torch.tensor([row is None for row in rows])
    for number, row in enumerate(rows):
        if row is not None:
            column[number, : len(row)] = torch.from_numpy(np.ascontiguousarray(row))
    if missing.any():
        logger.warning("the trainer computes the reference log-probs of %d rows", int(missing.sum()))
        batch = compute(batch)
        column = torch.where(missing[:, None], batch.batch["ref_log_prob"], column)
    batch.batch["ref_log_prob"] = column
    metrics["model_engine_server/reference_fallback_rows"] = int(missing.sum())
    return batch


def rename_loss_metrics(metrics: Metrics) -> None:
    """Remove the prefix "actor/", which verl adds to the mismatch metrics that a loss returns."""
    for name in [name for name in metrics if name.startswith(IN_LOSS)]:
        metrics[name.removeprefix("actor/")] = metrics.pop(name)


def entropy_metric(entropy: torch.Tensor, response_mask: torch.Tensor, actor: Any) -> dict[str, float]:
    """Return a batch's ``actor/entropy``, aggregated like the loss (verl/experimental/separation/ray_trainer.py:522).

    ``entropy`` (of each token) and ``response_mask`` (1 for trained tokens) have the shape (rows, R). ``actor`` is the
    actor's section of verl's configuration.
    """
    total = agg_loss(
        loss_mat=entropy,
        loss_mask=response_mask,
        loss_agg_mode=actor.loss_agg_mode,
        loss_scale_factor=actor.loss_scale_factor,
    )
    return {"actor/entropy": total.item()}


@dataclass(frozen=True)
class ServerColumns:
    """The log-prob servers' scores (log-probs and entropies) for a batch of responses of R tokens.

    Tokens that were not sampled have log-prob and entropy 0 and version -1.
    """

    log_probs: torch.Tensor  # log-prob of each token, float32 (rows, R)
    entropy: torch.Tensor  # entropy of each token's distribution, float32 (rows, R)
    versions: torch.Tensor  # version that computed each token's scores, int64 (rows, R)
    missing: torch.Tensor  # whether a row has no usable scores, bool (rows,)
    wrong: int  # number of rows in ``missing`` that have scores, but of an unacceptable version
    late_tokens: int  # number of tokens that were scored by another version than the requested one
    queued_s: float  # longest time, in seconds, that a request for these scores waited at a server


def server_columns(
    rows: Sequence[ResponseScores | None], token_versions: torch.Tensor, servers: LogProbServers, newest: int
) -> ServerColumns:
    """Join the log-prob servers' scores of a batch's rows into columns.

    Args:
        rows: the scores of the first tokens (at most R) of each row; None for a row that the servers did not score.
        token_versions: the version that sampled each token, or -1 for tokens that were not sampled, int64 (rows, R).
        servers: the settings of the log-prob servers. They determine which versions may score a token (`_will_do`).
        newest: the newest published version.
    """
    log_probs = torch.zeros(token_versions.shape, dtype=torch.float32)
    entropy, versions = torch.zeros_like(log_probs), torch.full_like(token_versions, NOT_SAMPLED)
    missing = torch.ones(len(rows), dtype=torch.bool)
    wrong = late = 0
    queued_s = 0.0
    for number, scores in enumerate(rows):
        if scores is None:
            continue
        length = len(scores.versions)
        sampled = token_versions[number, :length] != NOT_SAMPLED
        scored_by = torch.from_numpy(scores.versions)
        sampled_by = token_versions[number, :length][sampled]
        if not _will_do(servers, newest, scored_by[sampled], sampled_by, scores.late_tokens):
            wrong += 1
            continue
        missing[number] = False
        for column, values in ((log_probs, scores.log_probs), (entropy, scores.entropy)):
            column[number, :length] = torch.from_numpy(np.ascontiguousarray(values)) * sampled
        versions[number, :length] = torch.where(sampled, scored_by, NOT_SAMPLED)
        late += scores.late_tokens
        queued_s = max(queued_s, scores.queued_s)
    return ServerColumns(log_probs, entropy, versions, missing, wrong, late, queued_s)


def _will_do(
    servers: LogProbServers, newest: int, scored_by: torch.Tensor, sampled_by: torch.Tensor, late_tokens: int
) -> bool:
    """Return whether the servers computed the log-probs of a row's sampled tokens with acceptable versions.

    With ``anchor: latest``, only the newest version is acceptable; otherwise, for each token, the version that sampled
    it, or a later one if the server reported late tokens.

    Args:
        newest: the newest published version.
        scored_by, sampled_by: the versions that scored and sampled each token, int64 (tokens,).
        late_tokens: the number of the row's tokens that the servers reported as late.
    """
    if servers.anchor == Anchor.LATEST:
        return bool((scored_by == newest).all())
    # A version later than the one that sampled a token may score it only if the log-prob server has reported that the
    # scoring request arrived after the server had moved on to that version.
    expected = (scored_by == sampled_by) | ((scored_by > sampled_by) & bool(late_tokens))
    return bool(expected.all())


def _resolved(scores: Sequence[Any], timeout_s: float) -> list[ResponseScores | None]:
    """Return each row's scores, given the items of a `scores_column`; None if they are lost or not there in time."""
    deadline = time.monotonic() + timeout_s
    fetched: dict[ObjectRef, Sequence[ResponseScores | None] | None] = {}

    def found(item: Any) -> ResponseScores | None:
        if not isinstance(item, tuple):
            return item
        reference, number = item
        if reference is not None and reference not in fetched:
            try:
                fetched[reference] = ray.get(reference, timeout=max(0.0, deadline - time.monotonic()))
            except (GetTimeoutError, RayError) as error:
                logger.warning("the scores of a trajectory are lost: %s", error)
        of_trajectory = fetched.setdefault(reference, None)
        return None if of_trajectory is None else of_trajectory[number]

    return [found(item) for item in scores]


def scores_column(scores: Sequence[Any]) -> np.ndarray:
    """Return ``scores``, which has an item for each row, as a column of a batch. `_resolved` gets the scores from it.

    Each item is one of:

    - None: the row has no scores;
    - the row's scores;
    - a pair: an object reference to the scores of all outputs of the row's trajectory, or None if these have no scores;
      and the row's index among the outputs.
    """
    return np.fromiter(scores, dtype=object, count=len(scores))

# SPDX-License-Identifier: Apache-2.0
"""Scores of log-prob servers on their way into a batch, and what happens to rows without any."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl import DataProto

from recipe.async_engine.config.log_prob_servers import LogProbServers, Proximal
from recipe.async_engine.core.columns import SCORED_BY, SCORES, TOKEN_VERSIONS
from recipe.async_engine.core.scoring import Anchor
from recipe.async_engine.log_prob_servers.client import ResponseScores
from recipe.async_engine.trainer.log_probs.losses import mismatch_metrics
from recipe.async_engine.trainer.log_probs.proximal import ProximalLogProbs, scores_column, server_columns

SERVERS = LogProbServers(backend="fsdp2")
LATEST = LogProbServers(backend="fsdp2", anchor=Anchor.LATEST)
SAMPLED_BY = torch.tensor([[2, 2, 3, -1], [3, -1, 3, 3]])


def scores(versions: list[int], late: int = 0) -> ResponseScores:
    """Log-prob -1 and entropy 2 for each token, wherever it is."""
    size = len(versions)
    return ResponseScores(
        np.full(size, -1.0, np.float32), np.full(size, 2.0, np.float32), np.array(versions), late, 0.25
    )


def test_rows_are_taken_with_their_versions_and_nothing_is_left_where_nothing_was_sampled() -> None:
    columns = server_columns([scores([2, 2, 3]), scores([3, -1, 3, 3])], SAMPLED_BY, SERVERS, 3)
    assert not columns.missing.any() and columns.wrong == columns.late_tokens == 0
    assert columns.log_probs.tolist() == [[-1, -1, -1, 0], [-1, 0, -1, -1]]
    assert columns.entropy.tolist() == [[2, 2, 2, 0], [2, 0, 2, 2]]
    assert torch.equal(columns.versions, SAMPLED_BY)
    assert columns.queued_s == 0.25


@pytest.mark.parametrize(
    ("row", "servers", "taken"),
    [
        (scores([2, 2, 3]), SERVERS, True),
        (scores([3, 3, 3]), SERVERS, False),
        (scores([3, 3, 3], late=2), SERVERS, True),
        (scores([1, 2, 3], late=2), SERVERS, False),
        (scores([3, 3, 3]), LATEST, True),
        (scores([2, 2, 2]), LATEST, False),
    ],
)
def test_scores_of_another_version_are_refused(row: ResponseScores, servers: LogProbServers, taken: bool) -> None:
    columns = server_columns([row], SAMPLED_BY[:1], servers, 3)
    assert (not columns.missing[0], columns.wrong) == (taken, not taken)
    if not taken:
        assert (columns.log_probs == 0).all() and (columns.versions == -1).all()


def batch_of(rows: list[ResponseScores | None]) -> DataProto:
    mask = (SAMPLED_BY >= 0).long()
    tensors = {TOKEN_VERSIONS: SAMPLED_BY, "responses": SAMPLED_BY, "response_mask": mask}
    tensors["rollout_log_probs"] = torch.full((2, 4), -1.5)
    return DataProto.from_dict(tensors, non_tensors={SCORES: scores_column(rows)})


def test_trainer_computes_only_what_servers_did_not() -> None:
    asked = []

    def compute(batch: DataProto) -> tuple[DataProto, float]:
        asked.append(len(batch))
        columns = {"old_log_probs": torch.full((2, 4), -9.0), "entropys": torch.full((2, 4), 7.0)}
        return DataProto.from_dict(columns), 0.5

    actor = {"loss_agg_mode": "token-mean", "loss_scale_factor": None}
    plan = SimpleNamespace(proximal=Proximal.SERVER, settings=SimpleNamespace(servers=SERVERS))
    stage = ProximalLogProbs(OmegaConf.create({"actor_rollout_ref": {"actor": actor}}), plan, compute)  # type: ignore[arg-type]
    batch, metrics = batch_of([scores([2, 2, 3]), None]), {}
    stage.fill(batch, 5, metrics, {})
    assert asked == [2]
    assert batch.batch["old_log_probs"].tolist() == [[-1, -1, -1, 0], [-9] * 4]
    assert batch.batch[SCORED_BY].tolist() == [[2, 2, 3, -1], [5, -1, 5, 5]]
    assert metrics["model_engine_server/fallback_rows"] == 1
    # The next batch is the servers' again.
    batch = batch_of([scores([2, 2, 3]), scores([3, -1, 3, 3])])
    stage.fill(batch, 5, metrics, {})
    assert asked == [2] and metrics["model_engine_server/fallback_rows"] == 0
    assert metrics["actor/entropy"] == 2.0 and "entropys" not in batch.batch


def test_mismatch_is_reported_where_nothing_is_corrected() -> None:
    mask = torch.tensor([[1, 1, 0]])
    ratios = torch.tensor([[2.0, 0.5, 100.0]])
    metrics = mismatch_metrics(ratios.log(), torch.zeros(1, 3), mask)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1.25)
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(2.0)
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1.25**2 / ((4 + 0.25) / 2))
    assert metrics["rollout_corr/kl"] == pytest.approx(0.0)
    assert metrics["rollout_corr/k3_kl"] == pytest.approx(((2 - math.log(2) - 1) + (0.5 - math.log(0.5) - 1)) / 2)

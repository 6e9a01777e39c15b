# SPDX-License-Identifier: Apache-2.0
"""Log-probs that came with the trajectories of a batch, as columns of it.

Contract: a row is taken only if every one of its sampled tokens was computed by a version that will do; what is missing
is left to the caller. Shown by tests/integration/test_log_prob_columns.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from recipe.async_engine.config.log_prob_servers import LogProbServers
from recipe.async_engine.core.scoring import Anchor
from recipe.async_engine.core.versions import NOT_SAMPLED
from recipe.async_engine.log_prob_servers.part_scores import ResponseScores


@dataclass(frozen=True)
class ServerColumns:
    """Of a batch of rows with responses padded to R tokens; 0, and version -1, where nothing was sampled."""

    log_probs: torch.Tensor  # float32 (rows, R)
    entropy: torch.Tensor  # float32 (rows, R)
    versions: torch.Tensor  # int64 (rows, R), the version that computed each token's
    missing: torch.Tensor  # bool (rows,), rows that have none
    wrong: int  # of these, rows whose scores were computed by a version that will not do
    late_tokens: int  # tokens that another version computed than the one wanted
    queued_s: float  # longest time that a request of the batch waited at a server


def will_do(
    servers: LogProbServers, newest: int, scored_by: torch.Tensor, sampled_by: torch.Tensor, late_tokens: int
) -> bool:
    """Whether a row will do, by the versions of its sampled tokens, int64 (tokens,) each.

    ``newest``: the newest published version.
    """
    if servers.anchor == Anchor.LATEST:
        older_will_do = servers.while_loading == "old_version"
        return bool((scored_by == newest).all()) or (older_will_do and bool((scored_by >= 0).all()))
    # What came late to a server was scored by a later version, which the server said.
    expected = (scored_by == sampled_by) | ((scored_by > sampled_by) & bool(late_tokens))
    return bool(expected.all())


def reference_column(rows: Sequence[np.ndarray | None], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference policy's log-probs of a batch's rows.

    Args:
        rows: of each row, of any length up to ``length``; None where there are none.
        length: of the padded responses.

    Returns:
        float32 (rows, length), 0 where there are none; and bool (rows,), which rows have none.
    """
    column = torch.zeros(len(rows), length)
    missing = torch.tensor([row is None for row in rows])
    for number, row in enumerate(rows):
        if row is not None:
            column[number, : len(row)] = torch.from_numpy(np.ascontiguousarray(row))
    return column, missing


def server_columns(
    rows: Sequence[ResponseScores | None], token_versions: torch.Tensor, servers: LogProbServers, newest: int
) -> ServerColumns:
    """Join the scores of a batch's rows.

    Args:
        rows: of each row, of any length up to R; None where there are none.
        token_versions: int64 (rows, R), the version that sampled each token, -1 where none did.
        servers, newest: say which version should have computed a token's log-prob, see `will_do`.
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
        if not will_do(servers, newest, scored_by[sampled], sampled_by, scores.late_tokens):
            wrong += 1
            continue
        missing[number] = False
        for column, values in ((log_probs, scores.log_probs), (entropy, scores.entropy)):
            column[number, :length] = torch.from_numpy(np.ascontiguousarray(values)) * sampled
        versions[number, :length] = torch.where(sampled, scored_by, NOT_SAMPLED)
        late += scores.late_tokens
        queued_s = max(queued_s, scores.queued_s)
    return ServerColumns(log_probs, entropy, versions, missing, wrong, late, queued_s)

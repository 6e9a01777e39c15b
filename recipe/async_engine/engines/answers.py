# SPDX-License-Identifier: Apache-2.0
"""The format in which a rollout server returns answers to its client, independent of the engine.

Contract: while an answer is generated, the client regularly fetches the new tokens (:class:`Sampled`) and adds them to
a :class:`Flight`. When the server dies, another server continues the answer after the fetched tokens; the tokens that
were not fetched are lost. Before a checkpoint the client fetches once more, so that the checkpoint has the newest
tokens. Shown by tests/integration/test_client.py and, with a real engine that is killed,
tests/e2e/test_lost_replica.py.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from verl.workers.rollout.replica import TokenOutput

from recipe.async_engine.core.versions import joined, last_runs

COMPLETED = "completed"
"""Stop reason of a complete answer. Servers return it for an engine's finish reasons stop, length and repetition."""
ABORTED = ("aborted", "abort")
"""Stop reasons of an answer that was interrupted before its end."""

GOES_ON = "recipe_goes_on"
"""Extra field of an answer that was interrupted, but not by a weight sync. Its value is the reason: `SERVER_DIED` or
`CHECKPOINT`. The version that sampled such an answer may still be live, and can then continue the answer.
"""
VERSION_RUNS = "recipe_version_runs"
"""Extra field of an answer: (version, token count) for each run of tokens that one version sampled."""
RECOMPUTED = "recipe_recomputed_tokens"
"""Extra field of an answer: number of prompt and answer tokens whose KV cache was recomputed after weight swaps."""
SERVER_DIED = "its server died"
CHECKPOINT = "a checkpoint was taken"


@dataclass(frozen=True)
class Sampled:
    """New tokens of one request. ``runs`` has (version, token count) for each run of tokens that one version sampled.

    ``log_probs`` is None if the request did not ask for log-probs, and ``routed_experts`` (`joined_experts`) is None if
    the engine does not return the experts that its routers chose.
    """

    token_ids: list[int]
    runs: list[tuple[int, int]]
    log_probs: list[float] | None
    routed_experts: np.ndarray | None = None


def joined_experts(known: np.ndarray | None, more: np.ndarray | None, tokens: int) -> np.ndarray | None:
    """Return ``known``, the experts chosen for an answer so far, followed by those for its next ``tokens`` tokens.

    The arrays have a row (layers, experts per token) for each token of prompt and answer that the engine has read. The
    newest token of an answer has no row yet, because the engine reads a token only when it samples the next one. So a
    new token adds the row of the token before it, and the first token of an answer adds the rows of the whole prompt.
    ``more`` ends with the rows that the new tokens add. Rows before these in ``more`` are not used: the engine may have
    read their tokens again, with other weights than those that sampled them.
    """
    if more is None or not tokens:
        return known
    return more if known is None else np.concatenate([known, more[-tokens:]])


@dataclass(eq=False)
class Flight:
    """One open request at a server, with the tokens of its answer that the client has fetched.

    ``asked`` is the digest of the request. ``avoided`` is the id of the server that failed this request before, if any.
    ``told`` says whether the latest fetch of this request's tokens has ended, with an answer or with an error.
    """

    asked: bytes
    avoided: str | None = None
    told: bool = False
    server_id: str | None = None
    server: Any = None
    engine_request_id: str | None = None
    runs: list[tuple[int, int]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] | None = None
    routed_experts: np.ndarray | None = None

    def add(self, sampled: Sampled, after: int) -> None:
        """Add the tokens of ``sampled`` that were not fetched before.

        The first token of ``sampled`` has the index ``after`` in the answer.
        """
        new = slice(len(self.token_ids) - after, None)
        count = len(sampled.token_ids[new])
        self.runs = joined(self.runs, last_runs(sampled.runs, count))
        self.routed_experts = joined_experts(self.routed_experts, sampled.routed_experts, count)
        self.token_ids += sampled.token_ids[new]
        if sampled.log_probs is not None:
            self.log_probs = [*(self.log_probs or []), *sampled.log_probs[new]]

    def cut_answer(self, why: str) -> TokenOutput | None:
        """Return the fetched tokens as an interrupted answer, or None if there are no tokens.

        ``why`` is the reason for the interruption: `SERVER_DIED` or `CHECKPOINT`.
        """
        if not self.token_ids:
            return None
        first, last = self.runs[0][0], self.runs[-1][0]
        extra = {"global_steps": last, "submitted_version": first, VERSION_RUNS: list(self.runs), GOES_ON: why}
        log_probs = None if self.log_probs is None else list(self.log_probs)
        return TokenOutput(
            token_ids=list(self.token_ids),
            log_probs=log_probs,
            routed_experts=self.routed_experts,
            stop_reason="aborted",
            extra_fields=extra,
        )

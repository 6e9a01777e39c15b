# SPDX-License-Identifier: Apache-2.0
"""The format of an answer between a rollout server and its client, independent of the engine that samples it.

Contract: while an answer is generated, its client regularly fetches the new tokens (:class:`Sampled`) and stores them
in a :class:`Flight`. When the server dies, the answer is continued elsewhere from the tokens that the client has; those
sampled after its last request for them are sampled again. A checkpoint fetches once more, so that it contains the
newest tokens. Shown by tests/integration/test_client.py and, with a real engine that is killed,
tests/e2e/test_lost_replica.py.
"""

from dataclasses import dataclass, field
from typing import Any

from verl.workers.rollout.replica import TokenOutput

from recipe.async_engine.core.versions import joined, last_runs

COMPLETED = "completed"
"""Stop reason of a complete answer: in verl's server that of vLLM's finish reasons `stop` and `length`."""
ABORTED = ("aborted", "abort")
"""Stop reasons of an answer that is not complete."""

GOES_ON = "recipe_goes_on"
"""Extra field of an interrupted answer: what interrupted it, unless it was a weight sync; its version may then continue
it.
"""
VERSION_RUNS = "recipe_version_runs"
"""Extra field of an answer: (version, token count) of each run of versions that sampled it."""
RECOMPUTED = "recipe_recomputed_tokens"
"""Extra field of an answer: number of prompt and answer tokens that the engine computed again after weight swaps."""
SERVER_DIED = "its server died"
CHECKPOINT = "a checkpoint was taken"


@dataclass(frozen=True)
class Sampled:
    """Tokens of one request, the runs of versions that sampled them and, if requested, their log-probs."""

    token_ids: list[int]
    runs: list[tuple[int, int]]
    log_probs: list[float] | None


@dataclass(eq=False)
class Flight:
    """One request in progress at a server, and the part of its answer that is known.

    asked: the tokens sent in the request. avoided: the server that failed this request before. told: whether the server
    recently reported that the answer is not complete yet.
    """

    asked: list[int]
    avoided: str | None = None
    told: bool = False
    server_id: str | None = None
    server: Any = None
    engine_request_id: str | None = None
    runs: list[tuple[int, int]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] | None = None

    def add(self, sampled: Sampled, after: int) -> None:
        """Add tokens that follow the first ``after`` ones, skipping any that another call has already added."""
        new = slice(len(self.token_ids) - after, None)
        self.runs = joined(self.runs, last_runs(sampled.runs, len(sampled.token_ids[new])))
        self.token_ids += sampled.token_ids[new]
        if sampled.log_probs is not None:
            self.log_probs = [*(self.log_probs or []), *sampled.log_probs[new]]

    def cut_answer(self, why: str) -> TokenOutput | None:
        """Return the known tokens as an interrupted answer, or None if there are none."""
        if not self.token_ids:
            return None
        first, last = self.runs[0][0], self.runs[-1][0]
        extra = {"global_steps": last, "submitted_version": first, VERSION_RUNS: list(self.runs), GOES_ON: why}
        log_probs = None if self.log_probs is None else list(self.log_probs)
        return TokenOutput(
            token_ids=list(self.token_ids), log_probs=log_probs, stop_reason="aborted", extra_fields=extra
        )

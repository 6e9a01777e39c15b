# SPDX-License-Identifier: Apache-2.0
"""The words in which a rollout server and its client speak of an answer, whatever engine samples it.

Contract: a client fetches from time to time what an answer under way has come to (:class:`Sampled`), and keeps it in a
:class:`Flight`. When the server dies, the answer goes on elsewhere from the tokens that the client has; those sampled
after its last question are sampled again. A checkpoint asks once more, and has them too. Shown by
tests/integration/test_client.py and, with a real engine that is killed, tests/e2e/test_lost_replica.py.
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
"""In the extra fields of a cut answer: what cut it, if that was no weight sync. It may go on under its version then."""
VERSION_RUNS = "recipe_version_runs"
"""In the extra fields of an answer: (version, token count) of each run of versions that sampled it."""
RECOMPUTED = "recipe_recomputed_tokens"
"""In the extra fields of an answer: prompt and own tokens that the engine computed again after swaps of weights."""
SERVER_DIED = "its server died"
CHECKPOINT = "a checkpoint was taken"


@dataclass(frozen=True)
class Sampled:
    """Tokens of one request, the runs of versions that sampled them and, where asked for, their log-probs."""

    token_ids: list[int]
    runs: list[tuple[int, int]]
    log_probs: list[float] | None


@dataclass(eq=False)
class Flight:
    """One request under way at a server, and what is known of its answer.

    asked: the tokens that it sends. avoided: the server that failed it before. told: whether the server said of late
    that the answer is not complete yet.
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
        """Take in what came after the first ``after`` tokens; another question may have brought some of it already."""
        new = slice(len(self.token_ids) - after, None)
        self.runs = joined(self.runs, last_runs(sampled.runs, len(sampled.token_ids[new])))
        self.token_ids += sampled.token_ids[new]
        if sampled.log_probs is not None:
            self.log_probs = [*(self.log_probs or []), *sampled.log_probs[new]]

    def cut_answer(self, why: str) -> TokenOutput | None:
        """What is known, as an answer that was cut; None if that is nothing."""
        if not self.token_ids:
            return None
        first, last = self.runs[0][0], self.runs[-1][0]
        extra = {"global_steps": last, "submitted_version": first, VERSION_RUNS: list(self.runs), GOES_ON: why}
        log_probs = None if self.log_probs is None else list(self.log_probs)
        return TokenOutput(
            token_ids=list(self.token_ids), log_probs=log_probs, stop_reason="aborted", extra_fields=extra
        )

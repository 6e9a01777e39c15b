# SPDX-License-Identifier: Apache-2.0
"""Tokens of answers under way, so that they outlive the server that samples them.

Contract: a server notes the newest output of each request (:class:`OutputWatch`); a client fetches from time to time
what has come since it last asked (:class:`Flight`). When the server dies, the answer goes on elsewhere from the tokens
that the client has; those sampled after its last question are sampled again. A checkpoint asks once more, and has them
too. Shown by tests/integration/test_client.py and, with a real engine that is killed, tests/e2e/test_lost_replica.py.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from verl.workers.rollout.replica import TokenOutput

from recipe.async_engine.core.cuts import sampled_before
from recipe.async_engine.core.versions import RequestVersions, joined, last_runs
from recipe.async_engine.record.activity import EngineActivity

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


class OutputWatch:
    """The newest output of each request that an engine works on; ``activity`` is told of each."""

    def __init__(self, activity: EngineActivity) -> None:
        self._activity = activity
        self._newest: dict[str, Any] = {}
        self._before: dict[str, int] = {}

    def watching(self, generate: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., AsyncGenerator[Any, None]]:
        """An engine's ``generate``, whose outputs are noted as they come.

        verl gives it names, vLLM's HTTP endpoints give the first three arguments by their places.
        """

        async def watched(
            prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
        ) -> AsyncGenerator[Any, None]:
            self._activity.enter(request_id)
            self._before[request_id] = len(sampled_before(sampling_params))
            try:
                # Closed at once where the caller stops listening: that is how an engine learns of it.
                async with aclosing(generate(prompt, sampling_params, request_id, **kwargs)) as outputs:
                    async for output in outputs:
                        self._newest[request_id] = output
                        if output.outputs:
                            self._activity.output(request_id, len(output.outputs[0].token_ids))
                        yield output
            finally:
                self._newest.pop(request_id, None)
                self._before.pop(request_id, None)
                self._activity.leave(request_id)

        return watched

    def asked_tokens(self, request_id: str) -> int:
        """Length of the request's prompt and of its answer before a cut; 0 before its first output."""
        output = self._newest.get(request_id)
        return 0 if output is None else len(output.prompt_token_ids or ()) + self._before[request_id]

    def since(self, request_id: str, known: int, versions: RequestVersions) -> Sampled | None:
        """What came after the first ``known`` tokens, perhaps nothing; None if the answer is complete.

        A complete answer is on its way already; taken for a part, it would go on after its end.
        """
        output = self._newest.get(request_id)
        if output is None or not output.outputs:
            return Sampled([], [], None)
        if output.finished:
            return None
        answer = output.outputs[0]
        runs = versions.runs(request_id, len(answer.token_ids))
        if runs is None:
            return Sampled([], [], None)
        tokens, log_probs = list(answer.token_ids[known:]), None
        if answer.logprobs is not None:
            log_probs = [answer.logprobs[known + n][token].logprob for n, token in enumerate(tokens)]
        return Sampled(tokens, last_runs(runs, len(tokens)), log_probs)


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

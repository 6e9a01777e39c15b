# SPDX-License-Identifier: Apache-2.0
"""Requests a few answers from rollout replicas for a run's rehearsal. These answers are not trained.

Contract: each request has a seed of its own, so it does not change the random numbers for other requests. Requests are
sent directly to a replica's server, without the load balancer. If a weight sync interrupts an answer, the request is
sent again, with the tokens sampled so far. Every call returns within its deadline, or raises `RehearsalFailed`. Shown
by tests/integration/test_rehearsal.py.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.engines.answers import ABORTED
from recipe.async_engine.trainer.beside import Beside
from recipe.async_engine.weights.replica_set import ReplicaRecord, plain_cause

PROMPT_TOKENS, ANSWER_TOKENS, LONG_ANSWER_TOKENS = 16, 16, 1024
ANSWERS_PER_REPLICA = 4
LOOK_S = 0.01


class RehearsalFailed(RecipeError):
    """The rehearsal has shown that the run would not work with its configuration."""


@dataclass
class Answer:
    """An answer that a replica sampled, with each token's log-prob in nats, and the number of requests that it took."""

    replica: str
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    requests: int = 0


class Probe:
    """Requests answers to random prompts from replicas.

    Args:
        rollout: verl's rollout section of the configuration, with temperature and lengths.
        vocabulary: the token ids from which prompts are made.
        timeout_s: deadline of each answer, in seconds.
    """

    def __init__(self, rollout: Any, vocabulary: Sequence[int], timeout_s: float) -> None:
        self._rollout, self._vocabulary, self._timeout_s = rollout, list(vocabulary), timeout_s
        self.prompt_tokens = min(PROMPT_TOKENS, int(rollout.prompt_length))
        self.answer_tokens = min(ANSWER_TOKENS, int(rollout.response_length))
        room = int(rollout.get("max_model_len") or rollout.prompt_length + rollout.response_length)
        # An answer of this many tokens should still be unfinished when a weight swap begins. One position stays free,
        # as some servers demand.
        self._long = max(1, min(LONG_ANSWER_TOKENS, room - self.prompt_tokens - 1))

    def tokens(self, seed: int, count: int) -> list[int]:
        """Return ``count`` random tokens, always the same for a given seed."""
        return random.Random(seed).choices(self._vocabulary, k=count)

    def sampled(self, records: Sequence[ReplicaRecord], greedy: bool = False) -> list[Answer]:
        """Return a few answers from each replica. With the same weights, ``greedy`` answers are the same in every call.

        Not every engine obeys a request's seed.
        """
        numbers = [(record, number) for number in range(ANSWERS_PER_REPLICA) for record in records]
        asked = [(*each, self.answer_tokens, self._timeout_s, uuid.uuid4().hex) for each in numbers]
        return self._answers(asked, greedy)

    def under(self, records: Sequence[ReplicaRecord], change: Callable[[], None], timeout_s: float) -> list[Answer]:
        """Call ``change`` while each replica generates a long answer, and return the answers when they are complete.

        The answers must be complete within ``timeout_s`` seconds, including the time that ``change`` takes.
        """
        names = {f"rehearsal-{uuid.uuid4().hex}": record for record in records}

        def late(number: int) -> RehearsalFailed:
            return RehearsalFailed(f"requests that were interrupted did not come back within {timeout_s:g} s")

        answers: Beside[list[Answer]] = Beside("rehearsed-requests", timeout_s, late)
        asked = [(record, 0, self._long, timeout_s, name) for name, record in names.items()]
        answers.begin(0, lambda: self._answers(asked))
        asyncio.run(self._begun(names, lambda: answers.is_over))
        change()
        return answers.wait() or []

    async def _begun(self, names: dict[str, ReplicaRecord], is_over: Callable[[], bool]) -> None:
        """Wait until each request has a sampled token.

        Return earlier if ``is_over()`` says that all requests have ended, or if the deadline has passed.
        """
        deadline = time.monotonic() + self._timeout_s
        while not is_over() and time.monotonic() < deadline:
            news = await asyncio.gather(
                *[record.replica.server_handle.sampled_since.remote({name: 0}) for name, record in names.items()]
            )
            if all(found and next(iter(found.values())).token_ids for found in news):
                return
            await asyncio.sleep(LOOK_S)

    def _answers(
        self, asked: Sequence[tuple[ReplicaRecord, int, int, float, str]], greedy: bool = False
    ) -> list[Answer]:
        temperature = 0.0 if greedy else self._rollout.temperature

        async def ask() -> list[Answer]:
            return await asyncio.gather(*[self._answer(*each, temperature) for each in asked])

        return asyncio.run(ask())

    async def _answer(
        self, record: ReplicaRecord, number: int, count: int, timeout_s: float, name: str, temperature: float
    ) -> Answer:
        """Return the replica's answer of ``count`` tokens to the prompt that is generated from the seed ``number``.

        ``name`` is the id of the first request. Requests that continue the answer get new ids.
        """
        answer = Answer(record.name, self.tokens(number, self.prompt_tokens))
        deadline = time.monotonic() + timeout_s
        while (missing := count - len(answer.tokens)) > 0:
            sampling = {
                "temperature": temperature,
                "logprobs": True,
                "ignore_eos": True,
                "seed": number,
                "max_tokens": missing,
            }
            call = record.replica.server_handle.generate.remote(
                prompt_ids=answer.prompt + answer.tokens, sampling_params=sampling, request_id=name
            )
            name = uuid.uuid4().hex
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    part = await call
            except TimeoutError:
                which = f"{len(answer.tokens)} of {count} tokens within {timeout_s:g} s"
                raise RehearsalFailed(f"{record.name} gave {which} (async_training.timeouts.rehearsal)") from None
            except Exception as error:
                raise RehearsalFailed(f"{record.name} did not answer: {plain_cause(error)}") from error
            if len(part.token_ids) < missing and part.stop_reason not in ABORTED:
                raise RehearsalFailed(f"{record.name} ended an answer early, with the stop reason {part.stop_reason!r}")
            answer.tokens += part.token_ids
            answer.log_probs += part.log_probs or ()
            answer.requests += 1
            if not part.token_ids:
                await asyncio.sleep(LOOK_S)
        return answer


def ordinary_tokens(tokenizer: Any) -> list[int]:
    """Return the ids of all tokens except special and added tokens, such as the marks of a chat template."""
    marks = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return sorted(set(tokenizer.get_vocab().values()) - marks)

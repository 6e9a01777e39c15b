# SPDX-License-Identifier: Apache-2.0
"""The rehearsal of a run: it tests before the first step, in the run's own processes, that weights reach the replicas.

Contract: `Rehearsal.run` is called after the first publication, before anything is generated for training. It samples
from every replica, sends the same version again in the configured way, samples once more, and compares log-probs.
During the transfer, every trainer rank does forward and backward passes, and each replica has an open request, which
the swap interrupts. The rehearsal does not affect training: it changes no weights, optimizer states, random states or
groups. Every wait has a deadline (``async_training.timeouts.rehearsal``).

- If a transfer fails, the run falls back to ``publish=inline``, and then to ``staging=none``. If an engine refused the
  weights, the order of these fallbacks is reversed. The run continues with the settings that worked.
- Any other failure ends the run with `RehearsalFailed`, which says what failed, where, and with which setting.

Shown by tests/integration/test_rehearsal.py and, in runs, tests/e2e/test_rehearsal.py.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import eq
from typing import Any, Self

import ray
import torch
from ray.exceptions import GetTimeoutError
from verl import DataProto
from verl.workers.utils.padding import left_right_2_no_padding

from recipe.async_engine.core.errors import WeightLoadError
from recipe.async_engine.core.rehearsed import FAILED, FELL_BACK, LEFT_OUT, PASSED, Check, Rehearsed, agreement
from recipe.async_engine.trainer.beside import Beside
from recipe.async_engine.trainer.probe import ANSWERS_PER_REPLICA, Answer, Probe, RehearsalFailed, ordinary_tokens
from recipe.async_engine.weights.publisher import NoReplicaLeft, PublishFailed, StagedVersion, WeightPublisher
from recipe.async_engine.weights.replica_set import ReplicaRecord, plain_cause

logger = logging.getLogger(__name__)

TOKENS_AT_ONCE = 1024
"""Number of tokens in a micro-batch, which is small because the free memory for logits is not known."""

Pairs = dict[str, list[tuple[float, float]]]
"""For each replica, by name: a pair for each token, with its log-probs from the two sources that are compared."""


@dataclass
class Rehearsal:
    """The rehearsal of a run. The trainer's thread calls `run` once.

    Attributes:
        workers: verl's group of the trainer's workers, which are of the class `ActorWorker`.
        rollout: verl's rollout section of the configuration.
        log_probs: verl's forward pass for old log-probs, with the trainer's current weights.
        published: a function that returns a context in which the trainer computes with the published weights.
        timeout_s: deadline of each step, in seconds.
        position_rows: number of position ids for each token, more than 1 for models with positions in images.
        result: the checks and their outcomes, even if `run` raises an error.
    """

    publisher: WeightPublisher
    workers: Any
    ranks: int
    version: int
    probe: Probe
    rollout: Any
    log_probs: Callable[[DataProto], Any]
    published: Callable[[], AbstractContextManager[None]]
    timeout_s: float
    position_rows: int = 1
    result: Rehearsed = field(default_factory=Rehearsed)

    @classmethod
    def of(cls, trainer: Any, publisher: WeightPublisher, result: Rehearsed | None = None) -> Self:
        """Return the rehearsal of ``publisher``, one of the publishers of ``trainer`` (`AsyncPPOTrainer`).

        The first version must have been published. If ``result`` is given, the checks are added to it.
        """
        rollout, timeout_s = trainer.config.actor_rollout_ref.rollout, trainer.timeouts.rehearsal
        return cls(
            publisher,
            trainer.actor_rollout_wg,
            trainer.plan.trainer_ranks,
            trainer.ledger.version,
            Probe(rollout, ordinary_tokens(trainer.tokenizer), timeout_s),
            rollout,
            trainer.stages.old_log_probs,
            trainer.published.in_use if trainer.is_within_version else nullcontext,
            timeout_s,
            # verl's agent loops use 4 rows for positions in images (experimental/agent_loop/agent_loop.py:964).
            position_rows=4 if hasattr(trainer.processor, "get_rope_index") else 1,
            result=result or Rehearsed(),
        )

    def run(self) -> None:
        """Rehearse; raise RehearsalFailed if the run would not work."""
        began = time.monotonic()
        try:
            self.rehearse()
        finally:
            self.result.seconds += time.monotonic() - began

    def rehearse(self) -> None:
        present = self.generating()
        with self.checking("engines answer"):
            sampled, before = self.probe.sampled(present), self.probe.sampled(present, greedy=True)
        self.send_again(sampled)
        with self.checking("engines answer as before") as check:
            if lost := [record.name for record in present if record.dead]:
                raise RehearsalFailed(f"replicas were lost: {', '.join(lost)} ({self.publisher.known.errors})")
            after = self.probe.sampled(present, greedy=True)
            check.said = self._judge("answers of {} changed, though the weights did not", _same_tokens(before, after))

    def generating(self) -> list[ReplicaRecord]:
        """Return the rollout replicas, without the log-prob servers."""
        return [record for record in self.publisher.known.present if record.generates]

    @contextmanager
    def checking(self, name: str) -> Iterator[Check]:
        """Record a check, which passes unless the ``with`` block raises an error or sets another outcome."""
        began, check = time.monotonic(), Check(name)
        try:
            yield check
        except (NoReplicaLeft, PublishFailed):
            raise
        except Exception as error:  # whatever fails here would also fail later in the run
            if self.result.has_failed:  # a nested check has failed, and its failure is recorded already
                raise
            self.result.checks.append(Check(name, FAILED, str(error), time.monotonic() - began))
            raise RehearsalFailed(f"{name}: {error}") from error
        check.seconds = time.monotonic() - began
        self.result.checks.append(check)

    # The following methods send the weights. `HybridRehearsal` overrides `send_again`.

    def send_again(self, before: list[Answer]) -> None:
        """Send the published version once more with the run's settings, or with fallback settings if these fail.

        Then compare the log-probs of the answers in ``before`` with the trainer's.
        """
        check = self._sent()
        while check.outcome == FELL_BACK:
            check = self._sent()
        self.compare(before)

    def _sent(self) -> Check:
        """Send the weights once with the publisher's present settings, and return a `Check` with the outcome.

        If the weights do not arrive, change the publisher's settings to a fallback, if any is left. The outcome is then
        `FELL_BACK`, and the caller sends again.
        """
        weights, began = self.publisher.weights, time.monotonic()
        check = Check(f"weights arrive (publish={weights.publish}, staging={weights.staging})")
        cause: Exception | None = None
        try:
            check.said = self._send()
        except (NoReplicaLeft, PublishFailed) as error:
            cause, check.said = error, str(error).partition("\n")[0]
        setting = None if cause is None else self._fall_back()
        check.seconds = time.monotonic() - began
        self.result.checks.append(check)
        if setting is not None:
            check.outcome = FELL_BACK
            self.result.fallbacks.append(setting)
            logger.warning("rehearsal: %s: %s. The run goes on with %s", check.name, check.said, setting)
        elif cause is not None:
            check.outcome = FAILED
            raise RehearsalFailed(f"{check.name}: {check.said}") from cause
        return check

    def _send(self) -> str:
        """Transfer the published version, and return a remark (or an empty text) for the check's report.

        With the run's own settings there is only one attempt, with the rehearsal's deadline. With fallback settings,
        the number of attempts and the deadline are those of weight syncs in training.
        """
        with nullcontext() if self.result.fallbacks else self.in_haste():
            if self.publisher.weights.publish != "beside":
                self.work()
                with self.published():
                    self._bring()
                return ""
            with self.published():
                self.publisher.snapshot(self.version)
            late = PublishFailed(f"the transfer of weights was not over within {self._longest_s:g} s")
            sync: Beside[None] = Beside("rehearsed-sync", self._longest_s, lambda number: late)
            sync.begin(self.version, self._bring)
            passes = self.work(until=lambda: sync.is_over)
            sync.wait()
        self.result.passes += passes
        return f"during {passes} passes of every trainer rank"

    def _bring(self) -> None:
        staged, weights = self.publisher.stage(self.version), self.publisher.weights
        if weights.staging != "none":
            self._see_all_have(staged)

        def swap() -> None:
            self.publisher.swap(staged)
            self._see_all_have(staged)
            self._note_servers(staged)
            self.publisher.resume(staged)

        name = "requests go on after a swap"
        if weights.at_swap == "drain":
            self.result.checks.append(Check(name, LEFT_OUT, "a swap waits for running answers (at_swap=drain)"))
            swap()
            return
        with self.checking(name) as check:
            self.under_requests(swap, check)

    def under_requests(self, change: Callable[[], None], check: Check) -> None:
        """Call ``change`` while each replica generates an answer, and record in ``check`` how the answers ended."""
        answers = self.probe.under(self.generating(), change, self._longest_s)
        cut = sum(answer.requests > 1 for answer in answers)
        check.said = f"{len(answers)} answers were completed, {cut} of them after an interruption"
        if not cut and self.publisher.weights.at_swap == "interrupt":
            check.outcome, check.said = LEFT_OUT, "all answers were completed before the swap could interrupt them"

    def _see_all_have(self, staged: StagedVersion) -> None:
        lacking = [record.name for record in self.generating() if record not in staged.holders]
        if lacking:
            raise PublishFailed(f"{', '.join(lacking)} did not get the weights: {self.publisher.known.errors}")

    def _note_servers(self, staged: StagedVersion) -> None:
        """Record which log-prob servers lack the version. The trainer will compute log-probs in their place."""
        servers = [record for record in self.publisher.known.records if not record.generates]
        said = "; ".join(f"{record.name}: {record.error}" for record in servers if record not in staged.holders)
        if servers:
            outcome = FELL_BACK if said else PASSED
            self.result.checks.append(Check("log-prob servers have the weights", outcome, said))
        if said:
            self.result.fallbacks.append("async_training.proximal_log_probs=recompute")
            logger.warning("rehearsal: the trainer computes log-probs in the place of %s", said)

    def _fall_back(self) -> str | None:
        """Apply the next fallback setting for the run's weight transfer and return it; return None if none is left."""
        publisher = self.publisher
        weights = publisher.weights
        inline = weights.publish == "beside"
        in_place = weights.staging != "none" and weights.at_swap != "keep"
        errors = [record.error for record in publisher.known.records if record.error is not None]
        refused = any(isinstance(plain_cause(error), WeightLoadError) for error in errors)
        if inline and not (refused and in_place):
            publisher.weights = dataclasses.replace(weights, publish="inline")
            return "async_training.weights.publish=inline"
        if in_place:
            publisher.weights = dataclasses.replace(weights, staging="none")
            return "async_training.weights.staging=none"
        return None

    @contextmanager
    def in_haste(self) -> Iterator[None]:
        """Limit transfers in the ``with`` block to one attempt, with the rehearsal's deadline."""
        publisher = self.publisher
        usual = publisher.known.timeout_s, publisher.attempts
        publisher.known.timeout_s, publisher.attempts = min(usual[0], self.timeout_s), 1
        try:
            yield
        finally:
            publisher.known.timeout_s, publisher.attempts = usual

    @property
    def _longest_s(self) -> float:
        # A transfer has four steps, each with the deadline `timeout_s`: it checks which replicas are alive, connects in
        # two steps, and sends. The margin is one more deadline and a minute.
        return 5 * self.publisher.known.timeout_s + 60

    # The following methods run computations of the model on the trainer's ranks.

    def work(self, until: Callable[[], bool] = lambda: True) -> int:
        """Do forward and backward passes on every trainer rank until ``until`` returns True; return their number.

        There is at least one pass.
        """
        numbers = range(ANSWERS_PER_REPLICA)
        prompts = [self.probe.tokens(number, self.probe.prompt_tokens) for number in numbers]
        answers = [self.probe.tokens(-number - 1, self.probe.answer_tokens) for number in numbers]
        data = left_right_2_no_padding(self._batch(prompts, answers).to_tensordict())
        passes = 0
        while passes == 0 or not until():
            try:
                # If a transfer blocks this pass, the transfer's own deadline ends first, and its error is reported.
                ray.get(self.workers.pass_without_update(data), timeout=self._longest_s)
            except GetTimeoutError:
                raise RehearsalFailed(
                    f"a forward and backward pass did not end within {self._longest_s:g} s during a weight sync "
                    "(async_training.timeouts.rehearsal); try async_training.weights.publish=inline"
                ) from None
            passes += 1
        return passes

    def _batch(self, prompts: list[list[int]], answers: list[list[int]]) -> DataProto:
        """Return a batch in the layout of verl's agent loops, with int64 rows of equal length (prompt + answer)."""
        whole = torch.tensor([prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
        rows, length = whole.shape
        responses = whole[:, len(prompts[0]) :]
        positions = torch.arange(length).repeat(rows, 1)
        if self.position_rows > 1:
            positions = positions[:, None].repeat(1, self.position_rows, 1)
        tensors = {
            "prompts": whole[:, : len(prompts[0])],
            "responses": responses,
            "response_mask": torch.ones_like(responses),
            "input_ids": whole,
            "attention_mask": torch.ones_like(whole),
            "position_ids": positions,
        }
        meta = {
            "temperature": self.rollout.temperature,
            "global_token_num": [length] * rows,
            # Micro-batches are limited by tokens, so the number of rows need not be a multiple of a micro-batch size.
            "use_dynamic_bsz": True,
            "max_token_len_per_gpu": TOKENS_AT_ONCE,
        }
        return DataProto.from_dict(tensors, meta_info=meta)

    def compare(self, answers: list[Answer]) -> None:
        """Check that the engines' log-probs agree with the trainer's."""
        name = "log-probs agree"
        if self.rollout.get("enable_rollout_routing_replay", False):
            self.result.checks.append(Check(name, LEFT_OUT, "the trainer replays what the engine's router chose"))
            return
        with self.checking(name) as check:
            # Add copies of the first answer, because every rank needs the same number of rows.
            rows = answers + answers[:1] * (-len(answers) % self.ranks)
            batch = self._batch([row.prompt for row in rows], [row.tokens for row in rows])
            with self.published():
                computed, _ = self.log_probs(batch)
            pairs: Pairs = {}
            for answer, row in zip(answers, computed.batch["old_log_probs"].tolist(), strict=False):
                pairs.setdefault(answer.replica, []).extend(zip(answer.log_probs, row, strict=True))
            check.said = self._judge("log-probs of {} are not the trainer's, as if weights or model differed", pairs)

    def _judge(self, fault: str, pairs: Pairs) -> str:
        """Return a text with the mean difference between log-probs of the replica in which it is largest.

        Raises:
            RehearsalFailed: the log-probs of some replicas do not agree. ``fault`` is the message, with a placeholder
                for the names of these replicas.
        """
        found = {name: agreement(both, str(self.rollout.dtype)) for name, both in pairs.items()}
        wrong = [name for name, each in found.items() if not each.holds]
        if wrong:
            raise RehearsalFailed(f"{fault.format(', '.join(wrong))}; log-probs of {wrong[0]} differ {found[wrong[0]]}")
        worst = max(found.values(), key=lambda each: each.difference)
        self.result.difference = max(self.result.difference, worst.difference)
        return f"they differ {worst}"


def _same_tokens(before: list[Answer], after: list[Answer]) -> Pairs:
    """Return, for each replica, pairs of a token's log-probs in ``before`` and in ``after``.

    Of each answer, only the tokens before the first token that differs are included.
    """
    pairs: Pairs = {}
    for one, other in zip(before, after, strict=True):
        shared = [*map(eq, one.tokens, other.tokens), False].index(False)
        both = zip(one.log_probs[:shared], other.log_probs[:shared], strict=True)
        pairs.setdefault(one.replica, []).extend(both)
    return pairs

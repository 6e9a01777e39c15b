# SPDX-License-Identifier: Apache-2.0
"""Trainers that lose a rollout replica during generation: SIGKILL at step 3, when one of its answers has some tokens.

At step 6 they wait for the replacement; after the last step they write to ``LOST`` what the replacement was asked.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import ray
from replacing import asked_of, wait_for_replacements
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from recipe.async_engine.trainer.base import AsyncPPOTrainer
from recipe.async_engine.weights.replica_set import generates

LOST_AT, WAITS_AT = 3, 6
TOKENS, ANSWER_TOKENS = 3, 24
ASK_S = 60.0
# Slightly longer than the client takes to fetch new tokens.
FETCHED_S = 0.2


class LongAnswers(SingleTurnAgentLoop):
    """Answers that take about two seconds."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        long = {**sampling_params, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
        return await super().run(long, **kwargs)


def pid(actor: Any) -> int:
    return os.getpid()


def sampled_tokens(server: Any) -> int:
    """Return the number of tokens of the longest answer in the server's engine."""
    newest = map(server._outputs.read, server._outputs._newest.values())
    return max((len(answer.token_ids) for answer in newest if answer is not None), default=0)


class Losing(AsyncPPOTrainer):
    """A trainer that loses a replica."""

    def _next_groups(self) -> Any:
        if self.global_steps == LOST_AT:
            threading.Thread(target=self._lose, daemon=True).start()
        if self.global_steps == WAITS_AT:
            wait_for_replacements(self.publisher)
        return super()._next_groups()

    def _train(self, groups: list[Any]) -> Any:
        batch = super()._train(groups)
        if self.is_last_step:
            replica = next(replica for replica in reversed(self._serving.replicas) if generates(replica))
            Path(os.environ["LOST"]).write_text(json.dumps({"asked_of_the_new_one": asked_of(self._serving, replica)}))
        return batch

    @property
    def _serving(self) -> Any:
        return self.hybrid or self.publisher

    def _lose(self) -> None:
        """Kill the replica when an unfinished answer has had tokens long enough for them to be fetched."""
        replica = self._serving.replicas[1]
        pids = [ray.get(actor.__ray_call__.remote(pid), timeout=ASK_S) for actor in self._parts(replica)]
        deadline = time.monotonic() + ASK_S
        while time.monotonic() < deadline:
            tokens = ray.get(replica.server_handle.__ray_call__.remote(sampled_tokens), timeout=ASK_S)
            time.sleep(FETCHED_S)
            more = ray.get(replica.server_handle.__ray_call__.remote(sampled_tokens), timeout=ASK_S)
            if TOKENS <= tokens < more < ANSWER_TOKENS:
                break
        for number in pids:
            os.kill(number, signal.SIGKILL)

    def _parts(self, replica: Any) -> list[Any]:
        # The workers of a hybrid replica are the trainer's ranks.
        return replica.servers if self.hybrid else [*replica.workers, *replica.servers]

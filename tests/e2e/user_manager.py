# SPDX-License-Identifier: Apache-2.0
"""An agent-loop manager as a user writes one: verl's, with workers that have a word in what an answer carries."""

from __future__ import annotations

from typing import Any

import ray
from verl.experimental.agent_loop.agent_loop import AgentLoopManager, AgentLoopWorker


class UserWorker(AgentLoopWorker):
    """Has each reward report how long the answer was."""

    async def _compute_score(self, outputs: list[Any], kwargs: dict[str, Any]) -> None:
        await super()._compute_score(outputs, kwargs)
        for output in outputs:
            output.extra_fields["reward_extra_info"]["of_the_users_worker"] = len(output.response_ids)


class UserManager(AgentLoopManager):
    """Makes actors of `UserWorker`, as verl's own subclasses do of theirs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.agent_loop_workers_class = ray.remote(UserWorker)
        super().__init__(*args, **kwargs)


class BatchManager(AgentLoopManager):
    """Overrides what no mode calls."""

    def generate_sequences(self, prompts: Any) -> Any:
        return prompts


class BatchWorkerManager(AgentLoopManager):
    """Its worker does."""

    class Worker(AgentLoopWorker):
        async def generate_sequences(self, batch: Any) -> Any:
            return batch

    agent_loop_workers_class = ray.remote(Worker)


class NoManager:
    """No subclass of verl's."""

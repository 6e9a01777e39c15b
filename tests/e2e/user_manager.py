# SPDX-License-Identifier: Apache-2.0
"""A user's agent-loop manager: verl's, with workers that add to an answer's fields."""

from __future__ import annotations

from typing import Any

import ray
from verl.experimental.agent_loop.agent_loop import AgentLoopManager, AgentLoopWorker


class UserWorker(AgentLoopWorker):
    """Adds the answer's length to each reward's extra information."""

    async def _compute_score(self, outputs: list[Any], kwargs: dict[str, Any]) -> None:
        await super()._compute_score(outputs, kwargs)
        for output in outputs:
            output.extra_fields["reward_extra_info"]["of_the_users_worker"] = len(output.response_ids)


class UserManager(AgentLoopManager):
    """Creates actors of `UserWorker`, as verl's own subclasses do with theirs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.agent_loop_workers_class = ray.remote(UserWorker)
        super().__init__(*args, **kwargs)


class BatchManager(AgentLoopManager):
    """A manager that overrides a method that no mode calls."""

    def generate_sequences(self, prompts: Any) -> Any:
        return prompts


class BatchWorkerManager(AgentLoopManager):
    """A manager whose worker overrides a method that no mode calls."""

    class Worker(AgentLoopWorker):
        async def generate_sequences(self, batch: Any) -> Any:
            return batch

    agent_loop_workers_class = ray.remote(Worker)


class NoManager:
    """A class that does not derive from verl's manager."""

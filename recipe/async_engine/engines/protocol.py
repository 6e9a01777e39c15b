# SPDX-License-Identifier: Apache-2.0
"""What this package asks of a rollout engine, and where the engines are.

Contract: whatever is above knows an engine by these protocols alone, so that another one is a folder beside `vllm`,
and a row of `ENGINES` (`recipe.async_engine.config.verdicts`). An engine is three things: a replica in the trainer's
process, its servers, and its weight workers, actors both. Shown by tests/integration/test_second_engine.py, whose
engine of a few dozen lines gets weights, answers and is lost as vLLM's is.

The promises that an engine keeps, since nothing above it can:

- A server answers with complete weights only. Until the first ones have come requests wait, and a load or swap that is
  cut off leaves the server closed.
- Staged weights change nothing until the swap. What is staged is complete by the model's own parameters, and has the
  checksum that the weight worker returns.
- Each answer says which versions sampled which of its tokens.
"""

from __future__ import annotations

from typing import Any, Protocol

from verl.utils.import_utils import load_class_from_fqn
from verl.workers.rollout.replica import TokenOutput

from recipe.async_engine.config.verdicts import ENGINES
from recipe.async_engine.engines.answers import Sampled
from recipe.async_engine.record.activity import Work
from recipe.async_engine.record.events import Activity


class RolloutEngine(Protocol):
    """A replica, in the trainer's process: verl's `RolloutReplica`, and what is asked of all of its servers at once.

    It is made with ``(replica_rank, config, model_config, gpus_per_node, reservations=)``, and started by verl's
    ``init_standalone`` or ``init_hybrid``.
    """

    replica_rank: int
    server_address: str
    """Its name in the load balancer."""
    server_handle: Any
    """The server that requests go to: an actor with the methods of `RolloutServer`."""
    servers: list[Any]
    """All of its servers, one a node."""
    workers: list[Any]
    """Actors with the methods of `WeightWorker`, one an accelerator."""

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> None:
        """Pause: end all requests, with the tokens that they have. Later ones wait, or with ``reject_request`` fail."""

    async def hold_requests(self) -> None:
        """Pause, with the requests in the engine: they go on when generation resumes, under the weights of then."""

    async def resume_generation(self) -> None:
        """Go on generating."""

    async def release_kv_cache(self) -> None:
        """Give the memory of keys and values back, before weights are loaded in place."""

    async def resume_kv_cache(self) -> None:
        """Have that memory again."""

    async def sleep(self) -> None:
        """Give all memory back, weights included: the trainer, on the same accelerators, has its turn."""


class RolloutServer(Protocol):
    """A server, an actor. Requests are asked with ``generate``; the rest is answered while requests are open."""

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        work: Work = Work.OTHER,
        sampled: int = 0,
        **kwargs: Any,
    ) -> TokenOutput:
        """Answer, by complete weights; ``sampled`` tokens at the end of the prompt are of the answer already."""

    async def drop_request(self, request_id: str) -> None:
        """End a request that nobody waits for any more."""

    async def sampled_since(self, known: dict[str, int]) -> dict[str, Sampled]:
        """Count: what was sampled for requests under way, after as many tokens as ``known`` says of each."""

    async def wide_parameters(self) -> list[str]:
        """Names of the parameters that the engine holds in a wider dtype than the model's."""

    async def swap(self, version: int, checksum: str) -> None:
        """Make the staged weights the live ones, and commit the version; nothing generates meanwhile."""

    async def leave_routing(self) -> None:
        """Answer every waiting and later request as aborted, until the next complete load."""

    async def check_engine(self) -> None:
        """Health: raises `EngineDied` if the engine is gone."""

    async def activity(self) -> Activity:
        """What the engine did since this was asked last."""

    async def describe(self) -> list[str]:
        """Lines for a run that stalls: whether it answers, and what it waits for."""


class WeightWorker(Protocol):
    """The receiving end of a weight sync, an actor: verl's `CheckpointEngineWorker`, which stages as well."""

    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """As verl's: have the checkpoint engine do ``method``."""

    async def stage_weights(self, global_steps: int) -> str | None:
        """Load: receive a version and stage it beside the live weights; returns its checksum, on the leading rank."""

    async def update_weights(self, global_steps: int | None = None) -> str | None:
        """Load a version in place; the server is closed from the first tensor until the last one is there."""


def engine_class(name: str) -> Any:
    """The `RolloutEngine` of ``actor_rollout_ref.rollout.name``."""
    return load_class_from_fqn(ENGINES[name])

# SPDX-License-Identifier: Apache-2.0
"""The interface of a rollout engine.

Contract: the other packages use an engine only through these protocols, so another engine is a package beside `vllm`
and a row of `ENGINES` (`recipe.async_engine.config.verdicts`). An engine consists of a replica in the trainer's
process, its servers, and its weight workers; the latter two are actors. tests/integration/test_second_engine.py shows
it with an engine of a few dozen lines, which receives weights, answers requests and is lost like vLLM's.

An engine itself must guarantee the following, since no caller can:

- A server answers only with complete weights. Requests wait until the first ones have been loaded, and a load or swap
  that is cut off leaves the server closed.
- Staged weights change nothing until the swap. Staged weights cover all of the model's parameters, and have the
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
    """A replica, in the trainer's process: verl's `RolloutReplica` with operations on all of its servers at once.

    It is created with ``(replica_rank, config, model_config, gpus_per_node, reservations=)``, and started by verl's
    ``init_standalone`` or ``init_hybrid``.
    """

    replica_rank: int
    server_address: str
    """Its name in the load balancer."""
    server_handle: Any
    """The server that receives requests: an actor with the methods of `RolloutServer`."""
    servers: list[Any]
    """All of its servers, one per node."""
    workers: list[Any]
    """Actors with the methods of `WeightWorker`, one per accelerator."""

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> None:
        """Pause, ending all requests with their tokens; later ones wait, or fail with ``reject_request``."""

    async def hold_requests(self) -> None:
        """Pause, keeping the requests; they continue with the weights that are live when generation resumes."""

    async def resume_generation(self) -> None:
        """Resume generation."""

    async def release_kv_cache(self) -> None:
        """Free the memory of the KV cache, before weights are loaded in place."""

    async def resume_kv_cache(self) -> None:
        """Allocate the memory of the KV cache again."""

    async def sleep(self) -> None:
        """Free all memory, including the weights, for the trainer on the same accelerators."""


class RolloutServer(Protocol):
    """A server, as an actor. It answers all other calls while ``generate`` calls are open."""

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        work: Work = Work.OTHER,
        sampled: int = 0,
        **kwargs: Any,
    ) -> TokenOutput:
        """Answer with complete weights; the last ``sampled`` tokens of the prompt already belong to the answer."""

    async def drop_request(self, request_id: str) -> None:
        """End a request that nobody waits for any more."""

    async def sampled_since(self, known: dict[str, int]) -> dict[str, Sampled]:
        """Return what was sampled for each request in progress after the token count given in ``known``."""

    async def wide_parameters(self) -> list[str]:
        """Return the names of parameters that the engine holds in a wider dtype than the model's."""

    async def swap(self, version: int, checksum: str) -> None:
        """Make the staged weights the live ones and commit the version; nothing generates meanwhile."""

    async def leave_routing(self) -> None:
        """Answer every waiting and later request as aborted, until the next complete load."""

    async def check_engine(self) -> None:
        """Raise `EngineDied` if the engine is gone."""

    async def activity(self) -> Activity:
        """Return what the engine did since the last call."""

    async def describe(self) -> list[str]:
        """Return lines of text for a report on a stalled run: whether the server answers, and what it waits for."""


class WeightWorker(Protocol):
    """The receiving end of a weight sync, an actor: verl's `CheckpointEngineWorker` with staging added."""

    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call ``method`` of the checkpoint engine, as in verl."""

    async def stage_weights(self, global_steps: int) -> str | None:
        """Receive a version and stage it beside the live weights; return its checksum on the leading rank."""

    async def update_weights(self, global_steps: int | None = None) -> str | None:
        """Load a version in place; the server is closed from the first tensor to the last."""


def engine_class(name: str) -> Any:
    """Return the `RolloutEngine` class for ``actor_rollout_ref.rollout.name``."""
    return load_class_from_fqn(ENGINES[name])

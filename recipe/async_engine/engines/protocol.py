# SPDX-License-Identifier: Apache-2.0
"""The interface of a rollout engine.

Contract: the other packages use an engine only through these protocols. To add an engine, add a package next to `vllm`,
and entries to `ENGINES` and `ADAPTERS` (`recipe.async_engine.config.verdicts`). An engine consists of a replica object
in the trainer's process, and of servers and weight workers, which are Ray actors.
tests/integration/test_second_engine.py has an example of a few dozen lines.

An engine must guarantee the following, because its callers cannot:

- A server answers only with complete weights. Requests wait until the first weights have been loaded. An interrupted
  load or swap leaves the server closed to requests.
- Staging new weights does not change a server's answers before the swap. Staged weights contain all parameters of the
  model and have the checksum that the weight worker returns.
- Each answer reports which version sampled each of its tokens.
"""

from __future__ import annotations

from typing import Any, Protocol

from verl.utils.import_utils import load_class_from_fqn
from verl.workers.rollout.replica import TokenOutput

from recipe.async_engine.config.verdicts import ADAPTERS, ENGINES
from recipe.async_engine.engines.answers import Sampled
from recipe.async_engine.record.activity import Work
from recipe.async_engine.record.events import Activity


class RolloutEngine(Protocol):
    """A replica of the engine: an object like verl's `RolloutReplica`, whose methods act on all of its servers.

    The constructor's arguments are ``(replica_rank, config, model_config, gpus_per_node, reservations=)``. verl's
    ``init_standalone`` or ``init_hybrid`` starts the replica.
    """

    replica_rank: int
    server_address: str
    """The replica's name in the load balancer."""
    server_handle: Any
    """The server that receives requests: an actor with the methods of `RolloutServer`."""
    servers: list[Any]
    """All servers of the replica, one per node."""
    workers: list[Any]
    """The replica's weight workers, one for each accelerator: actors with the methods of `WeightWorker`."""

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> None:
        """Pause generation, and return all open requests as aborted, with the tokens sampled so far.

        Later requests wait, or are returned as aborted if ``reject_request`` is true.
        """

    async def hold_requests(self) -> None:
        """Pause generation but keep all requests, which continue with the live weights after `resume_generation`."""

    async def resume_generation(self) -> None:
        """Resume generation after `abort_all_requests` or `hold_requests`."""

    async def release_kv_cache(self) -> None:
        """Free the memory of the KV cache, before weights are loaded over the live ones."""

    async def resume_kv_cache(self) -> None:
        """Allocate the memory of the KV cache again."""

    async def sleep(self) -> None:
        """Free all memory, including that of the weights, for a trainer on the same accelerators."""


class RolloutServer(Protocol):
    """A rollout server, which is a Ray actor. Open calls of ``generate`` must not delay calls of other methods."""

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        work: Work = Work.OTHER,
        sampled: int = 0,
        **kwargs: Any,
    ) -> TokenOutput:
        """Wait for complete weights, and answer a prompt.

        The last ``sampled`` tokens of ``prompt_ids`` already belong to the answer.
        """

    async def drop_request(self, request_id: str) -> None:
        """Abort a request whose caller no longer waits for it."""

    async def sampled_since(self, known: dict[str, int]) -> dict[str, Sampled]:
        """Return each request's new tokens. ``known`` has the number of tokens fetched so far, by request id."""

    async def wide_parameters(self) -> list[str]:
        """Return the names of parameters that the engine keeps in a wider dtype than the model's."""

    async def swap(self, version: int, checksum: str) -> None:
        """Make the staged weights live as ``version``. The caller pauses generation during this call."""

    async def leave_routing(self) -> None:
        """Until complete weights are loaded again, answer waiting and new requests as aborted, without tokens."""

    async def check_engine(self) -> None:
        """Raise `EngineDied` if the engine has died."""

    async def activity(self) -> Activity:
        """Return the engine's activities since the last call, with times, and its token counts since it started."""

    async def describe(self) -> list[str]:
        """Return lines of text for a report on a stalled run: the server's state, and what the server waits for."""


class WeightWorker(Protocol):
    """The Ray actor that receives weights for an engine, like verl's `CheckpointEngineWorker`, and can stage them."""

    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call ``method`` of the checkpoint engine, as in verl."""

    async def stage_weights(self, global_steps: int) -> str | None:
        """Receive a version and stage it next to the live weights. The leading rank returns the checksum."""

    async def update_weights(self, global_steps: int | None = None) -> str | None:
        """Receive a version and load it over the live weights. Until this is complete, requests wait."""


def engine_class(name: str) -> Any:
    """Return the `RolloutEngine` class for ``name``, a value of ``actor_rollout_ref.rollout.name``."""
    return load_class_from_fqn(ENGINES[name])


def adapter_class(name: str) -> Any:
    """Return the class that passes weights to engine ``name``: like verl's `ServerAdapter`, with `stage_weights` and
    ``checksum`` in addition.
    """
    return load_class_from_fqn(ADAPTERS[name])

# SPDX-License-Identifier: Apache-2.0
"""One transfer of weights: calls to the members (trainer ranks and receivers), and the outcome for each member.

Contract: every call has a deadline. A collective waits for every member, so as soon as one member fails, all members
leave the group, if their checkpoint engine has a method ``reset``. Shown by tests/integration/test_publisher.py and
test_nccl_engine.py.
"""

import asyncio
import logging
from typing import Any

from ray.exceptions import RayActorError
from verl.single_controller.ray import RayWorkerGroup

from recipe.async_engine.core.deadlines import PING_S
from recipe.async_engine.core.errors import RecipeError, WeightStreamError
from recipe.async_engine.weights.checksum import CHECKSUM, VERSION
from recipe.async_engine.weights.replica_set import ReplicaRecord, plain_cause

logger = logging.getLogger(__name__)

Metrics = dict[str, Any]


class ChecksumMismatch(RecipeError):
    """The weights that a replica loaded have another checksum than the weights that the trainer sent."""


async def outcomes(references: list[Any], timeout_s: float) -> list[Any]:
    """Return the value of each Ray reference, or its exception. For a value that is not there in time, the exception is
    a TimeoutError.
    """
    calls = [_in_time(reference, timeout_s) for reference in references]
    return await asyncio.gather(*calls, return_exceptions=True)


class TransferGroup:
    """The members of one transfer. Each call to a member's checkpoint engine may take ``timeout_s`` seconds."""

    def __init__(self, trainer: RayWorkerGroup, receivers: RayWorkerGroup, engine_class: Any, timeout_s: float) -> None:
        self._trainer, self._receivers = trainer, receivers
        self._engine_class, self._timeout_s = engine_class, timeout_s

    async def connect(self) -> list[Any]:
        """Build the process group like verl's ``build_process_group``, but with deadlines.

        Returns:
            An empty list if the group was built. Otherwise an error for each member: its own error if it failed, or
            else a `WeightStreamError` which says that the group was not built.
        """
        ranks, others = self._trainer.world_size, self._receivers.world_size
        prepared = self._trainer.execute_checkpoint_engine(["prepare"] * ranks)
        prepared += self._receivers.execute_checkpoint_engine(["prepare"] * others)
        metadata = await outcomes(prepared, self._timeout_s)
        if broken := _no_group(metadata):
            return broken
        to_trainer, to_receivers = self._engine_class.build_topology(ranks, others, metadata)
        to_trainer["method"] = ["init_process_group"] * ranks
        to_receivers["method"] = ["init_process_group"] * others
        joined = self._trainer.execute_checkpoint_engine(**to_trainer)
        joined += self._receivers.execute_checkpoint_engine(**to_receivers)
        return _no_group(await outcomes(joined, self._timeout_s))

    async def transferred(self, calls: list[Any]) -> list[Any]:
        """Await ``calls`` and return the value or exception of each. If a call fails, all members leave the group, so
        that no other call hangs.
        """
        calls = [asyncio.ensure_future(_in_time(call, self._timeout_s)) for call in calls]
        await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        failed = next((error for call in calls if call.done() and (error := call.exception())), None)
        if failed is not None and hasattr(self._engine_class, "reset"):
            cause = plain_cause(failed)
            reason = f"another member failed: {type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
            await self.tell("reset", reason=reason)
        return await asyncio.gather(*calls, return_exceptions=True)

    async def tell(self, method: str, **arguments: Any) -> None:
        """Call ``method`` on every member's checkpoint engine. Log failures, except those of dead members, which a
        later call notices.
        """
        calls = []
        for group in (self._trainer, self._receivers):
            count = group.world_size
            of_each = {name: [value] * count for name, value in arguments.items()}
            calls += group.execute_checkpoint_engine([method] * count, **of_each)
        for outcome in await outcomes(calls, PING_S):
            if isinstance(outcome, Exception) and not isinstance(outcome, RayActorError):
                logger.warning("%s of a checkpoint engine failed: %r", method, plain_cause(outcome))


async def _in_time(reference: Any, timeout_s: float) -> Any:
    try:
        async with asyncio.timeout(timeout_s):
            return await reference
    except TimeoutError as error:
        if str(error):
            raise
        raise TimeoutError(f"no answer within {timeout_s:g} s") from None


def _no_group(outcomes: list[Any]) -> list[BaseException]:
    """Return an error for each member if one of ``outcomes`` is an error. Otherwise return an empty list.

    A member that did not fail itself gets an error which says that the group was not made.
    """
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if not errors:
        return []
    cause = plain_cause(errors[0])
    missed = WeightStreamError(f"the group was not made: {type(cause).__name__}: {cause}")
    return [outcome if isinstance(outcome, BaseException) else missed for outcome in outcomes]


def evaluated(
    records: list[ReplicaRecord], version: int, results: list[Any], ranks: int
) -> tuple[list[ReplicaRecord], Metrics, str | None, BaseException | None]:
    """Evaluate a transfer to ``records``.

    ``results`` has the results of the trainer's ranks, whose number is ``ranks``, and then those of each replica's
    workers. If a replica did not load the version, its record gets the error.

    Returns:
        The records of the replicas that loaded the version, the sender's metrics, the checksum of the weights that it
        sent, and the trainer's error or None.
    """
    trainer, receivers = results[:ranks], results[ranks:]
    trainer_error = next((result for result in trainer if isinstance(result, BaseException)), None)
    metrics = {key: value for result in trainer if isinstance(result, dict) for key, value in result.items()}
    checksum, sent_version = metrics.pop(CHECKSUM, None), metrics.pop(VERSION, version)
    if trainer_error is None and sent_version != version:
        trainer_error = WeightStreamError(f"the trainer sent version {sent_version} in place of version {version}")
    for record in records:
        count = len(record.replica.workers)
        outcome, receivers = receivers[:count], receivers[count:]
        record.error = next((result for result in outcome if isinstance(result, BaseException)), trainer_error)
        record.dead = any(isinstance(result, RayActorError) for result in outcome)
        found = {result for result in outcome if result is not None}
        if record.error is None and found != ({checksum} - {None}):
            record.error = ChecksumMismatch(
                f"loaded weights of version {version} with the checksum {', '.join(sorted(map(str, found)))}; the "
                f"trainer sent {checksum}"
            )
    return [record for record in records if record.error is None], metrics, checksum, trainer_error


def failed_by_itself(record: ReplicaRecord, trainer_error: BaseException | None) -> bool:
    """Return whether the replica of ``record`` failed for a reason of its own.

    The result is False if the replica did not fail, or failed only because the trainer or another member failed.
    """
    cause = None if record.error is None else plain_cause(record.error)
    return cause is not None and record.error is not trainer_error and not isinstance(cause, WeightStreamError)

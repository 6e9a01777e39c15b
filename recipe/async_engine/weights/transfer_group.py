# SPDX-License-Identifier: Apache-2.0
"""The members of one transfer of weights: the trainer's ranks and the receivers, each with a checkpoint engine.

Contract: every call has a deadline. As soon as one member fails, engines that can leave their group (``reset``) are
told to, since a collective waits for every member. Shown by tests/integration/test_publisher.py and
test_nccl_engine.py.
"""

import asyncio
import logging
from typing import Any

from ray.exceptions import RayActorError
from verl.single_controller.ray import RayWorkerGroup

from recipe.async_engine.core.errors import WeightStreamError
from recipe.async_engine.weights.replica_set import PING_TIMEOUT_S, plain_cause

logger = logging.getLogger(__name__)


async def outcomes(references: list[Any], timeout_s: float) -> list[Any]:
    """Each reference's value, or the exception it ended with; one that is late ends with TimeoutError."""
    calls = [_in_time(reference, timeout_s) for reference in references]
    return await asyncio.gather(*calls, return_exceptions=True)


class TransferGroup:
    """See the module's contract.

    Args:
        trainer: verl's group of the trainer's ranks.
        receivers: the same of whatever gets the weights.
        engine_class: of every member's checkpoint engine.
        timeout_s: deadline of each call.
    """

    def __init__(self, trainer: RayWorkerGroup, receivers: RayWorkerGroup, engine_class: Any, timeout_s: float) -> None:
        self._trainer, self._receivers = trainer, receivers
        self._engine_class, self._timeout_s = engine_class, timeout_s

    async def connect(self) -> list[Any]:
        """As verl's ``build_process_group``, with deadlines; a backend that keeps its group compares only.

        Returns:
            Nothing, or if a member failed what each of them has of it: its own error, or that there is no group.
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
        """Each call's outcome. Once one has failed the other members leave the group: they might wait for it."""
        calls = [asyncio.ensure_future(_in_time(call, self._timeout_s)) for call in calls]
        await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        failed = next((error for call in calls if call.done() and (error := call.exception())), None)
        if failed is not None and hasattr(self._engine_class, "reset"):
            cause = plain_cause(failed)
            reason = f"another member failed: {type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
            await self.tell("reset", reason=reason)
        return await asyncio.gather(*calls, return_exceptions=True)

    async def tell(self, method: str, **arguments: Any) -> None:
        """Have every member's engine do ``method``. Whoever cannot is missed in the next step."""
        calls = []
        for group in (self._trainer, self._receivers):
            count = group.world_size
            of_each = {name: [value] * count for name, value in arguments.items()}
            calls += group.execute_checkpoint_engine([method] * count, **of_each)
        for outcome in await outcomes(calls, PING_TIMEOUT_S):
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
    """What the members of a group have of its making: nothing if all of them succeeded."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if not errors:
        return []
    cause = plain_cause(errors[0])
    missed = WeightStreamError(f"the group was not made: {type(cause).__name__}: {cause}")
    return [outcome if isinstance(outcome, BaseException) else missed for outcome in outcomes]

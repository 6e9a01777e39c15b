# SPDX-License-Identifier: Apache-2.0
"""Calls from a rollout server to the methods of `StagingScheduler` in the processes of its SGLang engine.

A call is sent as SGLang's own request to update weights from tensors, because such a request reaches every process of
the engine between two steps. SGLang returns only the message of the first process, which therefore collects the results
of all.
"""

import json
from typing import Any

from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

from recipe.async_engine.core.errors import RecipeError

CALL = "recipe_call"
"""The ``load_format`` of an update request that carries a call instead of weights."""


class SchedulerCallFailed(RecipeError):
    """A call failed in a process of an SGLang engine."""


def request(method: str, *args: Any) -> UpdateWeightsFromTensorReqInput:
    """Return the request that calls ``method`` with arguments that JSON can represent."""
    return UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=[json.dumps([method, *args])], load_format=CALL, flush_cache=False
    )


async def call_each_worker(tokenizer_manager: Any, method: str, *args: Any) -> list[Any]:
    """Call a method in every process of the engine, and return the results.

    Raises:
        SchedulerCallFailed: the call failed in a process.
    """
    tokenizer_manager.auto_create_handle_loop()
    # SGLang's own method of this name would first wait until no request is running.
    answers = await tokenizer_manager.update_weights_from_tensor_communicator(request(method, *args))
    for answer in answers:
        if not answer.success:
            raise SchedulerCallFailed(f"the SGLang engine failed to {method.replace('_', ' ')}: {answer.message}")
    return [result for answer in answers for result in json.loads(answer.message)]

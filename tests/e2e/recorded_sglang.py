# SPDX-License-Identifier: Apache-2.0
"""`recorded_requests` for SGLang, which loads this module as one of its plugins where this folder is on the path.

With ``ENGINE_RAISES``, the first scheduler to compute something raises an error, and creates the file of that name.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


def install() -> None:
    """Make SGLang's schedulers append the tokens of new requests to the file ``ENGINE_RECORD``, or raise an error."""
    if not {"ENGINE_RECORD", "ENGINE_RAISES"} & os.environ.keys():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from recipe.async_engine.engines.sglang.processes import sampled_before

    def add(original: Any, scheduler: Any, req: Any, is_retracted: bool = False) -> Any:
        if not is_retracted:
            with Path(os.environ["ENGINE_RECORD"]).open("a") as file:
                file.write(json.dumps([*req.origin_input_ids, *sampled_before(req.sampling_params)]) + "\n")
        return original(scheduler, req, is_retracted)

    def run_batch(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        with suppress(FileExistsError):
            Path(os.environ["ENGINE_RAISES"]).touch(exist_ok=False)
            raise RuntimeError("out of order")
        return original(scheduler, *args, **kwargs)

    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    if "ENGINE_RECORD" in os.environ:
        HookRegistry.register(f"{scheduler}._add_request_to_queue", add, HookType.AROUND)
    if "ENGINE_RAISES" in os.environ:
        HookRegistry.register(f"{scheduler}.run_batch", run_batch, HookType.AROUND)

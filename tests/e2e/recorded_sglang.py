# SPDX-License-Identifier: Apache-2.0
"""`recorded_requests` for SGLang, which loads this module as one of its plugins where this folder is on the path."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def install() -> None:
    """Make SGLang's schedulers append the tokens of each new request to the file ``ENGINE_RECORD``, if it is set."""
    if "ENGINE_RECORD" not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from recipe.async_engine.engines.sglang.processes import sampled_before

    def add(original: Any, scheduler: Any, req: Any, is_retracted: bool = False) -> Any:
        if not is_retracted:
            with Path(os.environ["ENGINE_RECORD"]).open("a") as file:
                file.write(json.dumps([*req.origin_input_ids, *sampled_before(req.sampling_params)]) + "\n")
        return original(scheduler, req, is_retracted)

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler._add_request_to_queue", add, HookType.AROUND)

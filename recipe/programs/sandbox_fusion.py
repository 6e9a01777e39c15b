# SPDX-License-Identifier: Apache-2.0
"""The reward for programming tasks, with programs run by a Sandbox Fusion service, through verl's HTTP client.

    reward.custom_reward_function.path=pkg://recipe.programs.sandbox_fusion
    +reward.custom_reward_function.reward_kwargs.url=http://HOST:PORT/run_code

Use this reward on machines where bubblewrap cannot run. The service isolates programs, and limits their time to
`Limits.wall_s` and their memory to `Limits.memory_bytes`; `cpu_s`, `file_bytes` and `threads` have no effect. If the
service fails, the reward function raises an error, and its call is repeated as after any error. Shown by
tests/integration/test_sandbox_fusion.py, with an HTTP server that implements the service's protocol.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from verl.utils.reward_score.sandbox_fusion.utils import call_sandbox_api

from recipe.programs import reward as programs
from recipe.programs import sandboxed
from recipe.programs.sandbox import Ending, Limits, Outcome, SandboxUnavailable

CALL = "\nimport json\nexecute(*json.loads({}))\n"


def compute_score(*, url: str, **arguments: Any) -> dict[str, float]:
    """Score an answer as `reward.compute_score` does; ``url`` is the service's address with the path ``/run_code``."""
    return programs.compute_score(**arguments, run=partial(run, url))


def run(url: str, source: str, stdin: str, limits: Limits, call: tuple[str, Sequence[Any]] | None = None) -> Outcome:
    """Run a program on the service as `sandbox.run` does; raise SandboxUnavailable if the service does not run it."""
    if call is not None:
        source = inspect.getsource(sandboxed.execute) + CALL.format(repr(json.dumps([source, call])))
    seconds = max(1, math.ceil(limits.wall_s))
    # The first of the two time limits is for compilation, which a Python program does not need, so any value will do.
    answer, error = call_sandbox_api(url, source, stdin, seconds, seconds, limits.memory_bytes >> 20)
    if answer is None or answer.get("status") == "SandboxError":
        said = error if answer is None else answer.get("message")
        raise SandboxUnavailable(f"the Sandbox Fusion service at {url} did not run the program: {said}")
    result = answer.get("run_result") or {}
    stdout, stderr = ((result.get(name) or "").encode(errors="replace") for name in ("stdout", "stderr"))
    status = result.get("return_code")
    ending = Ending.WALL if result.get("status") == "TimeLimitExceeded" else Ending.EXIT
    if len(stdout) + len(stderr) > limits.output_bytes:
        ending = Ending.OUTPUT
    return Outcome(ending, 1 if status is None else int(status), stdout, stderr, result.get("execution_time") or 0.0)

# SPDX-License-Identifier: Apache-2.0
"""Runs programs with a vLLM engine of their own, on a CPU or an accelerator: vLLM selects its platform at import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from recipe.async_engine import features

HERE = Path(__file__).parent
# Bounds for differences of log-probs, by the engine's dtype: above its rounding, and below the effect of other weights.
BOUNDS = {"float32": (1e-4, 0.1), "bfloat16": (0.25, 0.5)}
ENGINE_IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
ON_DEVICE = {
    "cpu": {
        **ENGINE_IN_PROCESS,
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": features.MODULE_NAME,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    },
    # As in a rollout server.
    "cuda": {**ENGINE_IN_PROCESS, "VLLM_USE_V2_MODEL_RUNNER": "0"},
}


def seen_by(program: str, device: str, *arguments: str, timeout_s: float = 300) -> dict[str, Any]:
    """Run a program of this folder (or any path) with the device and these arguments; return its results."""
    folders = [str(HERE.parents[1]), str(HERE.parent / "e2e"), os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(filter(None, folders))
    environment = os.environ | {"PYTHONPATH": path} | ON_DEVICE[device]
    finished = subprocess.run(
        [sys.executable, str(HERE / program), device, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-5000:]
    return json.loads(finished.stdout.splitlines()[-1])

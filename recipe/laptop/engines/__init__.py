# SPDX-License-Identifier: Apache-2.0
"""Adapters with which rollout engines run on a CPU. This module imports none of them before `install` is called."""

ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    # vLLM's default "auto" would pin all vLLM workers of a machine to the same cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Environment variables of the processes of an engine."""

IN_ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Keeps vLLM from changing the executor from "uni" to "mp", which vLLM does only to set OpenMP's variables.

This package sets these variables itself. vLLM's asynchronous engine still runs in a process of its own.
"""

NO_USAGE_STATS = {"VLLM_NO_USAGE_STATS": "1"}

DEFAULT = "vllm"
MODULES = {
    "vllm": (
        "recipe.laptop.engines.vllm_cpu",
        "vllm.v1.engine.core",
        "vllm.v1.executor.uniproc_executor",
        "vllm.v1.worker.cpu_worker",
        "vllm.model_executor.models.qwen3",
    ),
    "sglang": ("recipe.async_engine.engines.sglang.replica", "sglang.srt.models.qwen3"),
}
"""For each engine, the modules whose import takes most of the time when one of its processes starts."""


def install() -> None:
    """Let verl and the engines find what they need on a CPU. A second call does no harm."""
    from recipe.laptop.engines import sglang_cpu, vllm_distribution

    vllm_distribution.install()
    sglang_cpu.install()

# SPDX-License-Identifier: Apache-2.0
"""Adapters with which rollout engines run on a CPU. They are imported only when `install` is called."""

ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    # With the default, "auto", vLLM would pin all vLLM workers of a machine to the same cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Environment variables for the processes of a rollout engine on a CPU."""

IN_ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Keeps vLLM from changing the executor from "uni" to "mp", which vLLM does only to set variables of OpenMP.

This package sets those variables itself. vLLM's asynchronous engine still runs in a process of its own.
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
    """Let verl and the engines find what they need on a CPU. Calling this again does no harm."""
    from recipe.laptop.engines import sglang_cpu, vllm_distribution

    vllm_distribution.install()
    sglang_cpu.install()

# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine on the CPU that returns the experts which its routers chose.

The kernel of vLLM's CPU build does not pass on the experts that it selects, as the kernels of accelerators do; a worker
makes it do so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cut_cases import AT_ONCE
from routed_model import MOST_TOKENS, weights_of
from verl.workers.engine.fsdp.utils import unfuse_moe_params
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

from recipe.async_engine.engines.vllm.continued_answers import SCHEDULER
from recipe.async_engine.engines.vllm.engine_extension import staged_model_of
from recipe.laptop.engines.engine_extension import CPUStagingExtension


def return_experts() -> None:
    """Make the kernel of vLLM's CPU build pass on the experts that it selects."""
    select = CPUUnquantizedExperts._select_experts

    def selected(self: Any, *arguments: Any) -> Any:
        weights, experts = select(self, *arguments)
        if self.routing_replay_capture_fn is not None:
            self.routing_replay_capture_fn(experts)
        return weights, experts

    CPUUnquantizedExperts._select_experts = selected
    CPUUnquantizedExperts.supports_routing_replay_capture = lambda self: True


class Extension(CPUStagingExtension):
    """Stages the weights of a version without a transfer."""

    def __new__(cls, **arguments: Any) -> Extension:
        return_experts()
        return super().__new__(cls, **arguments)

    def stage_version(self, version: int) -> None:
        runner = self.model_runner
        if self._staged_model is None:
            self._staged_model = staged_model_of(runner.get_model(), runner.vllm_config, self.device, in_host=False)
        self._staged_model.begin()
        self._staged_model.load(list(unfuse_moe_params(weights_of(version).state_dict().items(), "qwen3_moe")))
        self._staged_model.complete(version)


def make_engine(folder: Path) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    settings = AsyncEngineArgs(
        model=str(folder),
        dtype="float32",
        max_model_len=MOST_TOKENS,
        max_num_seqs=AT_ONCE,
        # So few that long prompts are read in several steps.
        max_num_batched_tokens=96,
        kv_cache_memory_bytes=64 << 20,
        enforce_eager=True,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        distributed_executor_backend="mp",
        worker_extension_cls=f"{__name__}.{Extension.__name__}",
        scheduler_cls=SCHEDULER,
        # As verl's server sets it for `enable_rollout_routing_replay`.
        enable_return_routed_experts=True,
    )
    return AsyncLLM.from_engine_args(settings)

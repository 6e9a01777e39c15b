# SPDX-License-Identifier: Apache-2.0
"""Rules for SGLang as the rollout engine. `config.engine_arguments` lists arguments that are refused in every run."""

from collections.abc import Iterator, Mapping
from typing import Any

from recipe.async_engine.config.plan import hybrid_replicas, replica_size, rollout_accelerators
from recipe.async_engine.config.problems import Problem
from recipe.async_engine.config.rules.context import RuleContext
from recipe.async_engine.config.sections import SHARED
from recipe.async_engine.config.verl_types import ROLLOUT

ARGUMENTS = f"{ROLLOUT}.engine_kwargs.sglang"
ON_CPU: Mapping[str, Any] = {"device": "cpu", "attention_backend": "torch_native", "enable_memory_saver": False}
"""The arguments without which SGLang does not start on a CPU."""


def sglang(context: RuleContext) -> Iterator[Problem]:
    """Check the settings of SGLang, if it is the run's rollout engine."""
    if not context.on_sglang:
        return
    yield from _replicas(context)
    yield from _rooms(context)
    if context.on_cpu:
        for name, value in ON_CPU.items():
            if context.get(f"{ARGUMENTS}.{name}") != value:
                said = str(value).lower()
                advice = f"SGLang would look for an accelerator: set ++{ARGUMENTS}.{name}={said}."
                yield context.problem(f"{ARGUMENTS}.{name}", f"{said} where trainer.device=cpu", advice)
    elif context.get(f"{ROLLOUT}.free_cache_engine", True) and hybrid_replicas(context.config, context.settings):
        saver = f"{ARGUMENTS}.enable_memory_saver"
        if not context.get(saver, True):
            advice = "Without it, an engine keeps its memory while the trainer uses the same accelerators. Remove it."
            yield context.problem(saver, f"true with {ROLLOUT}.free_cache_engine=true", advice)


def _replicas(context: RuleContext) -> Iterator[Problem]:
    """Check that a replica is on one node, and that several replicas do not draw the same random numbers."""
    size, training = replica_size(context.config), context.settings.async_training
    hybrid = hybrid_replicas(context.config, context.settings)
    own = 0 if training.placement == SHARED else rollout_accelerators(context.config, context.settings)
    per_node = [context.settings.rollout.n_gpus_per_node] if own else []
    per_node += [context.count("trainer.n_gpus_per_node") or size] if hybrid else []
    if size > min(per_node, default=size):
        advice = "A replica of SGLang over several nodes was never tried: lower it, or take vLLM."
        allowed = f"at most {min(per_node)}, the accelerators of a node"
        yield context.problem(f"{ROLLOUT}.tensor_model_parallel_size", allowed, advice)
    if own // size + hybrid > 1 and context.get(f"{ARGUMENTS}.random_seed") is not None:
        advice = "All replicas would draw the same random numbers, and give equal answers to a prompt. Remove it."
        yield context.problem(f"{ARGUMENTS}.random_seed", "null with several replicas", advice)


def _rooms(context: RuleContext) -> Iterator[Problem]:
    """Check that SGLang's own limits leave room for the longest prompt and answer."""
    for name in ("context_length", "max_total_tokens"):
        room = context.count(f"{ARGUMENTS}.{name}")
        if room is not None and room < context.room:
            advice = "Answers would be cut off: raise it, or lower data.max_response_length."
            allowed = f"at least prompt and response together and one position, {context.room}"
            yield context.problem(f"{ARGUMENTS}.{name}", allowed, advice)

# SPDX-License-Identifier: Apache-2.0
"""Rules over the engines of training and generation, and over the accelerators that they need."""

from collections.abc import Iterator

from recipe.async_engine.settings.plan import replica_size, rollout_accelerators
from recipe.async_engine.settings.problems import Problem
from recipe.async_engine.settings.rules import rewards
from recipe.async_engine.settings.rules.context import RuleContext
from recipe.async_engine.settings.sections import SHARED
from recipe.async_engine.settings.verl_types import ACTOR, ROLLOUT

NCCL_ENGINE = "recipe.async_engine.weights.nccl_engine"
# The longest answer of the built-in task with lengths=long_tail, and the end token.
LONG_TAIL_TOKENS = 121


def rollout(context: RuleContext) -> Iterator[Problem]:
    if context.get(f"{ROLLOUT}.name") != "vllm":
        yield context.problem(f"{ROLLOUT}.name", "vllm", "Other rollout engines are not supported yet in this mode.")
    shared = context.settings.async_training.placement == SHARED
    if context.get("actor_rollout_ref.hybrid_engine") and not shared:
        advice = "This mode gives training and generation resources of their own; remove the setting."
        yield context.problem("actor_rollout_ref.hybrid_engine", "false", advice)
    if not context.get(f"{ROLLOUT}.calculate_log_probs"):
        advice = "Off-policy corrections and the staleness metrics need the log-probs of the policy that sampled."
        yield context.problem(f"{ROLLOUT}.calculate_log_probs", "true", advice)
    if context.get(f"{ROLLOUT}.full_determinism"):
        advice = "verl then gives every request the same seed, so the answers to one prompt come out equal."
        yield context.problem(f"{ROLLOUT}.full_determinism", "false", advice)
    if context.get(f"{ROLLOUT}.checkpoint_engine.backend") == "naive" and not shared:
        backend = "recipe_gloo" if context.on_cpu else "nccl"
        advice = f"naive copies within one process; set {ROLLOUT}.checkpoint_engine.backend={backend}."
        yield context.problem(f"{ROLLOUT}.checkpoint_engine.backend", "a backend that reaches other processes", advice)
    longest = (context.count("data.max_prompt_length") or 0) + (context.count("data.max_response_length") or 0)
    room = context.count(f"{ROLLOUT}.max_model_len")
    if room is not None and room < longest:
        advice = "Raise it, or lower data.max_prompt_length or data.max_response_length."
        yield context.problem(f"{ROLLOUT}.max_model_len", f"at least prompt and response together, {longest}", advice)


def engine(context: RuleContext) -> Iterator[Problem]:
    engine = context.get("model_engine", "dp")
    for section in context.trained:
        if (engine == "megatron") != (context.get(f"{section}.strategy") == "megatron"):
            allowed = "megatron" if engine == "megatron" else "fsdp or fsdp2"
            advice = f"The configuration was composed with model_engine={engine}; change one of the two."
            yield context.problem(f"{section}.strategy", allowed, advice)
        yield from _sequence_parallel(context, section)


def _sequence_parallel(context: RuleContext, section: str) -> Iterator[Problem]:
    """FSDP's, which slices packed sequences inside flash attention."""
    setting = f"{section}.ulysses_sequence_parallel_size"
    if context.get(f"{section}.strategy") == "megatron" or (context.count(setting) or 1) == 1:
        return
    model = "critic.model" if section == "critic" else "actor_rollout_ref.model"
    if not context.get(f"{model}.use_remove_padding"):
        advice = f"It slices packed sequences: set {model}.use_remove_padding=True, or the size to 1."
        yield context.problem(setting, f"1 with {model}.use_remove_padding=false", advice)
    if context.on_cpu:
        yield context.problem(setting, "1 where trainer.device=cpu", "It is done inside flash attention; set it to 1.")


def critic(context: RuleContext) -> Iterator[Problem]:
    if not context.has_critic:
        return
    mini, batch = context.count("critic.ppo_mini_batch_size"), context.batch_groups
    if batch is not None and (mini is None or batch % mini):
        advice = "A step trains the critic in mini-batches of so many prompts."
        yield context.problem("critic.ppo_mini_batch_size", f"a divisor of the batch of {batch} prompts", advice)


def micro_batches(context: RuleContext) -> Iterator[Problem]:
    """What verl asserts when the workers are up (verl/workers/config/actor.py:199-209, critic.py)."""
    for section in context.trained:
        micro = [context.get(f"{section}.ppo_micro_batch_size{suffix}") for suffix in ("", "_per_gpu")]
        if context.get(f"{section}.use_dynamic_bsz") or micro.count(None) == 1:
            continue
        allowed = f"an integer >= 1 where {section}.use_dynamic_bsz=false, and {section}.ppo_micro_batch_size null"
        advice = f"Set it, or {section}.use_dynamic_bsz=True, and remove ppo_micro_batch_size."
        yield context.problem(f"{section}.ppo_micro_batch_size_per_gpu", allowed, advice)


def lora(context: RuleContext) -> Iterator[Problem]:
    model = "actor_rollout_ref.model"
    for setting in (f"{model}.lora_rank", f"{model}.lora.rank"):
        if context.count(setting) is None:
            continue
        if context.on_cpu:
            advice = "vLLM's CPU build does not take adapters over the weight sync yet; train the whole model there."
            yield context.problem(setting, "0 where trainer.device=cpu", advice)
        elif not context.get(f"{model}.lora.merge"):
            advice = (
                "Otherwise verl 0.9.1 sends the frozen base alone (verl #7495), and nothing generates with the adapter."
            )
            yield context.problem(f"{model}.lora.merge", f"true with {setting}", advice)


def cpu(context: RuleContext) -> Iterator[Problem]:
    if not context.on_cpu:
        return
    for section in context.trained:
        if context.get(f"{section}.strategy") == "fsdp":
            advice = f"FSDP1 cannot start from parameters on the CPU; set {section}.strategy=fsdp2."
            yield context.problem(f"{section}.strategy", "fsdp2 where trainer.device=cpu", advice)
    for engine in context.engines:
        for setting in (f"{engine}.free_cache_engine", f"{engine}.enable_sleep_mode"):
            if context.get(setting, True):
                advice = f"vLLM has no sleep mode on a CPU; set ++{setting}=False."
                yield context.problem(setting, "false where trainer.device=cpu", advice)
    separate = context.settings.async_training.placement != SHARED
    if separate and context.get(f"{ROLLOUT}.checkpoint_engine.backend") in ("nccl", "nixl", "hccl"):
        advice = (
            "It needs an accelerator; set the backend to recipe_gloo and custom_backend_module to"
            " recipe.async_engine.weights.gloo_engine."
        )
        allowed = "recipe_gloo where trainer.device=cpu"
        yield context.problem(f"{ROLLOUT}.checkpoint_engine.backend", allowed, advice)
    elif separate and context.get(f"{ROLLOUT}.checkpoint_engine.custom_backend_module") == NCCL_ENGINE:
        advice = "That one has the engine nccl, which needs an accelerator."
        allowed = "recipe.async_engine.weights.gloo_engine where trainer.device=cpu, or the module of the backend"
        yield context.problem(f"{ROLLOUT}.checkpoint_engine.custom_backend_module", allowed, advice)
    yield from _bucket(context)
    budget, sequences = context.count(f"{ROLLOUT}.max_num_batched_tokens"), context.count(f"{ROLLOUT}.max_num_seqs")
    length = context.count(f"{ROLLOUT}.max_model_len")
    if budget is None or sequences is None or length is None or not context.get(f"{ROLLOUT}.enable_chunked_prefill"):
        return
    if budget < sequences * length:
        allowed = f"at least max_num_seqs * max_model_len, {sequences * length}"
        advice = "vLLM's CPU sampler fails when the prefill of a seeded request is chunked: raise it, or lower either."
        yield context.problem(f"{ROLLOUT}.max_num_batched_tokens", allowed, advice)


def _bucket(context: RuleContext) -> Iterator[Problem]:
    """On a CPU a tensor goes to vLLM's engine through one piece of shared memory, and whole."""
    setting = f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
    megabytes = context.count(setting)
    wide = context.get(f"{ACTOR}.fsdp_config.model_dtype", "fp32") in ("fp32", "float32")
    for fact in context.files:
        if megabytes is not None and fact.largest_tensor is not None:
            name, elements = fact.largest_tensor
            needed = -(-elements * (4 if wide else 2) // (1 << 20))
            if needed > megabytes:
                allowed = f"at least {needed} where trainer.device=cpu, the megabytes of the model's {name}"
                yield context.problem(setting, allowed, f"Set {setting}={needed}.")


def resources(context: RuleContext) -> Iterator[Problem]:
    nodes, per_node = context.count("trainer.nnodes"), context.count("trainer.n_gpus_per_node")
    shared = context.settings.async_training.placement == SHARED
    if shared and (nodes is None or per_node is None):
        return
    generation, size = rollout_accelerators(context.config, context.settings), replica_size(context.config)
    setting = "trainer.n_gpus_per_node" if shared else "rollout.n_gpus_per_node"
    if generation % size:
        advice = "A replica takes tensor x data x pipeline parallel size; change those or the number of accelerators."
        yield context.problem(setting, f"such that {generation} divides by {size}", advice)
    if context.available is None or nodes is None or per_node is None:
        return
    training, there = nodes * per_node, context.available.accelerators
    generation = 0 if shared else generation
    reward, scoring = rewards.accelerators(context), context.settings.servers.accelerators
    if training + generation + reward + scoring > there:
        parts = (
            f"{training} trainer ranks" if shared else f"{training} trainer ranks and {generation} for rollout replicas"
        )
        parts += f" and {reward} for the reward model" if reward else ""
        parts += f" and {scoring} for log-prob servers" if scoring else ""
        local = " On a CPU they are logical: raise ray_kwargs.ray_init.num_gpus." if context.on_cpu else ""
        advice = f"The run needs {parts}. Ask for fewer, or for a larger cluster.{local}"
        yield context.problem(setting, f"at most what is there, {there} accelerators in all", advice)


def builtin_task(context: RuleContext) -> Iterator[Problem]:
    task, length = context.settings.builtin_task, context.count("data.max_response_length")
    if task is not None and task.lengths == "long_tail" and length is not None and length < LONG_TAIL_TOKENS:
        allowed = f"at least {LONG_TAIL_TOKENS} with builtin_task.lengths=long_tail"
        advice = "The long answers could never be right; preset=tiny_cpu_long_tail has lengths that fit."
        yield context.problem("data.max_response_length", allowed, advice)

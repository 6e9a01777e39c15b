# SPDX-License-Identifier: Apache-2.0
"""Refuses configurations that cannot run, before any process starts.

Contract: `validate` is a pure function of a configuration and of facts about the outside; it finds all problems at
once, and each names the setting, its value, what is allowed and what to change. `tests/core/test_config.py` has one
case for each rule.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from recipe.async_engine.core import algorithm_rules, batch_rules, data_rules, reward_rules, server_rules
from recipe.async_engine.core.case import ACTOR, ROLLOUT, Case
from recipe.async_engine.core.config import SHARED, lookup, read_settings, replica_size, rollout_accelerators
from recipe.async_engine.core.outside import FileFact, Resources
from recipe.async_engine.core.problems import ConfigError, Problem
from recipe.async_engine.core.shapes import well_formed

__all__ = ["ConfigError", "FileFact", "Problem", "Resources", "notices", "training_rows", "validate"]

# The longest answer of the built-in task with lengths=long_tail, and the end token.
LONG_TAIL_TOKENS = 121


def _rollout(case: Case) -> Iterator[Problem]:
    if case.get(f"{ROLLOUT}.name") != "vllm":
        yield case.problem(f"{ROLLOUT}.name", "vllm", "Other rollout engines are not supported yet in this mode.")
    shared = case.settings.async_training.placement == SHARED
    if case.get("actor_rollout_ref.hybrid_engine") and not shared:
        advice = "This mode gives training and generation resources of their own; remove the setting."
        yield case.problem("actor_rollout_ref.hybrid_engine", "false", advice)
    if not case.get(f"{ROLLOUT}.calculate_log_probs"):
        advice = "Off-policy corrections and the staleness metrics need the log-probs of the policy that sampled."
        yield case.problem(f"{ROLLOUT}.calculate_log_probs", "true", advice)
    if case.get(f"{ROLLOUT}.full_determinism"):
        advice = "verl then gives every request the same seed, so the answers to one prompt come out equal."
        yield case.problem(f"{ROLLOUT}.full_determinism", "false", advice)
    if case.get(f"{ROLLOUT}.checkpoint_engine.backend") == "naive" and not shared:
        backend = "recipe_gloo" if case.on_cpu else "nccl"
        advice = f"naive copies within one process; set {ROLLOUT}.checkpoint_engine.backend={backend}."
        yield case.problem(f"{ROLLOUT}.checkpoint_engine.backend", "a backend that reaches other processes", advice)
    longest = (case.count("data.max_prompt_length") or 0) + (case.count("data.max_response_length") or 0)
    room = case.count(f"{ROLLOUT}.max_model_len")
    if room is not None and room < longest:
        advice = "Raise it, or lower data.max_prompt_length or data.max_response_length."
        yield case.problem(f"{ROLLOUT}.max_model_len", f"at least prompt and response together, {longest}", advice)


def _engine(case: Case) -> Iterator[Problem]:
    engine = case.get("model_engine", "dp")
    for section in case.trained:
        if (engine == "megatron") != (case.get(f"{section}.strategy") == "megatron"):
            allowed = "megatron" if engine == "megatron" else "fsdp or fsdp2"
            advice = f"The configuration was composed with model_engine={engine}; change one of the two."
            yield case.problem(f"{section}.strategy", allowed, advice)
        yield from _sequence_parallel(case, section)


def _sequence_parallel(case: Case, section: str) -> Iterator[Problem]:
    """FSDP's, which slices packed sequences inside flash attention."""
    setting = f"{section}.ulysses_sequence_parallel_size"
    if case.get(f"{section}.strategy") == "megatron" or (case.count(setting) or 1) == 1:
        return
    model = "critic.model" if section == "critic" else "actor_rollout_ref.model"
    if not case.get(f"{model}.use_remove_padding"):
        advice = f"It slices packed sequences: set {model}.use_remove_padding=True, or the size to 1."
        yield case.problem(setting, f"1 with {model}.use_remove_padding=false", advice)
    if case.on_cpu:
        yield case.problem(setting, "1 where trainer.device=cpu", "It is done inside flash attention; set it to 1.")


def _critic(case: Case) -> Iterator[Problem]:
    if not case.has_critic:
        return
    mini, batch = case.count("critic.ppo_mini_batch_size"), case.batch_groups
    if batch is not None and (mini is None or batch % mini):
        advice = "A step trains the critic in mini-batches of so many prompts."
        yield case.problem("critic.ppo_mini_batch_size", f"a divisor of the batch of {batch} prompts", advice)


def _micro_batches(case: Case) -> Iterator[Problem]:
    """What verl asserts when the workers are up (verl/workers/config/actor.py:199-209, critic.py)."""
    for section in case.trained:
        micro = [case.get(f"{section}.ppo_micro_batch_size{suffix}") for suffix in ("", "_per_gpu")]
        if case.get(f"{section}.use_dynamic_bsz") or micro.count(None) == 1:
            continue
        allowed = f"an integer >= 1 where {section}.use_dynamic_bsz=false, and {section}.ppo_micro_batch_size null"
        advice = f"Set it, or {section}.use_dynamic_bsz=True, and remove ppo_micro_batch_size."
        yield case.problem(f"{section}.ppo_micro_batch_size_per_gpu", allowed, advice)


def _lora(case: Case) -> Iterator[Problem]:
    model = "actor_rollout_ref.model"
    for setting in (f"{model}.lora_rank", f"{model}.lora.rank"):
        if case.count(setting) is None:
            continue
        if case.on_cpu:
            advice = "vLLM's CPU build does not take adapters over the weight sync yet; train the whole model there."
            yield case.problem(setting, "0 where trainer.device=cpu", advice)
        elif not case.get(f"{model}.lora.merge"):
            advice = (
                "Otherwise verl 0.9.1 sends the frozen base alone (verl #7495), and nothing generates with the adapter."
            )
            yield case.problem(f"{model}.lora.merge", f"true with {setting}", advice)


def _cpu(case: Case) -> Iterator[Problem]:
    if not case.on_cpu:
        return
    for section in case.trained:
        if case.get(f"{section}.strategy") == "fsdp":
            advice = f"FSDP1 cannot start from parameters on the CPU; set {section}.strategy=fsdp2."
            yield case.problem(f"{section}.strategy", "fsdp2 where trainer.device=cpu", advice)
    for engine in case.engines:
        for setting in (f"{engine}.free_cache_engine", f"{engine}.enable_sleep_mode"):
            if case.get(setting, True):
                advice = f"vLLM has no sleep mode on a CPU; set ++{setting}=False."
                yield case.problem(setting, "false where trainer.device=cpu", advice)
    separate = case.settings.async_training.placement != SHARED
    if separate and case.get(f"{ROLLOUT}.checkpoint_engine.backend") in ("nccl", "nixl", "hccl"):
        advice = (
            "It needs an accelerator; set the backend to recipe_gloo and custom_backend_module to"
            " recipe.async_engine.weights.gloo_engine."
        )
        allowed = "recipe_gloo where trainer.device=cpu"
        yield case.problem(f"{ROLLOUT}.checkpoint_engine.backend", allowed, advice)
    yield from _bucket(case)
    budget, sequences = case.count(f"{ROLLOUT}.max_num_batched_tokens"), case.count(f"{ROLLOUT}.max_num_seqs")
    length = case.count(f"{ROLLOUT}.max_model_len")
    if budget is None or sequences is None or length is None or not case.get(f"{ROLLOUT}.enable_chunked_prefill"):
        return
    if budget < sequences * length:
        allowed = f"at least max_num_seqs * max_model_len, {sequences * length}"
        advice = "vLLM's CPU sampler fails when the prefill of a seeded request is chunked: raise it, or lower either."
        yield case.problem(f"{ROLLOUT}.max_num_batched_tokens", allowed, advice)


def _bucket(case: Case) -> Iterator[Problem]:
    """On a CPU a tensor goes to vLLM's engine through one piece of shared memory, and whole."""
    setting = f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
    megabytes = case.count(setting)
    wide = case.get(f"{ACTOR}.fsdp_config.model_dtype", "fp32") in ("fp32", "float32")
    for fact in case.files:
        if megabytes is not None and fact.largest_tensor is not None:
            name, elements = fact.largest_tensor
            needed = -(-elements * (4 if wide else 2) // (1 << 20))
            if needed > megabytes:
                allowed = f"at least {needed} where trainer.device=cpu, the megabytes of the model's {name}"
                yield case.problem(setting, allowed, f"Set {setting}={needed}.")


def _resources(case: Case) -> Iterator[Problem]:
    nodes, per_node = case.count("trainer.nnodes"), case.count("trainer.n_gpus_per_node")
    shared = case.settings.async_training.placement == SHARED
    if shared and (nodes is None or per_node is None):
        return
    generation, size = rollout_accelerators(case.config, case.settings), replica_size(case.config)
    setting = "trainer.n_gpus_per_node" if shared else "rollout.n_gpus_per_node"
    if generation % size:
        advice = "A replica takes tensor x data x pipeline parallel size; change those or the number of accelerators."
        yield case.problem(setting, f"such that {generation} divides by {size}", advice)
    if case.available is None or nodes is None or per_node is None:
        return
    training, there = nodes * per_node, case.available.accelerators
    generation = 0 if shared else generation
    reward, scoring = reward_rules.accelerators(case), case.settings.servers.accelerators
    if training + generation + reward + scoring > there:
        parts = (
            f"{training} trainer ranks" if shared else f"{training} trainer ranks and {generation} for rollout replicas"
        )
        parts += f" and {reward} for the reward model" if reward else ""
        parts += f" and {scoring} for log-prob servers" if scoring else ""
        local = " On a CPU they are logical: raise ray_kwargs.ray_init.num_gpus." if case.on_cpu else ""
        advice = f"The run needs {parts}. Ask for fewer, or for a larger cluster.{local}"
        yield case.problem(setting, f"at most what is there, {there} accelerators in all", advice)


def _builtin_task(case: Case) -> Iterator[Problem]:
    task, length = case.settings.builtin_task, case.count("data.max_response_length")
    if task is not None and task.lengths == "long_tail" and length is not None and length < LONG_TAIL_TOKENS:
        allowed = f"at least {LONG_TAIL_TOKENS} with builtin_task.lengths=long_tail"
        advice = "The long answers could never be right; preset=tiny_cpu_long_tail has lengths that fit."
        yield case.problem("data.max_response_length", allowed, advice)


RULES: tuple[Callable[[Case], Iterator[Problem]], ...] = (
    batch_rules.staleness,
    batch_rules.whole_batches,
    batch_rules.shared_placement,
    batch_rules.batch,
    batch_rules.division,
    algorithm_rules.advantages,
    algorithm_rules.losses,
    algorithm_rules.correction,
    _engine,
    _critic,
    _micro_batches,
    _lora,
    _rollout,
    _cpu,
    server_rules.proximal_log_probs,
    server_rules.log_prob_servers,
    reward_rules.reward_model,
    reward_rules.programs,
    _resources,
    _builtin_task,
    data_rules.files,
    data_rules.saving,
)


def validate(
    config: Mapping[str, Any],
    *,
    dataset_rows: int | None = None,
    available: Resources | None = None,
    files: Sequence[FileFact] = (),
) -> list[Problem]:
    """All problems of a configuration; none means that it may run.

    Args:
        config: The composed configuration as a plain, resolved mapping.
        dataset_rows: Prompts in the training data, where known; else `training_rows`.
        available: What there is to place workers on, where known.
        files: What was found at the paths that the configuration names.
    """
    config, problems = well_formed(config)
    settings, own = read_settings(config)
    problems += own
    if dataset_rows is None:
        dataset_rows = training_rows(config, files)
    case = Case(config, settings, dataset_rows, available, files)
    for rule in RULES:
        problems += rule(case)
    return problems


def training_rows(config: Mapping[str, Any], files: Sequence[FileFact]) -> int | None:
    """Prompts in the training data, or None where a file's rows are not known without loading it."""
    counts = [fact.rows for fact in files if fact.setting == "data.train_files"]
    known = [count for count in counts if count is not None]
    if not known or len(known) < len(counts):
        return None
    limit = lookup(config, "data.train_max_samples")
    return min(sum(known), limit) if limit is not None and limit > 0 else sum(known)


def notices(config: Mapping[str, Any]) -> list[str]:
    """Settings that are accepted and have no effect, each with the reason; to be logged once at start-up."""
    if not read_settings(config)[0].async_training.use_trainer_do_validate:
        return []
    setting = "async_training.use_trainer_do_validate"
    return [f"{setting}=true has no effect: validation runs on the rollout replicas only, with the same scores."]

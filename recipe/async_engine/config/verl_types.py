# SPDX-License-Identifier: Apache-2.0
"""The types of verl's settings that this package reads.

Contract: `well_formed` reports every such setting whose value is of another type than the rules and the shells expect,
and gives a configuration in which each of them has a harmless value, so that all other rules can still be applied.
This package's own settings have their types in `sections`.
Shown by tests/integration/test_config_fuzz.py.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from recipe.async_engine.config.fields import is_count, is_number, render
from recipe.async_engine.config.problems import Problem
from recipe.async_engine.config.sections import lookup

DEEPEST = 32  # levels of sections and lists; verl's own have seven
ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True, slots=True)
class Expected:
    """What a value must be, in words and as a test, and a harmless value in place of a wrong one."""

    allowed: str
    fits: Callable[[Any], bool]
    harmless: Any
    advice: str = "Correct the value, or remove the setting."
    needed: bool = False  # a setting that is absent is as one that is null


def _or_null(expected: Expected) -> Expected:
    return Expected(f"{expected.allowed}, or null", lambda value: value is None or expected.fits(value), None)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_paths(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, str) and item for item in value)
    return value is None or isinstance(value, str)


SECTION = Expected("a section of settings", lambda value: isinstance(value, Mapping), {})
COUNT = Expected("an integer >= 1", is_count, 1)
# Without a harmless value: rules leave out what they would have said of it.
AMOUNT = Expected("an integer >= 1", is_count, None, "Set it to at least 1.", needed=True)
FREQUENCY = Expected(
    "an integer >= 1 (versions), or -1 for never",
    lambda value: _is_integer(value) and value >= -1,
    -1,
    "It counts weight versions.",
    needed=True,
)
NATURAL = Expected("an integer >= 0, or null", lambda value: value is None or (_is_integer(value) and value >= 0), None)
FLAG = Expected("true or false", lambda value: isinstance(value, bool), False)
NAME = Expected("a name", lambda value: isinstance(value, str) and value != "", "")
TEXT = Expected("a path or name", lambda value: isinstance(value, str), "")
NAMES = Expected("a name, or a list of names", _is_paths, None)
PATHS = Expected("a path, or a list of paths", _is_paths, None)
MAYBE_SECTION, MAYBE_COUNT, MAYBE_FLAG, MAYBE_TEXT = map(_or_null, (SECTION, COUNT, FLAG, TEXT))
SHARE = Expected(
    "a number > 0 and <= 1",
    lambda value: is_number(value) and 0 < value <= 1,
    None,
    "It is the share of an accelerator that an engine takes.",
)
STEPS = Expected(
    "a list of steps from 1 on",
    lambda value: isinstance(value, list | tuple) and all(map(is_count, value)),
    None,
    "Write [2], or [2,3].",
)
LISTED = Expected(
    "a list of names",
    lambda value: isinstance(value, list | tuple) and all(isinstance(name, str) for name in value),
    None,
)
MAYBE_INTEGER = _or_null(Expected("an integer", _is_integer, None))


def _of(section: str, expected: Expected, *names: str) -> dict[str, Expected]:
    return {f"{section}.{name}" if section else name: expected for name in names}


# Outer sections first: what is inside a wrong one is not looked at.
EXPECTED: Mapping[str, Expected] = {
    **_of("", SECTION, "data", "trainer", "reward", "algorithm", "actor_rollout_ref", "actor_rollout_ref.model"),
    **_of("", SECTION, ROLLOUT, ACTOR, f"{ROLLOUT}.agent", f"{ROLLOUT}.checkpoint_engine", f"{ACTOR}.checkpoint"),
    **_of("", MAYBE_SECTION, "critic", "critic.model", "critic.checkpoint", "ray_kwargs", "ray_kwargs.ray_init"),
    **_of("reward", MAYBE_SECTION, "reward_manager", "reward_model", "custom_reward_function"),
    **_of("", MAYBE_SECTION, "custom_reward_function", "data.custom_cls", "algorithm.filter_groups"),
    **_of("", MAYBE_SECTION, "distillation", "algorithm.kl_ctrl", "algorithm.rollout_correction"),
    **_of("critic", MAYBE_SECTION, "fsdp", "optim"),
    **_of("ray_kwargs.ray_init", MAYBE_SECTION, "runtime_env", "runtime_env.env_vars"),
    **_of("reward.reward_model", MAYBE_SECTION, "rollout", "rollout.disaggregation"),
    **_of(ACTOR, MAYBE_SECTION, "fsdp_config", "megatron", "optim", "policy_loss", "qat", "fsdp_config.qat"),
    **_of(ACTOR, MAYBE_SECTION, "fsdp_config.mixed_precision", "megatron.qat"),
    **_of("actor_rollout_ref", MAYBE_SECTION, "ref", "ref.fsdp_config", "model.lora", "model.mtp"),
    **_of("actor_rollout_ref.model", MAYBE_SECTION, "override_config", "override_config.model_config"),
    **_of(ROLLOUT, MAYBE_SECTION, "engine_kwargs", "engine_kwargs.vllm", "disaggregation", "multi_turn", "prometheus"),
    **_of(ROLLOUT, MAYBE_SECTION, "qat", "trace", "val_kwargs"),
    **_of(ROLLOUT, AMOUNT, "n", "agent.num_workers"),
    **_of(ROLLOUT, COUNT, "tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"),
    **_of(ROLLOUT, COUNT, "max_num_seqs", "max_num_batched_tokens", "val_kwargs.n"),
    **_of(ROLLOUT, COUNT, "checkpoint_engine.update_weights_bucket_megabytes"),
    **_of(ROLLOUT, MAYBE_COUNT, "max_model_len", "prompt_length", "response_length"),
    **_of(ROLLOUT, FLAG, "enable_chunked_prefill", "calculate_log_probs", "full_determinism"),
    **_of(ROLLOUT, FLAG, "free_cache_engine", "enable_sleep_mode"),
    **_of(ROLLOUT, NAME, "name", "checkpoint_engine.backend"),
    **_of(ACTOR, AMOUNT, "ppo_mini_batch_size"),
    **_of(ACTOR, COUNT, "ulysses_sequence_parallel_size"),
    **_of(ACTOR, MAYBE_COUNT, "ppo_micro_batch_size_per_gpu", "loss_scale_factor"),
    **_of(ACTOR, FLAG, "use_dynamic_bsz", "checkpoint.async_save"),
    **_of(ACTOR, NAME, "strategy", "fsdp_config.model_dtype"),
    **_of("actor_rollout_ref", FLAG, "hybrid_engine"),
    **_of("actor_rollout_ref", MAYBE_TEXT, "model.path"),
    **_of("algorithm", NAME, "adv_estimator"),
    **_of("algorithm.filter_groups", FLAG, "enable"),
    **_of("algorithm.filter_groups", MAYBE_TEXT, "metric"),
    **_of("algorithm.filter_groups", MAYBE_INTEGER, "max_num_gen_batches"),
    **_of("critic", MAYBE_FLAG, "enable"),
    **_of("critic", FLAG, "checkpoint.async_save", "use_dynamic_bsz"),
    **_of("critic", NAME, "strategy"),
    **_of("critic", MAYBE_TEXT, "model.path"),
    **_of("critic", MAYBE_COUNT, "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu"),
    **_of("data", AMOUNT, "max_prompt_length", "max_response_length"),
    **_of("data", PATHS, "train_files", "val_files"),
    **_of("data", NATURAL, "train_batch_size", "gen_batch_size", "dataloader_num_workers"),
    **_of("data", MAYBE_COUNT, "filter_overlong_prompts_workers"),
    **_of("data", MAYBE_INTEGER, "seed"),
    **_of("data", NAME, "prompt_key", "reward_fn_key"),
    **_of("data", FLAG, "filter_overlong_prompts"),
    **_of("data", MAYBE_INTEGER, "train_max_samples"),
    **_of("data", MAYBE_TEXT, "custom_cls.path"),
    **_of("trainer", AMOUNT, "nnodes", "n_gpus_per_node", "total_epochs"),
    **_of("trainer", MAYBE_COUNT, "total_training_steps", "max_actor_ckpt_to_keep"),
    **_of("trainer", FREQUENCY, "save_freq", "test_freq"),
    **_of("trainer", NAME, "resume_mode", "default_local_dir"),
    **_of("trainer", MAYBE_TEXT, "device", "resume_from_path", "default_hdfs_dir"),
    **_of("trainer", MAYBE_TEXT, "rollout_data_dir", "validation_data_dir"),
    **_of("reward", AMOUNT, "num_workers"),
    **_of("reward", MAYBE_TEXT, "custom_reward_function.path", "custom_reward_function.name"),
    **_of("reward", NAME, "reward_manager.source"),
    **_of("reward.reward_model", FLAG, "enable", "enable_resource_pool"),
    **_of("reward.reward_model", MAYBE_INTEGER, "nnodes", "n_gpus_per_node"),
    # Of the actor.
    **_of(ACTOR, MAYBE_FLAG, "use_kl_loss", "qat.enable", "fsdp_config.qat.enable", "megatron.qat.enable"),
    **_of(ACTOR, MAYBE_COUNT, "ppo_max_token_len_per_gpu", "ppo_micro_batch_size"),
    **_of(ACTOR, MAYBE_INTEGER, "fsdp_config.fsdp_size"),
    **_of(ACTOR, MAYBE_TEXT, "kl_loss_type", "policy_loss.loss_mode", "loss_agg_mode"),
    **_of(f"{ACTOR}.fsdp_config.mixed_precision", MAYBE_TEXT, "param_dtype", "reduce_dtype", "buffer_dtype"),
    **_of("actor_rollout_ref.ref", MAYBE_FLAG, "log_prob_use_dynamic_bsz"),
    **_of("actor_rollout_ref.ref", MAYBE_COUNT, "log_prob_max_token_len_per_gpu", "log_prob_micro_batch_size_per_gpu"),
    **_of("actor_rollout_ref.ref", MAYBE_INTEGER, "fsdp_config.fsdp_size"),
    **_of("actor_rollout_ref.ref", MAYBE_TEXT, "strategy"),
    **_of("actor_rollout_ref.model", NATURAL, "lora_rank", "lora.rank"),
    **_of("actor_rollout_ref.model", MAYBE_FLAG, "mtp.enable_rollout", "use_liger", "use_remove_padding", "lora.merge"),
    **_of("actor_rollout_ref.model", MAYBE_TEXT, "lora_adapter_path", "tokenizer_path"),
    **_of("actor_rollout_ref.model", NAMES, "external_lib"),
    **_of("actor_rollout_ref.model.override_config", MAYBE_TEXT, "attn_implementation"),
    **_of("actor_rollout_ref.model.override_config", MAYBE_COUNT, "max_position_embeddings"),
    # Of rollout and rewards.
    **_of(ROLLOUT, MAYBE_FLAG, "disaggregation.enabled", "disable_log_stats", "prometheus.enable", "qat.enable"),
    **_of(ROLLOUT, MAYBE_FLAG, "log_prob_use_dynamic_bsz"),
    **_of(ROLLOUT, MAYBE_COUNT, "log_prob_max_token_len_per_gpu", "log_prob_micro_batch_size_per_gpu"),
    **_of(ROLLOUT, MAYBE_TEXT, "agent.agent_loop_config_path", "agent.default_agent_loop", "checkpoint_manager_class"),
    **_of(ROLLOUT, MAYBE_TEXT, "checkpoint_engine.custom_backend_module", "dtype", "logprobs_mode", "load_format"),
    **_of(ROLLOUT, MAYBE_TEXT, "quantization", "scheduling_policy", "trace.backend", "multi_turn.format"),
    **_of(f"{ROLLOUT}.multi_turn", MAYBE_TEXT, "tool_config_path", "function_tool_path", "interaction_config_path"),
    **_of("reward", MAYBE_TEXT, "reward_manager.name", "reward_model.model_path"),
    **_of(
        "reward.reward_model.rollout", MAYBE_FLAG, "disaggregation.enabled", "enable_sleep_mode", "free_cache_engine"
    ),
    **_of("reward.reward_model.rollout", MAYBE_COUNT, "max_num_batched_tokens", "max_num_seqs", "data_parallel_size"),
    **_of(
        "reward.reward_model.rollout", MAYBE_COUNT, *(f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline"))
    ),
    **_of("reward.reward_model.rollout", MAYBE_TEXT, "name"),
    **_of(ROLLOUT, _or_null(SHARE), "standalone_gpu_memory_utilization"),
    **_of(ROLLOUT, MAYBE_TEXT, "engine_kwargs.vllm.scheduler_cls"),
    # Of the rest.
    **_of("", MAYBE_SECTION, "global_profiler"),
    **_of("global_profiler", _or_null(STEPS), "steps"),
    **_of(f"{ACTOR}.checkpoint", _or_null(LISTED), "save_contents", "load_contents"),
    **_of("critic.checkpoint", _or_null(LISTED), "save_contents", "load_contents"),
    **_of("", MAYBE_FLAG, "distillation.enabled", "algorithm.use_kl_in_reward", "algorithm.use_pf_ppo"),
    **_of("", MAYBE_TEXT, "model_engine", "algorithm.kl_penalty", "algorithm.kl_ctrl.type"),
    **_of("", MAYBE_SECTION, "algorithm.pf_ppo"),
    **_of("", MAYBE_TEXT, "algorithm.pf_ppo.reweight_method", f"{ROLLOUT}.multi_turn.tool_response_truncate_side"),
    **_of("algorithm.rollout_correction", MAYBE_FLAG, "bypass_mode"),
    **_of("algorithm.rollout_correction", MAYBE_TEXT, "loss_type", "rollout_is", "rollout_rs"),
    **_of("critic", MAYBE_INTEGER, "fsdp.fsdp_size"),
    **_of("critic", MAYBE_TEXT, "optim.optimizer", "optim.optimizer_impl"),
    **_of(ACTOR, MAYBE_TEXT, "optim.optimizer", "optim.optimizer_impl"),
    **_of("critic", MAYBE_COUNT, "ppo_max_token_len_per_gpu"),
    **_of("critic", NAMES, "model.external_lib"),
    **_of("trainer", NAMES, "logger"),
    **_of("trainer", NATURAL, "critic_warmup"),
    **_of("ray_kwargs.ray_init", NATURAL, "num_gpus", "num_cpus"),
    **_of("ray_kwargs.ray_init", MAYBE_TEXT, "address"),
}
ABSENT = object()


def well_formed(config: Mapping[str, Any], misses: bool = True) -> tuple[dict[str, Any], list[Problem]]:
    """The configuration with a harmless value for each setting of a wrong type, and these as problems.

    Args:
        misses: whether settings that have to be there and are not are problems too.
    """
    repaired, problems = _not_too_deep(config)
    for setting, expected in EXPECTED.items():
        value = lookup(repaired, setting, ABSENT)
        if value is ABSENT and expected.needed and misses:
            problems.append(Problem(setting, "null", expected.allowed, expected.advice))
        elif value is not ABSENT and not expected.fits(value):
            problems.append(Problem(setting, render(value), expected.allowed, expected.advice))
            _replace(repaired, setting.split("."), expected.harmless)
    return repaired, problems


def _not_too_deep(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Without what is nested so deep that nothing could read it, and its settings as problems."""
    problems = []
    kept: dict[str, Any] = dict(config)
    for setting in _too_deep(config):
        problems.append(Problem(setting, "nested", f"at most {DEEPEST} levels, of text as names", "Write it flat."))
        section = setting.split(".")[0]
        kept[section] = None
    return kept, problems


def _too_deep(node: Any, above: str = "", level: int = 0) -> Iterator[str]:
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(node, Mapping | list):
        items = node.items() if isinstance(node, Mapping) else enumerate(node)
    for name, value in items:
        if level == DEEPEST or (isinstance(node, Mapping) and not isinstance(name, str)):
            yield above
            return
        setting = above if isinstance(node, list) else f"{above}.{name}".removeprefix(".")
        yield from _too_deep(value, setting, level + 1)


def _replace(config: dict[str, Any], path: list[str], value: Any) -> None:
    """Set a value; the mappings on the way are copied, those given are left as they are."""
    *parents, last = path
    node = config
    for parent in parents:
        node[parent] = dict(node[parent])
        node = node[parent]
    node[last] = value

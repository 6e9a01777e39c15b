# SPDX-License-Identifier: Apache-2.0
"""The types of verl's settings that this package reads.

Contract: `well_formed` reports every such setting whose value is of another type than the rules and the shells expect,
and gives a configuration in which each of them has a harmless value, so that all other rules can still be applied.
This package's own settings have their types in `sections`.
Shown by tests/integration/test_config_fuzz.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from recipe.async_engine.settings.fields import is_count, render
from recipe.async_engine.settings.problems import Problem
from recipe.async_engine.settings.sections import lookup

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
PATHS = Expected("a path, or a list of paths", _is_paths, None)
MAYBE_SECTION, MAYBE_COUNT, MAYBE_FLAG, MAYBE_TEXT = map(_or_null, (SECTION, COUNT, FLAG, TEXT))
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
    **_of(ACTOR, MAYBE_SECTION, "fsdp_config", "megatron"),
    **_of(ROLLOUT, AMOUNT, "n", "agent.num_workers"),
    **_of(ROLLOUT, COUNT, "tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"),
    **_of(ROLLOUT, COUNT, "max_num_seqs", "max_num_batched_tokens"),
    **_of(ROLLOUT, COUNT, "checkpoint_engine.update_weights_bucket_megabytes"),
    **_of(ROLLOUT, MAYBE_COUNT, "max_model_len"),
    **_of(ROLLOUT, FLAG, "enable_chunked_prefill", "calculate_log_probs", "full_determinism"),
    **_of(ROLLOUT, FLAG, "free_cache_engine", "enable_sleep_mode"),
    **_of(ROLLOUT, NAME, "name", "checkpoint_engine.backend"),
    **_of(ACTOR, AMOUNT, "ppo_mini_batch_size"),
    **_of(ACTOR, COUNT, "ulysses_sequence_parallel_size"),
    **_of(ACTOR, MAYBE_COUNT, "ppo_micro_batch_size_per_gpu"),
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
    **_of("data", NATURAL, "train_batch_size", "gen_batch_size"),
    **_of("data", NAME, "prompt_key", "reward_fn_key"),
    **_of("data", FLAG, "filter_overlong_prompts"),
    **_of("data", MAYBE_INTEGER, "train_max_samples"),
    **_of("data", MAYBE_TEXT, "custom_cls.path"),
    **_of("trainer", AMOUNT, "nnodes", "n_gpus_per_node", "total_epochs"),
    **_of("trainer", MAYBE_COUNT, "total_training_steps", "max_actor_ckpt_to_keep"),
    **_of("trainer", FREQUENCY, "save_freq", "test_freq"),
    **_of("trainer", NAME, "resume_mode", "default_local_dir"),
    **_of("trainer", MAYBE_TEXT, "device", "resume_from_path", "default_hdfs_dir"),
    **_of("reward", AMOUNT, "num_workers"),
    **_of("reward", MAYBE_TEXT, "custom_reward_function.path", "custom_reward_function.name"),
    **_of("reward", NAME, "reward_manager.source"),
    **_of("reward.reward_model", FLAG, "enable", "enable_resource_pool"),
    **_of("reward.reward_model", MAYBE_INTEGER, "nnodes", "n_gpus_per_node"),
    **_of("ray_kwargs.ray_init", NATURAL, "num_gpus"),
    **_of("ray_kwargs.ray_init", MAYBE_TEXT, "address"),
}
ABSENT = object()


def well_formed(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """The configuration with a harmless value for each setting of a wrong type, and these as problems."""
    repaired = dict(config)
    problems = []
    for setting, expected in EXPECTED.items():
        value = lookup(repaired, setting, ABSENT)
        if value is ABSENT and expected.needed:
            problems.append(Problem(setting, "null", expected.allowed, expected.advice))
        elif value is not ABSENT and not expected.fits(value):
            problems.append(Problem(setting, render(value), expected.allowed, expected.advice))
            _replace(repaired, setting.split("."), expected.harmless)
    return repaired, problems


def _replace(config: dict[str, Any], path: list[str], value: Any) -> None:
    """Set a value; the mappings on the way are copied, those given are left as they are."""
    *parents, last = path
    node = config
    for parent in parents:
        node[parent] = dict(node[parent])
        node = node[parent]
    node[last] = value

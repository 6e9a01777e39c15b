# SPDX-License-Identifier: Apache-2.0
"""The types of verl's settings that this package reads.

Contract: `well_formed` reports every such setting whose value is of another type than the rules and the shells expect,
and gives a configuration in which each of them has a harmless value, so that all other rules can still be applied.
This package's own settings have their types in `config`, and those that `validation._amounts` reports are not here.
Shown by tests/integration/test_config_fuzz.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from recipe.async_engine.core.case import ACTOR, ROLLOUT
from recipe.async_engine.core.config import lookup
from recipe.async_engine.core.knobs import render
from recipe.async_engine.core.problems import Problem


@dataclass(frozen=True, slots=True)
class Shape:
    """What a value must be, in words and as a test, and a harmless value in place of a wrong one."""

    allowed: str
    fits: Callable[[Any], bool]
    harmless: Any


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_paths(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) and item for item in value))


SECTION = Shape("a section of settings", lambda value: isinstance(value, Mapping), {})
MAYBE_SECTION = Shape("a section of settings, or null", lambda value: value is None or SECTION.fits(value), None)
COUNT = Shape("an integer >= 1", _is_count, 1)
MAYBE_COUNT = Shape("an integer >= 1, or null", lambda value: value is None or _is_count(value), None)
NATURAL = Shape(
    "an integer >= 0, or null", lambda value: (value in (0, None) and value is not False) or _is_count(value), 0
)
MAYBE_INTEGER = Shape(
    "an integer, or null", lambda value: value is None or (isinstance(value, int) and not isinstance(value, bool)), None
)
FLAG = Shape("true or false", lambda value: isinstance(value, bool), False)
MAYBE_FLAG = Shape("true or false, or null", lambda value: value is None or isinstance(value, bool), None)
TEXT = Shape("a name", lambda value: isinstance(value, str) and value != "", "")
MAYBE_TEXT = Shape("a path or name, or null", lambda value: value is None or isinstance(value, str), None)
PATHS = Shape("a path, or a list of paths", lambda value: value is None or _is_paths(value), None)

# Outer sections first: what is inside a wrong one is not looked at.
SHAPES: Mapping[str, Shape] = {
    **dict.fromkeys(("data", "trainer", "reward", "algorithm", "actor_rollout_ref"), SECTION),
    **dict.fromkeys(("actor_rollout_ref.model", ROLLOUT, ACTOR, f"{ROLLOUT}.agent"), SECTION),
    **dict.fromkeys((f"{ROLLOUT}.checkpoint_engine", f"{ACTOR}.checkpoint"), SECTION),
    **dict.fromkeys(("critic", "ray_kwargs", "ray_kwargs.ray_init", f"{ACTOR}.fsdp_config"), MAYBE_SECTION),
    **dict.fromkeys(("reward.reward_manager", "reward.reward_model", "reward.custom_reward_function"), MAYBE_SECTION),
    **dict.fromkeys(("custom_reward_function", "data.custom_cls", f"{ACTOR}.megatron"), MAYBE_SECTION),
    f"{ROLLOUT}.tensor_model_parallel_size": COUNT,
    f"{ROLLOUT}.data_parallel_size": COUNT,
    f"{ROLLOUT}.pipeline_model_parallel_size": COUNT,
    f"{ROLLOUT}.max_model_len": MAYBE_COUNT,
    f"{ROLLOUT}.max_num_seqs": COUNT,
    f"{ROLLOUT}.max_num_batched_tokens": COUNT,
    f"{ROLLOUT}.enable_chunked_prefill": FLAG,
    f"{ROLLOUT}.calculate_log_probs": FLAG,
    f"{ROLLOUT}.full_determinism": FLAG,
    f"{ROLLOUT}.free_cache_engine": FLAG,
    f"{ROLLOUT}.enable_sleep_mode": FLAG,
    f"{ROLLOUT}.name": TEXT,
    f"{ROLLOUT}.checkpoint_engine.backend": TEXT,
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": COUNT,
    f"{ACTOR}.strategy": TEXT,
    f"{ACTOR}.use_dynamic_bsz": FLAG,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": MAYBE_COUNT,
    f"{ACTOR}.ulysses_sequence_parallel_size": COUNT,
    f"{ACTOR}.fsdp_config.model_dtype": TEXT,
    f"{ACTOR}.checkpoint.async_save": FLAG,
    "actor_rollout_ref.hybrid_engine": FLAG,
    "actor_rollout_ref.model.path": MAYBE_TEXT,
    "algorithm.adv_estimator": TEXT,
    "algorithm.filter_groups": MAYBE_SECTION,
    "algorithm.filter_groups.enable": FLAG,
    "algorithm.filter_groups.metric": MAYBE_TEXT,
    "algorithm.filter_groups.max_num_gen_batches": MAYBE_INTEGER,
    "critic.enable": MAYBE_FLAG,
    "critic.model": MAYBE_SECTION,
    "critic.model.path": MAYBE_TEXT,
    "critic.checkpoint": MAYBE_SECTION,
    "critic.checkpoint.async_save": FLAG,
    "critic.strategy": TEXT,
    "critic.use_dynamic_bsz": FLAG,
    "critic.ppo_micro_batch_size": MAYBE_COUNT,
    "critic.ppo_micro_batch_size_per_gpu": MAYBE_COUNT,
    "data.train_files": PATHS,
    "data.val_files": PATHS,
    "data.train_batch_size": NATURAL,
    "data.gen_batch_size": NATURAL,
    "data.prompt_key": TEXT,
    "data.reward_fn_key": TEXT,
    "data.filter_overlong_prompts": FLAG,
    "data.train_max_samples": MAYBE_INTEGER,
    "data.custom_cls.path": MAYBE_TEXT,
    "trainer.device": MAYBE_TEXT,
    "trainer.resume_mode": TEXT,
    "trainer.resume_from_path": MAYBE_TEXT,
    "trainer.default_local_dir": TEXT,
    "trainer.default_hdfs_dir": MAYBE_TEXT,
    "trainer.max_actor_ckpt_to_keep": MAYBE_COUNT,
    "reward.custom_reward_function.path": MAYBE_TEXT,
    "reward.custom_reward_function.name": MAYBE_TEXT,
    "reward.reward_manager.source": TEXT,
    "reward.reward_model.enable": FLAG,
    "reward.reward_model.enable_resource_pool": FLAG,
    "reward.reward_model.nnodes": MAYBE_INTEGER,
    "reward.reward_model.n_gpus_per_node": MAYBE_INTEGER,
    "ray_kwargs.ray_init.num_gpus": NATURAL,
    "ray_kwargs.ray_init.address": MAYBE_TEXT,
}
ABSENT = object()


def well_formed(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """The configuration with a harmless value for each setting of a wrong type, and these as problems."""
    repaired = dict(config)
    problems = []
    for setting, shape in SHAPES.items():
        value = lookup(repaired, setting, ABSENT)
        if value is not ABSENT and not shape.fits(value):
            problems.append(Problem(setting, render(value), shape.allowed, "Correct the value, or remove the setting."))
            _replace(repaired, setting.split("."), shape.harmless)
    return repaired, problems


def _replace(config: dict[str, Any], path: list[str], value: Any) -> None:
    """Set a value; the mappings on the way are copied, those given are left as they are."""
    *parents, last = path
    node = config
    for parent in parents:
        node[parent] = dict(node[parent])
        node = node[parent]
    node[last] = value

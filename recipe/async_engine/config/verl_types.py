# SPDX-License-Identifier: Apache-2.0
"""The expected types of verl's settings, derived from their default values in verl's own configuration.

Contract: verl's own types accept any value for most settings, so text in place of a number fails only in the first
update. `well_formed` reports every setting whose value has another type than verl's default (number, bool, list,
section, text) or is not allowed by `LIMITED`. In the configuration that it returns, each such setting is null, or an
empty section, so that all rules can still be applied. A setting may be null, except for parallel sizes and settings in
`NEEDED`. The types of this package's own settings are in `sections`. Shown by tests/integration/test_config_fuzz.py.
"""

import contextlib
import functools
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from recipe.async_engine.config.fields import is_count, is_number
from recipe.async_engine.config.problems import Problem, lookup, render

DEEPEST = 32  # The greatest allowed nesting of sections and lists; verl's own configuration has seven levels.
ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
MISSING, ABSENT = "???", object()


class Expected(NamedTuple):
    """The values that a setting accepts, in words (`allowed`) and as a test (`fits`).

    `nullable` says whether verl's default is null or is taken from another setting.
    """

    allowed: str
    fits: Callable[[Any], bool]
    advice: str = ""
    nullable: bool = False


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: Any, fits: Callable[[Any], bool] = lambda item: isinstance(item, str)) -> bool:
    return isinstance(value, list | tuple) and all(map(fits, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


SECTION = Expected("a section of settings", lambda value: isinstance(value, Mapping))
FLAG = Expected("true or false", lambda value: isinstance(value, bool) or value in (0, 1))


def number(advice: str = "", *, least: float = -math.inf, above: float = -math.inf, most: float = math.inf) -> Expected:
    """Return an `Expected` that accepts only finite numbers v with v >= ``least``, v > ``above`` and v <= ``most``."""
    limits = ((">=", least), (">", above), ("and at most", most))
    words = " ".join(f"{sign} {limit:g}" for sign, limit in limits if math.isfinite(limit))

    def fits(value: Any) -> bool:
        return is_number(value) and -math.inf < value < math.inf and value > above and least <= value <= most

    return Expected(f"a number {words}".rstrip(), fits, advice)


NUMBER = number()
LIST = Expected("a list", lambda value: isinstance(value, list | tuple))
TEXT = Expected("text", lambda value: not isinstance(value, Mapping | list | tuple))
NAME = Expected("a name", lambda value: _is_text(value) and value != "")
PATH = Expected("a path or name", _is_text)
PATHS = Expected("a path or name, or a list of them", lambda value: _is_text(value) or _is_list(value))
COUNT = Expected("an integer >= 1", is_count)
NATURAL = Expected("an integer >= 0", lambda value: _is_integer(value) and value >= 0)
INTEGER = Expected("an integer", _is_integer)
LISTED = Expected("a list of names", _is_list)
STEPS = Expected("a list of steps from 1 on", lambda value: _is_list(value, is_count), "Write [2], or [2,3].")
FREQUENCY = Expected(
    "an integer >= 1 (versions), or -1 for never",
    lambda value: _is_integer(value) and value >= -1,
    "It counts weight versions.",
)
SHARE = number("It is the share of an accelerator that an engine takes.", above=0, most=1)

# Accepted values of settings for which checking the type is not enough, by the last part of the setting's name.
LIMITED: Mapping[str, Expected] = {
    **dict.fromkeys(
        (
            *("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"),
            *("ulysses_sequence_parallel_size", "max_num_seqs", "max_num_batched_tokens", "num_workers", "n"),
            *("update_weights_bucket_megabytes", "max_model_len", "prompt_length", "response_length"),
            *("max_prompt_length", "max_response_length", "ppo_mini_batch_size", "ppo_micro_batch_size"),
            *("ppo_micro_batch_size_per_gpu", "loss_scale_factor", "ppo_max_token_len_per_gpu"),
            *("log_prob_max_token_len_per_gpu", "log_prob_micro_batch_size_per_gpu", "max_position_embeddings"),
            *("filter_overlong_prompts_workers", "max_actor_ckpt_to_keep", "total_epochs"),
            *("expert_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
        ),
        COUNT,
    ),
    **dict.fromkeys(
        (
            *("train_batch_size", "gen_batch_size", "dataloader_num_workers", "lora_rank", "rank"),
            *("critic_warmup", "num_gpus", "num_cpus"),
        ),
        NATURAL,
    ),
    **dict.fromkeys(
        ("max_num_gen_batches", "train_max_samples", "seed", "nnodes", "n_gpus_per_node", "fsdp_size"), INTEGER
    ),
    **dict.fromkeys(
        (
            *("path", "resume_from_path", "default_hdfs_dir", "rollout_data_dir", "validation_data_dir", "name"),
            *("lora_adapter_path", "tokenizer_path", "agent_loop_config_path", "custom_backend_module"),
            *("tool_config_path", "function_tool_path", "model_path", "rollout_is", "rollout_rs", "backend"),
            *("quantization", "metric", "strategy", "device"),
        ),
        PATH,
    ),
    **dict.fromkeys(("use_dynamic_bsz", "log_prob_use_dynamic_bsz", "enable"), FLAG),
    **dict.fromkeys(("train_files", "val_files", "external_lib", "logger", "target_modules"), PATHS),
    **dict.fromkeys(("save_contents", "load_contents"), LISTED),
    **dict.fromkeys(("save_freq", "test_freq"), FREQUENCY),
    "steps": STEPS,
    "default_local_dir": NAME,
}
# Accepted values of settings whose type cannot be derived from verl's default configuration, for example because the
# setting is absent there.
ADDED: Mapping[str, Expected] = {
    f"{ROLLOUT}.standalone_gpu_memory_utilization": SHARE,
    f"{ROLLOUT}.qat": SECTION,
    "model_engine": PATH,
    "trainer.total_training_steps": Expected("an integer >= 1, or null", is_count),
    **dict.fromkeys((f"{ROLLOUT}.qat.enable", f"{ACTOR}.megatron.qat.enable"), FLAG),
    **dict.fromkeys((f"{ROLLOUT}.enable_sleep_mode", "reward.reward_model.rollout.enable_sleep_mode"), FLAG),
    **dict.fromkeys((f"{ACTOR}.megatron", f"{ACTOR}.megatron.qat", f"{ACTOR}.fsdp_config.mixed_precision"), SECTION),
    **dict.fromkeys(
        (f"{ACTOR}.fsdp_config.mixed_precision.{name}_dtype" for name in ("param", "reduce", "buffer")), PATH
    ),
    f"{MODEL}.override_config.model_config": SECTION,
    f"{MODEL}.override_config.attn_implementation": PATH,
    f"{MODEL}.override_config.max_position_embeddings": COUNT,
    **dict.fromkeys((f"{ROLLOUT}.checkpoint_manager_class", f"{ROLLOUT}.engine_kwargs.vllm.scheduler_cls"), PATH),
    f"{ROLLOUT}.multi_turn.interaction_config_path": PATH,
    "ray_kwargs.ray_init.runtime_env.env_vars": SECTION,
    "ray_kwargs.ray_init.address": PATH,
    "ray_kwargs.ray_init.num_gpus": NATURAL,
    "actor_rollout_ref.ref.strategy": PATH,
}
# Settings that every run needs, with what they accept. A setting that is missing is reported like one that is null.
NEEDED: Mapping[str, Expected] = {
    **dict.fromkeys((f"{ROLLOUT}.n", f"{ROLLOUT}.agent.num_workers", f"{ACTOR}.ppo_mini_batch_size"), COUNT),
    **dict.fromkeys(("data.max_prompt_length", "data.max_response_length", "reward.num_workers"), COUNT),
    **dict.fromkeys(("trainer.nnodes", "trainer.n_gpus_per_node", "trainer.total_epochs"), COUNT),
    **dict.fromkeys(("trainer.save_freq", "trainer.test_freq"), FREQUENCY),
}


@functools.lru_cache
def verls_own(model_engine: str = "dp") -> Mapping[str, Any]:
    """Return verl's default configuration for a training engine, with interpolations; {} if verl is not installed."""
    engine = "" if model_engine == "dp" else f"_{model_engine}"
    verl = importlib.util.find_spec("verl")
    file = Path(str(verl.origin if verl else "")).with_name("trainer") / f"config/_generated_ppo{engine}_trainer.yaml"
    with contextlib.suppress(OSError, ValueError), file.open("rb") as stream:
        return dict(yaml.load(stream, yaml.CSafeLoader))
    return {} if model_engine == "dp" else verls_own()


@functools.lru_cache
def expected(model_engine: str = "dp") -> Mapping[str, Expected]:
    """Return what each setting accepts, by the setting's name; outer sections come first."""
    found = {**dict(_kinds(verls_own(model_engine))), **ADDED, **NEEDED}
    return dict(sorted(found.items(), key=lambda item: item[0].count(".")))


def _kinds(section: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Expected]]:
    for name, usual in section.items():
        setting = f"{above}{name}"
        match usual:
            case Mapping():
                yield setting, SECTION
                yield from _kinds(usual, f"{setting}.")
            case "???":  # A rule checks the value of a mandatory setting.
                continue
            case _ if name in LIMITED:
                kind, is_open = LIMITED[name], usual is None or str(usual).startswith("${")
                yield setting, kind._replace(allowed=f"{kind.allowed}, or null", nullable=True) if is_open else kind
            case bool():
                yield setting, FLAG
            # Thresholds get no type: they may be text with several numbers. `rules.learning` checks them.
            case int() | float() if not name.endswith("_threshold"):
                yield setting, NUMBER
            case list():
                yield setting, LIST
            case str() if not usual.startswith("${"):
                yield setting, TEXT


def well_formed(config: Mapping[str, Any], misses: bool = True) -> tuple[dict[str, Any], list[Problem]]:
    """Return the configuration with each refused value replaced by null or an empty section, and a problem for each.

    ``misses`` says whether settings of `NEEDED` that are missing or null are reported as well.
    """
    repaired, problems = dict(config), []
    for setting in _too_deep(config):
        problems.append(Problem(setting, "nested", f"at most {DEEPEST} levels, with text as names", "Nest it less."))
        repaired[setting.split(".")[0]] = None
    for setting, kind in expected(str(config.get("model_engine", "dp"))).items():
        value = lookup(repaired, setting, ABSENT)
        is_size = setting.endswith("parallel_size") and not kind.nullable
        is_needed = (setting in NEEDED and misses) or (is_size and value is None)
        if value is ABSENT or value is None:
            if is_needed:
                problems.append(Problem(setting, "null", kind.allowed, kind.advice or "Set it."))
        elif value == MISSING:
            problems.append(Problem(setting, MISSING, "a value", "It is missing: give it, or remove the setting."))
            _replace(repaired, setting.split("."), None)
        elif not kind.fits(value):
            advice = kind.advice or "Correct the value, or remove the setting."
            problems.append(Problem(setting, render(value), kind.allowed, advice))
            _replace(repaired, setting.split("."), {} if kind is SECTION else None)
    return repaired, problems


def _too_deep(node: Any, above: str = "", level: int = 0) -> Iterator[str]:
    """Yield the settings that are nested too deeply, and the sections with a key that is not text."""
    if not isinstance(node, Mapping | list):
        return
    for name, value in node.items() if isinstance(node, Mapping) else enumerate(node):
        if level == DEEPEST or (isinstance(node, Mapping) and not isinstance(name, str)):
            yield above
            return
        setting = above if isinstance(node, list) else f"{above}.{name}".removeprefix(".")
        yield from _too_deep(value, setting, level + 1)


def _replace(config: dict[str, Any], path: list[str], value: Any) -> None:
    """Set the value at a path. The mappings along the path are copied first, because the caller may own them."""
    *parents, last = path
    node = config
    for parent in parents:
        node[parent] = dict(node[parent])
        node = node[parent]
    node[last] = value

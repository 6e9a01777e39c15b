# SPDX-License-Identifier: Apache-2.0
"""Reads what a configuration refers to outside itself, and refuses it where it cannot run.

Contract: `check` is the one call a main makes before it starts a process. It reads files' existence and schemas, asks
the model hub at most once (with a deadline), changes nothing, and starts nothing but one empty program where answers
are programs. The judgement is `settings.validation`'s.
"""

import contextlib
import logging
import math
import os
import re
import symtable
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError, safe_open

from recipe.async_engine.inspection.prompt_check import row_faults
from recipe.async_engine.rewards import programs
from recipe.async_engine.settings.facts import FileFact, NodeRoom, Resources
from recipe.async_engine.settings.plan import RunPlan, has_critic
from recipe.async_engine.settings.sections import lookup
from recipe.async_engine.settings.validation import validated_plan
from recipe.async_engine.settings.verl_types import well_formed

logger = logging.getLogger(__name__)

# What verl's data set reads.
DATA_SUFFIXES = (".parquet", ".json", ".jsonl")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+|[\w.-]+")
HUB_TIMEOUT_S = 10.0
# Where verl reads the path of a custom reward function; the second is its older place.
REWARD_FUNCTIONS = ("reward.custom_reward_function", "custom_reward_function")


def plain(config: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as a plain mapping with all interpolations resolved; `???` stays where a value is missing."""
    node = config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
    return dict(OmegaConf.to_container(node, resolve=True))


def file_facts(config: Mapping[str, Any]) -> list[FileFact]:
    """What is found at the paths of a plain configuration: model, data files, reward function."""
    return [*_model(config), *_data(config), *_reward_function(config), *_programs(config)]


def check(config: DictConfig | Mapping[str, Any], *, available: Resources | None = None) -> RunPlan:
    """Refuse a configuration that cannot run, else derive the plan of the run.

    Call it after the built-in task, if any, has filled its paths. Where `available` is not given and the run starts
    its own Ray with `ray_kwargs.ray_init.num_gpus`, that number is what is there.

    Raises:
        ConfigError: Something in it cannot run; the error has every problem found.
    """
    return check_plain(plain(config), available=available)


def check_plain(settings: Mapping[str, Any], *, available: Resources | None = None) -> RunPlan:
    """`check` of a plain, resolved mapping."""
    # What is of a wrong type is reported by `validated_plan`; the rest is looked at all the same.
    usable, _ = well_formed(settings)
    facts = file_facts(usable)
    logical = lookup(usable, "ray_kwargs.ray_init.num_gpus")
    if available is None and logical is not None and not lookup(usable, "ray_kwargs.ray_init.address"):
        cpus = lookup(usable, "ray_kwargs.ray_init.num_cpus")
        available = Resources(logical) if cpus is None else Resources.of([NodeRoom(logical, cpus)])
    plan = validated_plan(settings, available, facts)
    if plan.settings.async_training.use_trainer_do_validate:
        setting = "async_training.use_trainer_do_validate"
        logger.warning("%s=true has no effect: rollout replicas validate, with the same scores", setting)
    return plan


def _is_remote(path: str) -> bool:
    return "://" in path


def _model(config: Mapping[str, Any]) -> Iterator[FileFact]:
    policy = "actor_rollout_ref.model.path"
    settings = [policy]
    if has_critic(config):
        settings.append("critic.model.path")
    if lookup(config, "reward.reward_model.enable"):
        settings.append("reward.reward_model.model_path")
    for setting in settings:
        path = lookup(config, setting)
        if not path:
            yield FileFact(setting, "null", "model", fault="is not set")
        elif not _is_remote(str(path)):
            # The one rule that asks is about what a CPU's engines load; a large model's headers are many files, perhaps
            # on a slow disk.
            on_cpu = setting == policy and lookup(config, "trainer.device") == "cpu"
            largest = _largest_tensor(Path(path)) if on_cpu else None
            yield FileFact(setting, str(path), "model", fault=_model_fault(str(path)), largest_tensor=largest)


def _model_fault(path: str) -> str | None:
    local = Path(path).expanduser()
    if local.is_dir():
        return None if (local / "config.json").is_file() else "has no config.json"
    if local.exists():
        return "is not a directory"
    return _hub_fault(path) if HUB_NAME.fullmatch(path) else "does not exist"


def _largest_tensor(model: Path) -> tuple[str, int] | None:
    """Name and number of elements, from the headers of the model's weights; None where it has no such files."""
    sizes: dict[str, int] = {}
    for file in model.expanduser().glob("*.safetensors"):
        with contextlib.suppress(OSError, SafetensorError), safe_open(file, framework="numpy") as weights:
            names = weights.keys()
            sizes |= {name: math.prod(weights.get_slice(name).get_shape()) for name in names}
    return max(sizes.items(), key=lambda item: item[1], default=None)


def _hub_fault(name: str) -> str | None:
    """Why a hub model cannot be had: neither in the local cache nor, as far as can be told, on the hub."""
    # A mirror that verl asks instead of the hub (see verl's documentation).
    if os.environ.get("VERL_USE_MODELSCOPE", "").lower() == "true":
        return None
    import httpx
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    offline = "exists neither as a directory nor in the hub's local cache, and the hub is offline (HF_HUB_OFFLINE)"
    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return None
        if constants.HF_HUB_OFFLINE:
            return offline
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except HFValidationError:
        return "does not exist as a directory, and is no valid name of a hub model"
    except OfflineModeIsEnabled:
        return offline
    except HfHubHTTPError as error:
        return f"does not exist as a directory, and the hub refuses it ({type(error).__name__})"
    except (OSError, httpx.HTTPError) as error:
        return f"does not exist as a directory, and the hub cannot be reached ({type(error).__name__})"
    return None


def _data(config: Mapping[str, Any]) -> Iterator[FileFact]:
    for setting in ("data.train_files", "data.val_files"):
        value = lookup(config, setting)
        paths = [value] if isinstance(value, str) else list(value or [])
        if not paths:
            yield FileFact(setting, "null", "data", fault="is not set")
        for path in paths:
            if not _is_remote(str(path)):
                yield _data_file(setting, str(path), config)


def _data_file(setting: str, path: str, config: Mapping[str, Any]) -> FileFact:
    local = Path(path).expanduser()
    # A data set class of the user's reads the file in its own way.
    own = lookup(config, "data.custom_cls.path") is not None
    if not local.is_file():
        return FileFact(setting, path, "data", fault="does not exist" if not local.exists() else "is no file")
    if local.suffix not in DATA_SUFFIXES:
        return FileFact(setting, path, "data", fault=None if own else f"is none of {', '.join(DATA_SUFFIXES)}")
    rows, columns = None, None
    try:
        if local.suffix == ".parquet":
            with pyarrow.parquet.ParquetFile(local) as file:
                rows, columns = file.metadata.num_rows, tuple(file.schema_arrow.names)
        return FileFact(setting, path, "data", None, rows, columns, row_faults=() if own else row_faults(local, config))
    except pyarrow.ArrowException as error:
        return FileFact(setting, path, "data", fault=f"is not a {local.suffix[1:]} file ({error})")
    except OSError as error:
        return FileFact(setting, path, "data", fault=f"cannot be read ({error.strerror or error})")


def _reward_function(config: Mapping[str, Any]) -> Iterator[FileFact]:
    for section in REWARD_FUNCTIONS:
        path = lookup(config, f"{section}.path")
        if path and not _is_remote(str(path)):
            name = lookup(config, f"{section}.name") or "compute_score"
            yield FileFact(f"{section}.path", str(path), "code", fault=_code_fault(Path(str(path)), str(name)))


def _programs(config: Mapping[str, Any]) -> Iterator[FileFact]:
    """The reward of programming tasks, where it is used on this machine: on a cluster, whoever scores tries it."""
    for section in REWARD_FUNCTIONS:
        path = str(lookup(config, f"{section}.path") or "")
        own = path == f"pkg://{programs.__name__}" or Path(path).resolve() == Path(programs.__file__).resolve()
        if own and not lookup(config, "ray_kwargs.ray_init.address"):
            try:
                fault = programs.fault(**(lookup(config, f"{section}.reward_kwargs") or {}))
            except TypeError as error:
                fault = f"reward_kwargs: {error}."
            yield FileFact(section, path, "programs", fault=fault)


def _code_fault(path: Path, function: str) -> str | None:
    if not path.is_file():
        return "does not exist"
    try:
        source = path.read_text("utf-8")
        symbols = symtable.symtable(source, str(path), "exec").get_symbols()
    except (SyntaxError, ValueError) as error:
        return f"is not valid Python ({error})"
    names = {item.get_name() for item in symbols if item.is_assigned() or item.is_imported()}
    # What a star import brings, only running it can tell.
    return None if function in names or "import *" in source else f"defines no function {function}"

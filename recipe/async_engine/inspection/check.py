# SPDX-License-Identifier: Apache-2.0
"""Reads what a configuration refers to outside itself, and refuses it where it cannot run.

Contract: `check` is the one call a main makes before it starts a process; `look` gives what it found without judging.
They read the data files and the models' config.json, ask the model hub (with a deadline), change nothing (`datasets`
and the hub keep what is read in their caches), and start nothing but the driver's own program that tells the memory of
accelerators.
The judgement is `config.validation`'s, that of the judges which a main brings, and that of verl's own types where
verl is imported anyway.
"""

import contextlib
import logging
import math
import os
import symtable
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic_core import from_json
from safetensors import SafetensorError, safe_open

from recipe.async_engine.config.facts import FileFact, NodeRoom, Resources
from recipe.async_engine.config.fields import is_count
from recipe.async_engine.config.legacy import migrated
from recipe.async_engine.config.notices import left_behind
from recipe.async_engine.config.packages import MODULES
from recipe.async_engine.config.plan import RunPlan, has_critic
from recipe.async_engine.config.problems import ConfigError, Problem, lookup
from recipe.async_engine.config.rules.names import unusual
from recipe.async_engine.config.validation import Findings, Judge, judge, warnings_of
from recipe.async_engine.config.verl_types import well_formed
from recipe.async_engine.core.deadlines import HUB_S
from recipe.async_engine.inspection.accelerators import memory_here
from recipe.async_engine.inspection.code_files import code_facts
from recipe.async_engine.inspection.data_files import data_facts
from recipe.async_engine.inspection.node_probe import absent
from recipe.async_engine.inspection.prompt_check import is_hub_name
from recipe.async_engine.record.contents import without_weights

logger = logging.getLogger(__name__)

REWARD_FUNCTION = "reward.custom_reward_function"


def plain(config: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as a plain mapping with all interpolations resolved; `???` stays where a value is missing.

    Raises:
        ConfigError: an interpolation cannot be resolved.
    """
    node = config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
    try:
        return dict(OmegaConf.to_container(node, resolve=True))
    except OmegaConfBaseException as error:
        raise unresolved(error) from error


def unresolved(error: OmegaConfBaseException) -> ConfigError:
    """What a value that refers to something that is not there, or is missing, is refused with."""
    advice = str(error.msg or error).splitlines()[0]
    return ConfigError([Problem(str(error.full_key), "as configured", "a value that can be made", f"{advice}.")])


def file_facts(config: Mapping[str, Any]) -> list[FileFact]:
    """What is found at the paths of a plain configuration: model, data files, reward function, other code."""
    return [
        *_model(config),
        *_start(config),
        *data_facts(config),
        *_reward_function(config),
        *_written(config),
        *code_facts(config),
    ]


def check(
    config: DictConfig | Mapping[str, Any], *, available: Resources | None = None, judges: Sequence[Judge] = ()
) -> RunPlan:
    """Refuse a configuration that cannot run, else derive the plan of the run.

    Call it after the built-in task, if any, has filled its paths. Where `available` is not given and the run starts
    its own Ray with `ray_kwargs.ray_init.num_gpus`, that number is what is there. The `judges` judge it too.

    Raises:
        ConfigError: Something in it cannot run; the error has every problem found.
    """
    return check_plain(plain(config), available=available, judges=judges)


def check_plain(
    settings: Mapping[str, Any], *, available: Resources | None = None, judges: Sequence[Judge] = ()
) -> RunPlan:
    """`check` of a plain, resolved mapping."""
    found = look(settings, available=available, judges=judges)
    if found.problems:
        raise ConfigError(found.problems)
    for warning in found.warnings:
        logger.warning("%s", warning)
    return found.plan


def check_types(settings: Mapping[str, Any]) -> None:
    """Refuse what verl would refuse in a worker, or look up and not find, as far as no main could tell.

    That is its own types on a CPU, whose mains do without verl, and names that a module of the user's may add. verl is
    imported, and so are those modules.

    Raises:
        ConfigError: something is.
    """
    from recipe.async_engine.inspection.verl_check import external_names, verl_problems

    usable = migrated(settings)
    problems, context = judge(usable, None, list(code_facts(usable)))
    # What the rules refuse of it has been judged with the facts that they need.
    found = external_names(context)
    if context.on_cpu:
        found += [problem for problem in verl_problems(context, problems) if problem not in found]
    if found:
        raise ConfigError(found)


def look(
    settings: Mapping[str, Any],
    *,
    available: Resources | None = None,
    with_verl: bool | None = None,
    makes_task: bool = False,
    judges: Sequence[Judge] = (),
) -> Findings:
    """Everything that can be said of a plain, resolved configuration before a process starts.

    Args:
        available: see `check`.
        with_verl: whether verl is asked too, which imports it; None: on a CPU, whose trainer's process does it
            (`check_types`), only for names that are none of verl's own.
        makes_task: whether the run would make the built-in task, which fills paths that are null.
        judges: who else judges it.
    """
    dropped = list(left_behind(settings))
    settings = migrated(settings)
    # What is of a wrong type is reported by `judge`; the rest is looked at all the same.
    usable, _ = well_formed(settings)
    facts = file_facts(usable)
    if makes_task:
        facts = [fact for fact in facts if fact.path != "null"] + list(_builtin_task(usable))
    problems, context = judge(settings, _available(usable, available), facts, judges=judges)
    if with_verl is None:
        with_verl = not context.on_cpu or (not problems and bool(unusual(context)))
    if with_verl:
        from recipe.async_engine.inspection.verl_check import verl_problems

        problems += verl_problems(context, problems)
    return Findings(problems, [*warnings_of(context, judges), *dropped], context)


def _builtin_task(config: Mapping[str, Any]) -> Iterator[FileFact]:
    """The data of the built-in task, where the run would make it."""
    rows = lookup(config, "builtin_task.train_size")
    if not lookup(config, "data.train_files"):
        yield FileFact("data.train_files", "of the built-in task", "data", rows=rows)


def _available(config: Mapping[str, Any], given: Resources | None) -> Resources | None:
    """What there is to place workers on: as given, else what a Ray that the run starts here would have."""
    if given is not None or lookup(config, "ray_kwargs.ray_init.address"):
        return given
    # A cluster's accelerators may be others than this machine's.
    elsewhere = lookup(config, "trainer.device") == "cpu" or os.environ.get("RAY_ADDRESS")
    device_bytes = None if elsewhere else memory_here()
    # Where there are accelerators, there is what engines on them would import.
    missing = frozenset(() if device_bytes is None else absent(MODULES))
    logical, cpus = (lookup(config, f"ray_kwargs.ray_init.{name}") for name in ("num_gpus", "num_cpus"))
    if logical is not None and cpus is not None:
        return replace(Resources.of([NodeRoom(logical, cpus)], device_bytes), absent=missing)
    found = Resources(logical, device_bytes, absent=missing)
    return None if found == Resources(None) else found


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
            sizes, fault = _model_config(str(path))
            yield FileFact(setting, str(path), "model", fault, largest_tensor=largest, model_config=sizes)


def _start(config: Mapping[str, Any]) -> Iterator[FileFact]:
    """The checkpoint whose weights the run begins with; on a cluster it may be where only its nodes see it."""
    path = lookup(config, "async_training.start_from")
    sizes = [lookup(config, f"trainer.{name}") for name in ("nnodes", "n_gpus_per_node")]
    if isinstance(path, str) and all(map(is_count, sizes)) and not lookup(config, "ray_kwargs.ray_init.address"):
        folder = Path(path).expanduser()
        fault = without_weights(config, math.prod(sizes), has_critic(config), folder)
        yield FileFact("async_training.start_from", path, "checkpoint", fault)


def _model_config(path: str) -> tuple[Mapping[str, Any] | None, str | None]:
    """A model's config.json where it is at hand, and why the model cannot be used."""
    if os.path.isdir(path):
        return _read_config(Path(path) / "config.json")
    if os.path.exists(path):
        return None, "is not a directory"
    if path.startswith("~"):
        return None, "does not exist: ~ is taken as it is written; write the whole path"
    if not is_hub_name(path):
        return None, "does not exist"
    # verl's documentation has this variable for a mirror that it asks instead of the hub.
    if os.environ.get("VERL_USE_MODELSCOPE", "").lower() == "true":
        return None, None
    file, fault = _on_hub(path)
    return (None, fault) if file is None else _read_config(file)


def _read_config(file: Path) -> tuple[Mapping[str, Any] | None, str | None]:
    try:
        read = from_json(file.read_bytes())
    except FileNotFoundError:
        return None, "has no config.json"
    except (OSError, ValueError) as error:
        return None, f"has a config.json that cannot be read ({error})"
    return (read, None) if isinstance(read, dict) else (None, "has a config.json that is no JSON object")


def _on_hub(name: str) -> tuple[Path | None, str | None]:
    """A hub model's config.json, which stays in the hub's cache, or why the model cannot be had."""
    import httpx
    from huggingface_hub import HfApi, constants, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    absent = "exists neither as a directory nor in the hub's local cache, and the hub"
    try:
        return Path(hf_hub_download(name, "config.json", local_files_only=True)), None
    except LocalEntryNotFoundError:
        if constants.HF_HUB_OFFLINE:
            return None, f"{absent} is offline (HF_HUB_OFFLINE)"
    try:
        HfApi().model_info(name, timeout=HUB_S)  # which is asked once
        return Path(hf_hub_download(name, "config.json", etag_timeout=HUB_S)), None
    except HfHubHTTPError as error:
        return None, f"does not exist as a directory, and the hub refuses it ({type(error).__name__})"
    except (OSError, httpx.HTTPError) as error:
        return None, f"{absent} cannot be reached ({type(error).__name__})"


def _largest_tensor(model: Path) -> tuple[str, int] | None:
    """Name and number of elements, from the headers of the model's weights; None where it has no such files."""
    sizes: dict[str, int] = {}
    for file in model.glob("*.safetensors") if os.path.isdir(model) else ():
        with contextlib.suppress(OSError, SafetensorError), safe_open(file, framework="numpy") as weights:
            names = weights.keys()
            sizes |= {name: math.prod(weights.get_slice(name).get_shape()) for name in names}
    return max(sizes.items(), key=lambda item: item[1], default=None)


def _reward_function(config: Mapping[str, Any]) -> Iterator[FileFact]:
    path = lookup(config, f"{REWARD_FUNCTION}.path")
    if path and not _is_remote(str(path)):
        name = lookup(config, f"{REWARD_FUNCTION}.name") or "compute_score"
        yield FileFact(f"{REWARD_FUNCTION}.path", str(path), "code", fault=_code_fault(Path(str(path)), str(name)))


def _written(config: Mapping[str, Any]) -> Iterator[FileFact]:
    """Folders that the run would make; on a cluster they may be where only its nodes see them."""
    for name in ("default_local_dir", "rollout_data_dir", "validation_data_dir"):
        path = lookup(config, f"trainer.{name}")
        if not isinstance(path, str) or not path or lookup(config, "ray_kwargs.ray_init.address"):
            continue
        folder = Path(path).absolute()
        with contextlib.suppress(OSError, ValueError):
            there = next(above for above in (folder, *folder.parents) if above.exists())
            fault = None if there.is_dir() else f"cannot be made: {there} is no folder"
            if fault is None and not os.access(there, os.W_OK | os.X_OK):
                fault = f"cannot be written to: {there} does not let you"
            yield FileFact(f"trainer.{name}", path, "written", fault)


def _code_fault(path: Path, function: str) -> str | None:
    if not os.path.isfile(path):
        return "does not exist"
    try:
        source = path.read_text("utf-8")
        symbols = symtable.symtable(source, str(path), "exec").get_symbols()
    except OSError as error:
        return f"cannot be read ({error})"
    except (SyntaxError, ValueError) as error:
        return f"is not valid Python ({error})"
    names = {item.get_name() for item in symbols if item.is_assigned() or item.is_imported()}
    # What a star import brings, only running it can tell.
    return None if function in names or "import *" in source else f"defines no function {function}"

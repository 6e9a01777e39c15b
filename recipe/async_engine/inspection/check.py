# SPDX-License-Identifier: Apache-2.0
"""Reads the files that a configuration refers to, and refuses a configuration that cannot run.

Contract: a main program (such as `recipe.fully_async.main`) calls `check` before it starts any process. `look` makes
the same checks, and returns the problems instead of raising an error. Both read the data files and the models'
config.json, and query the Hugging Face hub with a deadline. They change nothing except the caches of `datasets` and of
the hub. The only program that they start is nvidia-smi, for the size of device memory. The checks are the rules in
`config.validation`, the additional checks that the main program passes (`Judge`) and, on an accelerator, where verl has
to be imported anyway, verl's own types.
"""

import contextlib
import logging
import math
import os
import shutil
import subprocess
import symtable
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic_core import from_json
from safetensors import SafetensorError, safe_open

from recipe.async_engine.config.facts import TRAIN_FILES, FileFact, NodeRoom, Resources
from recipe.async_engine.config.fields import is_count
from recipe.async_engine.config.legacy import migrated
from recipe.async_engine.config.notices import left_behind
from recipe.async_engine.config.packages import MODULES
from recipe.async_engine.config.plan import RunPlan, has_critic, teachers
from recipe.async_engine.config.problems import ConfigError, Problem, lookup
from recipe.async_engine.config.rules.names import unusual
from recipe.async_engine.config.validation import Findings, Judge, judge, warnings_of
from recipe.async_engine.config.verl_types import well_formed
from recipe.async_engine.core.deadlines import DRIVER_S, HUB_S
from recipe.async_engine.inspection.code_files import code_facts
from recipe.async_engine.inspection.data_files import data_facts, is_hub_name, other_tokens
from recipe.async_engine.inspection.node_probe import absent
from recipe.async_engine.record.contents import without_weights

logger = logging.getLogger(__name__)

QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
REWARD_FUNCTION = "reward.custom_reward_function"


def plain(config: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as a plain mapping with all interpolations resolved; a missing value stays `???`.

    Raises:
        ConfigError: an interpolation cannot be resolved.
    """
    if not isinstance(config, DictConfig):
        return dict(config)
    try:
        return dict(OmegaConf.to_container(config, resolve=True))
    except OmegaConfBaseException as error:
        raise unresolved(error) from error


def unresolved(error: OmegaConfBaseException) -> ConfigError:
    advice = str(error.msg or error).splitlines()[0]
    return ConfigError([Problem(str(error.full_key), "as configured", "a value that can be resolved", f"{advice}.")])


def file_facts(config: Mapping[str, Any]) -> list[FileFact]:
    """Return facts about the models, data files, code and folders that a plain configuration names."""
    return [
        *_models(config),
        *_start(config),
        *data_facts(config),
        *_reward_function(config),
        *_written(config),
        *code_facts(config),
    ]


def check(
    config: DictConfig | Mapping[str, Any], *, available: Resources | None = None, judges: Sequence[Judge] = ()
) -> RunPlan:
    """Return the plan of the run and log warnings about its configuration; raise an error if it cannot run.

    If the run uses the built-in task, ``config`` must already have the task's paths.

    Args:
        config: the configuration; if it is a plain mapping, its interpolations must be resolved.
        available: the resources for the run. If None and the run starts its own Ray with
            `ray_kwargs.ray_init.num_gpus`, that number of accelerators is available.
        judges: additional checks.

    Raises:
        ConfigError: the configuration cannot run; the error has every problem found.
    """
    found = look(plain(config), available=available, judges=judges)
    if found.problems:
        raise ConfigError(found.problems)
    for warning in found.warnings:
        logger.warning("%s", warning)
    return found.plan


def check_types(settings: Mapping[str, Any]) -> None:
    """Run, in the trainer's process, the checks for which the main process would have had to import verl.

    The function imports verl and the user's modules. On every platform it checks that each configured name (of a loss,
    for example) that is not verl's own is in verl's registry after these imports. On a CPU it also builds verl's config
    types, which the main process does on an accelerator.

    Raises:
        ConfigError: a check failed.
    """
    from recipe.async_engine.inspection.verl_check import external_names, verl_problems

    usable = migrated(settings)
    problems, context = judge(usable, None, list(code_facts(usable)))
    # `problems` are not reported here: the main process has already reported them.
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
    """Return all problems and warnings of a plain, resolved configuration that can be found before a process starts.

    Args:
        with_verl: whether to check the configuration with verl's types too, which imports verl. If None, this is done
            on an accelerator. On a CPU, the trainer's process does it later (`check_types`), and this function does it
            only if there is no other problem and the configuration names something (a loss, for example) that is not
            verl's own.
        makes_task: whether the run would create the built-in task. If so, paths that are null are no problem, since
            creating the task sets them.
    """
    dropped = list(left_behind(settings))
    settings = migrated(settings)
    # Remove values of a wrong type, so that the files which other settings name can be inspected. `judge` below gets
    # the unchanged settings and reports these values.
    usable, _ = well_formed(settings)
    facts = file_facts(usable)
    if makes_task:
        facts = [fact for fact in facts if fact.path != "null"]
        if not lookup(usable, TRAIN_FILES):
            rows = lookup(usable, "builtin_task.train_size")
            facts.append(FileFact(TRAIN_FILES, "of the built-in task", "data", rows=rows))
    problems, context = judge(settings, _available(usable, available), facts, judges=judges)
    if with_verl is None:
        with_verl = not context.on_cpu or (not problems and bool(unusual(context)))
    if with_verl:
        from recipe.async_engine.inspection.verl_check import verl_problems

        problems += verl_problems(context, problems)
    return Findings(problems, [*warnings_of(context, judges), *dropped], context)


def _available(config: Mapping[str, Any], given: Resources | None) -> Resources | None:
    """Return ``given`` if it is not None; otherwise the resources of the Ray cluster that the run starts itself.

    Return None if these are not known, or if the run joins a Ray cluster.
    """
    if given is not None or lookup(config, "ray_kwargs.ray_init.address"):
        return given
    # Do not query this machine's accelerators if the run uses none or uses those of a cluster.
    elsewhere = lookup(config, "trainer.device") == "cpu" or os.environ.get("RAY_ADDRESS")
    device_bytes = None if elsewhere else _memory_here()
    # This machine needs the engines' packages only if engines run here: on its accelerators or on its CPU.
    on_this_cpu = lookup(config, "trainer.device") == "cpu" and not os.environ.get("RAY_ADDRESS")
    missing = frozenset(absent(MODULES) if on_this_cpu or device_bytes is not None else ())
    logical, cpus = (lookup(config, f"ray_kwargs.ray_init.{name}") for name in ("num_gpus", "num_cpus"))
    if logical is not None and cpus is not None:
        return replace(Resources.of([NodeRoom(logical, cpus)], device_bytes), absent=missing)
    found = Resources(logical, device_bytes, absent=missing)
    return None if found == Resources(None) else found


def _memory_here() -> int | None:
    """Return the bytes of memory of this machine's smallest accelerator; None if nvidia-smi is missing or fails.

    nvidia-smi is used because importing torch would take seconds and device memory.
    """
    if shutil.which(QUERY[0]) is None:
        return None
    try:
        answer = subprocess.run(QUERY, capture_output=True, text=True, timeout=DRIVER_S, check=True).stdout
        sizes = [int(line) << 20 for line in answer.split()]
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        logger.warning("the accelerators' memory is not known, so it is not checked: %s", error)
        return None
    return min(sizes, default=None)


def _is_remote(path: str) -> bool:
    return "://" in path


def _models(config: Mapping[str, Any]) -> Iterator[FileFact]:
    """Yield facts about the models of the policy, the critic, the reward model and the teachers."""
    policy = "actor_rollout_ref.model.path"
    settings = [policy]
    if has_critic(config):
        settings.append("critic.model.path")
    if lookup(config, "reward.reward_model.enable"):
        settings.append("reward.reward_model.model_path")
    settings += [f"{teacher}.model_path" for teacher in teachers(config)]
    for setting in settings:
        path = lookup(config, setting)
        if not path:
            yield FileFact(setting, "null", "model", fault="is not set")
        elif not _is_remote(str(path)):
            # Only rules for a CPU need the size of the largest tensor; finding it takes long for a large model.
            on_cpu = setting == policy and lookup(config, "trainer.device") == "cpu"
            largest = _largest_tensor(Path(path)) if on_cpu else None
            sizes, fault = _model_config(str(path))
            if fault is None and setting.startswith("distillation."):
                fault = other_tokens(config, str(path))
            yield FileFact(setting, str(path), "model", fault, largest_tensor=largest, model_config=sizes)


def _start(config: Mapping[str, Any]) -> Iterator[FileFact]:
    """Yield a fact about the checkpoint `async_training.start_from`, unless ``ray_init.address`` is set."""
    path = lookup(config, "async_training.start_from")
    sizes = [lookup(config, f"trainer.{name}") for name in ("nnodes", "n_gpus_per_node")]
    if isinstance(path, str) and all(map(is_count, sizes)) and not lookup(config, "ray_kwargs.ray_init.address"):
        folder = Path(path).expanduser()
        fault = without_weights(config, math.prod(sizes), has_critic(config), folder)
        yield FileFact("async_training.start_from", path, "checkpoint", fault)


def _model_config(path: str) -> tuple[Mapping[str, Any] | None, str | None]:
    """Return the contents of a model's config.json, and why the model cannot be used. Each of the two may be None."""
    if os.path.isdir(path):
        return _read_config(Path(path) / "config.json")
    if os.path.exists(path):
        return None, "is not a directory"
    if path.startswith("~"):
        return None, "does not exist: ~ is taken as it is written; write the whole path"
    if not is_hub_name(path):
        return None, "does not exist"
    # With VERL_USE_MODELSCOPE=true, verl downloads models from ModelScope, so the hub is not asked.
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
    return (read, None) if isinstance(read, dict) else (None, "has a config.json that is not a JSON object")


def _on_hub(name: str) -> tuple[Path | None, str | None]:
    """Return the path of a hub model's config.json in the local cache, or why the model is not available."""
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
        HfApi().model_info(name, timeout=HUB_S)  # Unlike a download, `model_info` makes no retries.
        return Path(hf_hub_download(name, "config.json", etag_timeout=HUB_S)), None
    except HfHubHTTPError as error:
        return None, f"does not exist as a directory, and the hub refuses it ({type(error).__name__})"
    except (OSError, httpx.HTTPError) as error:
        return None, f"{absent} cannot be reached ({type(error).__name__})"


def _largest_tensor(model: Path) -> tuple[str, int] | None:
    """Return name and number of elements of a model's largest tensor; None without safetensors files.

    Only the headers of the files are read.
    """
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
    """Yield a fact about each output folder, with the reason if the folder is unusable.

    Yield nothing if ``ray_init.address`` is set, because the folders may then be on other machines.
    """
    for name in ("default_local_dir", "rollout_data_dir", "validation_data_dir"):
        path = lookup(config, f"trainer.{name}")
        if not isinstance(path, str) or not path or lookup(config, "ray_kwargs.ray_init.address"):
            continue
        folder = Path(path).absolute()
        with contextlib.suppress(OSError, ValueError):
            there = next(above for above in (folder, *folder.parents) if above.exists())
            fault = None if there.is_dir() else f"cannot be created: {there} is not a folder"
            if fault is None and not os.access(there, os.W_OK | os.X_OK):
                fault = f"cannot be written to: there is no write permission in {there}"
            yield FileFact(f"trainer.{name}", path, "written", fault)


def _code_fault(path: Path, function: str) -> str | None:
    """Return why a Python file cannot be used, or None if it seems to define the function."""
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
    # Accept a file with a star import, because only running the file would tell which names it imports.
    return None if function in names or "import *" in source else f"defines no function {function}"

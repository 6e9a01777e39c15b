# SPDX-License-Identifier: Apache-2.0
"""Checks that files and modules which a configuration names exist.

They are code files, folders, Python modules, and the YAML files that list agent loops or tools.

Contract: no code is run or imported, and files on remote file systems (`scheme://`) are skipped. Modules are checked
only if workers have the same modules as this process, which holds if the run starts its own Ray, without a
`runtime_env` that changes packages. Shown by tests/integration/test_code_files.py.
"""

import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from recipe.async_engine.config.facts import FileFact
from recipe.async_engine.config.problems import lookup
from recipe.async_engine.config.rules.names import LOGGERS, asked
from recipe.async_engine.inspection.node_probe import is_there

ROLLOUT = "actor_rollout_ref.rollout"
AGENT_LOOPS = f"{ROLLOUT}.agent.agent_loop_config_path"
DESCRIPTIONS = (AGENT_LOOPS, *(f"{ROLLOUT}.multi_turn.{name}_config_path" for name in ("tool", "interaction")))
FOLDERS = ("actor_rollout_ref.model.tokenizer_path", "actor_rollout_ref.model.lora_adapter_path")
MODULES = (
    "actor_rollout_ref.model.external_lib",
    "critic.model.external_lib",
    f"{ROLLOUT}.checkpoint_engine.custom_backend_module",
)
RAY = "ray_kwargs.ray_init"
OTHERS = (
    "address",
    "runtime_env.env_vars.PYTHONPATH",
    *(f"runtime_env.{name}" for name in ("working_dir", "py_modules", "pip", "uv", "conda", "container", "image_uri")),
)
"""Settings of `ray_init` that may give workers other modules than this process has."""
TOOLS, DATASET = f"{ROLLOUT}.multi_turn.function_tool_path", "data.custom_cls.path"


def code_facts(config: Mapping[str, Any]) -> Iterator[FileFact]:
    """Yield a fact for each code file, folder, module and YAML file (of agent loops or tools) that is configured."""
    here = not (os.environ.get("RAY_ADDRESS") or any(lookup(config, f"{RAY}.{name}") for name in OTHERS))
    for setting in DESCRIPTIONS:
        if path := _local(config, setting):
            yield _description(setting, path, setting == AGENT_LOOPS and here)
    for setting in (TOOLS, DATASET):
        if path := _local(config, setting):
            missing = not os.path.isfile(path)
            yield FileFact(setting, path, "code", fault="does not exist" if missing else None)
    for setting in FOLDERS:
        path = _local(config, setting)
        # Check only paths with one of these prefixes; any other text may be the name of a model on the hub.
        if path and path.startswith(("/", "~", "./", "../")):
            # verl expands ~ only in the adapter's path (verl/utils/model.py:826).
            folder = Path(path).expanduser() if setting == FOLDERS[1] else Path(path)
            fault = None if os.path.isdir(folder) else "does not exist"
            yield FileFact(setting, path, "folder", fault=fault)
    named = [(setting, name, name) for setting in MODULES for name in asked(lookup(config, setting))]
    loggers = asked(lookup(config, "trainer.logger"))
    named += [("trainer.logger", name, package) for name in loggers if (package := LOGGERS.get(str(name)))]
    for setting, name, module in named if here else ():
        fault = "cannot be found" if setting in MODULES else f"needs {module}, which is not installed"
        yield FileFact(setting, str(name), "module", fault=None if is_there(str(module)) else fault)


def _local(config: Mapping[str, Any], setting: str) -> str:
    """Return the local path that a setting names; empty if the setting is not set or names a remote file."""
    path = str(lookup(config, setting) or "")
    return "" if "://" in path else path


def _description(setting: str, path: str, names_modules: bool) -> FileFact:
    """Return a `FileFact` about a YAML file that lists agent loops or tools; its `columns` are the listed names.

    With ``names_modules``, it is a fault if the module of a listed class cannot be found.
    """
    file = next((place for place in _places(path) if os.path.isfile(place)), None)
    if file is None:
        return FileFact(setting, path, "description", "does not exist")
    try:
        # verl reads the file with the same call.
        read = OmegaConf.to_container(OmegaConf.load(file))
    except Exception as error:  # A user's file may cause any exception.
        return FileFact(setting, path, "description", f"cannot be read ({' '.join(str(error).split())})")
    entries = [entry for entry in read if isinstance(entry, dict)] if isinstance(read, list) else []
    targets = [str(entry.get("_target_") or "") for entry in entries] if names_modules else []
    missing = next((target for target in targets if target and not is_there(target.rpartition(".")[0])), None)
    fault = f"names {missing}, whose module cannot be found from here; put its folder on PYTHONPATH"
    columns = tuple(str(entry.get("name")) for entry in entries)
    return FileFact(setting, path, "description", fault if missing else None, columns=columns)


def _places(path: str) -> Iterator[Path]:
    """Yield the paths at which verl looks for the file ``path`` (verl/utils/import_utils.py:91).

    They are ``path`` itself, ``path`` in the folder that contains the package verl, and ``path`` in that package.
    """
    yield Path(path)
    verl = importlib.util.find_spec("verl")
    for folder in (verl.submodule_search_locations or []) if verl is not None else []:
        yield Path(folder).parent / path
        yield Path(folder) / path

# SPDX-License-Identifier: Apache-2.0
"""What happens in a main's process before its task: the plan is shown, or a flag's configuration is checked.

The configuration groups name `BeforeRun` as a callback of Hydra, so this runs in every main that composes them: in this
package's own, and in stock verl's with a flag. Contract: with ``plan_only=true`` the plan is printed and the process
ends, with status 0 where it can run and 1 where it cannot; no folder of a run, no process is made. Otherwise the mode
that a flag chose is the one that runs, whatever else the script says, or the process ends here, before stock verl
starts Ray. Anything else goes on untouched.
Shown by tests/integration/test_plan_only.py.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

from hydra.core.utils import JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict, read_write


class BeforeRun(Callback):
    """See the module's contract."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Called before Hydra makes a folder for the run; what is changed here is what the main's task gets."""
        self._began = time.time()
        _look(config, may_settle=True)

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Called for each of several runs, whose task has its configuration already."""
        if config.hydra.mode == RunMode.MULTIRUN:
            _look(config, may_settle=False)

    def on_run_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Called when the main's task is over: a flag's run that ended with alarms has an exit status for it."""
        trainer = str(config.trainer.get("v1", {}).get("trainer_mode", ""))
        if not trainer.startswith("recipe_") or kwargs["job_return"].status is not JobStatus.COMPLETED:
            return
        from recipe.async_engine.record.run_record import exit_status
        from recipe.async_engine.record.schema import summary_in

        # It may be on a node whose folders are others.
        summary, _ = summary_in(Path(config.trainer.default_local_dir))
        if summary is None or summary.get("began", 0.0) < self._began:
            return
        if status := exit_status(summary, config.async_training.alarms.exit_status):
            sys.exit(status)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Of several runs, the settings that they have in common are shown."""
        if config.get("plan_only"):
            _look(config, may_settle=True)


def _look(config: DictConfig, may_settle: bool) -> None:
    trainer = str(config.trainer.get("v1", {}).get("trainer_mode", ""))
    plans = bool(config.get("plan_only"))
    if not plans and not trainer.startswith("recipe_") and not config.get("chosen_by_flag"):
        return
    from recipe.async_engine.core.errors import RecipeError
    from recipe.mains.arguments import FlagError, check_main, settle
    from recipe.mains.plan_only import show

    try:
        check_main(config, _main())
        own = config if may_settle else copy.deepcopy(config)
        if (without := settle(own)) and not may_settle:
            raise FlagError(f"in a multirun: {'; '.join(without)}. Leave it out")
        sys.stderr.writelines(f"{said}\n" for said in without)
        own = _without_hydra(own)
        trainer = str(own.trainer.get("v1", {}).get("trainer_mode", ""))
        status = show(own, trainer) if plans else _check(own, trainer)
    except RecipeError as error:
        sys.stderr.write(f"\n{type(error).__name__}: {error}\n")
        status = 1
    if plans or status:
        sys.stdout.flush()
        sys.exit(status)


def _main() -> str:
    """The name of this process's main module, also where it was started as a file of verl's."""
    module = sys.modules["__main__"]
    if (spec := getattr(module, "__spec__", None)) is not None:
        return str(spec.name)
    file = Path(getattr(module, "__file__", None) or ".").resolve()
    verl = importlib.util.find_spec("verl")
    for folder in (verl.submodule_search_locations or ()) if verl is not None else ():
        if file.is_relative_to(Path(folder).resolve()):
            return ".".join(("verl", *file.relative_to(Path(folder).resolve()).with_suffix("").parts))
    return ""


def _check(config: DictConfig, trainer: str) -> int:
    from recipe.async_engine.config.problems import ConfigError
    from recipe.mains.plan_only import findings

    if found := findings(config, trainer).problems:
        raise ConfigError(found)
    return 0


def _without_hydra(config: DictConfig) -> DictConfig:
    """A copy as a main's task gets it."""
    own = copy.deepcopy(config)
    with read_write(own), open_dict(own):
        own.pop("hydra", None)
    return own

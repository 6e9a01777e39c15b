# SPDX-License-Identifier: Apache-2.0
"""Shows the plan, or checks a flag's configuration, in a main's process before its task begins.

The configuration groups name `BeforeRun` as a callback of Hydra, so it runs in every main that composes them: in this
package's own, and in stock verl's with a flag. Contract: with ``plan_only=true`` the plan is printed and the process
ends, with status 0 if the configuration can run and 1 if it cannot; neither a folder nor a process of the run is made.
Otherwise the mode that a flag chose is the one that runs, whatever else the script says, or the process ends before
stock verl starts Ray. All other mains are left alone. Shown by tests/integration/test_plan_only.py.
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
    """The callback of Hydra that keeps the module's contract."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Look at the configuration before Hydra makes a folder for the run; the task gets it as changed here."""
        self._began = time.time()
        _look(config, may_settle=True)

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Look at the configuration of each run of a multirun; it is too late to change it."""
        if config.hydra.mode == RunMode.MULTIRUN:
            _look(config, may_settle=False)

    def on_run_end(self, config: DictConfig, **kwargs: Any) -> None:
        """End the process of a flag's run with the exit status for alarms, if the run ended with some."""
        trainer = str(config.trainer.get("v1", {}).get("trainer_mode", ""))
        if not trainer.startswith("recipe_") or kwargs["job_return"].status is not JobStatus.COMPLETED:
            return
        from recipe.async_engine.record.run_record import exit_status
        from recipe.async_engine.record.schema import summary_in

        # There is none if the run's trainer was on a node that does not share the folder.
        summary, _ = summary_in(Path(config.trainer.default_local_dir))
        if summary is None or summary.get("began", 0.0) < self._began:
            return
        if status := exit_status(summary, config.async_training.alarms.exit_status):
            sys.exit(status)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Show the plan of the settings that the runs of a multirun have in common."""
        if config.get("plan_only"):
            _look(config, may_settle=True)


def _look(config: DictConfig, may_settle: bool) -> None:
    """Show the plan or check a flag's configuration; with ``may_settle``, ``config`` is changed to what runs."""
    trainer = str(config.trainer.get("v1", {}).get("trainer_mode", ""))
    plans = bool(config.get("plan_only"))
    if not plans and not trainer.startswith("recipe_") and not config.get("chosen_by_flag"):
        return
    from recipe.async_engine.config.problems import ConfigError
    from recipe.async_engine.core.errors import RecipeError
    from recipe.mains.arguments import check_main, refused, settle
    from recipe.mains.plan_only import findings, show

    try:
        check_main(config, _main())
        own = config if may_settle else copy.deepcopy(config)
        if (without := settle(own)) and not may_settle:
            raise refused("trainer", "as configured", "what the flag chose", f"In a multirun {'; '.join(without)}.")
        sys.stderr.writelines(f"{said}\n" for said in without)
        own = copy.deepcopy(own)
        with read_write(own), open_dict(own):
            own.pop("hydra", None)  # A main's task gets the configuration without it.
        trainer = str(own.trainer.get("v1", {}).get("trainer_mode", ""))
        status = show(own, trainer) if plans else 0
        if not plans and (found := findings(own, trainer).problems):
            raise ConfigError(found)
    except RecipeError as error:
        sys.stderr.write(f"\n{type(error).__name__}: {error}\n")
        status = 1
    if plans or status:
        sys.stdout.flush()
        sys.exit(status)


def _main() -> str:
    """Return the name of this process's main module, also if it was started as a file of verl's."""
    module = sys.modules["__main__"]
    if (spec := getattr(module, "__spec__", None)) is not None:
        return str(spec.name)
    file = Path(getattr(module, "__file__", None) or ".").resolve()
    verl = importlib.util.find_spec("verl")
    for folder in (verl.submodule_search_locations or ()) if verl is not None else ():
        if file.is_relative_to(Path(folder).resolve()):
            return ".".join(("verl", *file.relative_to(Path(folder).resolve()).with_suffix("").parts))
    return ""

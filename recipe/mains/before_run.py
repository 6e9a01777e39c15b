# SPDX-License-Identifier: Apache-2.0
"""A Hydra callback that prints a run's plan (``plan_only=true``), or checks a flag (``+recipe=...``), before the run.

Hydra calls `BeforeRun` in every main program that uses a configuration group of this package: this package's own main
programs, and stock verl's with a flag. Contract: with ``plan_only=true`` the plan is printed and the process ends, with
status 0 if the configuration can run and 1 if it cannot; no folder is created and no other process is started. Without
``plan_only`` but with a flag, either the selected mode runs, even if the script names another trainer, or the process
ends before stock verl starts Ray. Other runs are not affected. Shown by tests/integration/test_plan_only.py.
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
    """A Hydra callback, which is called before a run starts, and prints the run's plan or checks its configuration."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the configuration of a single run, before Hydra creates a folder.

        Changes to ``config`` take effect in the run.
        """
        self._began = time.time()
        _look(config, may_settle=True)

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the configuration of each run of a multirun.

        Changes to ``config`` would have no effect here, so none are made.
        """
        if config.hydra.mode == RunMode.MULTIRUN:
            _look(config, may_settle=False)

    def on_run_end(self, config: DictConfig, **kwargs: Any) -> None:
        """After a complete run of a trainer of this package (``recipe_...``), exit with `exit_status` if it is not 0.

        The status is not 0 if an alarm rang and ``async_training.alarms.exit_status`` is set.
        """
        trainer = str(config.trainer.get("v1", {}).get("trainer_mode", ""))
        if not trainer.startswith("recipe_") or kwargs["job_return"].status is not JobStatus.COMPLETED:
            return
        from recipe.async_engine.record.run_record import exit_status
        from recipe.async_engine.record.schema import summary_in

        # There is no summary here if the trainer was on a node that does not share the run's folder with this one.
        summary, _ = summary_in(Path(config.trainer.default_local_dir))
        if summary is None or summary.get("began", 0.0) < self._began:
            return
        if status := exit_status(summary, config.async_training.alarms.exit_status):
            sys.exit(status)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """With ``plan_only``, print one plan for a multirun, from the settings that its runs have in common."""
        if config.get("plan_only"):
            _look(config, may_settle=True)


def _look(config: DictConfig, may_settle: bool) -> None:
    """Print the plan (``plan_only=true``) or check the configuration of a run with a flag (``+recipe=...``).

    After a plan or an error, end the process. Do nothing in runs with neither.

    ``may_settle`` says whether this function may write the trainer that the flag selects into ``config``. If it may
    not, a ``config`` that names another trainer is an error.
    """
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
            raise refused(
                "trainer",
                "as configured",
                "the trainer that +recipe has chosen",
                "In a multirun, +recipe cannot override trainer.use_v1 and trainer.v1.trainer_mode: leave them out.",
            )
        sys.stderr.writelines(f"{said}\n" for said in without)
        own = copy.deepcopy(own)
        with read_write(own), open_dict(own):
            own.pop("hydra", None)  # Hydra does the same before it calls the main function.
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
    """Return the name of this process's main module, or an empty text if it has none.

    A script of verl that was started by its path (not with ``python -m``) has its name within the package too.
    """
    module = sys.modules["__main__"]
    if (spec := getattr(module, "__spec__", None)) is not None:
        return str(spec.name)
    file = Path(getattr(module, "__file__", None) or ".").resolve()
    verl = importlib.util.find_spec("verl")
    for folder in (verl.submodule_search_locations or ()) if verl is not None else ():
        if file.is_relative_to(Path(folder).resolve()):
            return ".".join(("verl", *file.relative_to(Path(folder).resolve()).with_suffix("").parts))
    return ""

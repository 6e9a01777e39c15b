# SPDX-License-Identifier: Apache-2.0
"""What happens in a main's process before its task: the plan is shown, or a flag's configuration is checked.

The configuration groups name `BeforeRun` as a callback of Hydra, so this runs in every main that composes them: in this
package's own, and in stock verl's with a flag. Contract: with ``plan_only=true`` the plan is printed and the process
ends, with status 0 where it can run and 1 where it cannot; no folder of a run, no process is made. Otherwise a flag's
configuration that cannot run ends the process here, before stock verl starts Ray; anything else goes on untouched.
Shown by tests/integration/test_plan_only.py.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict, read_write


class BeforeRun(Callback):
    """See the module's contract."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Called before Hydra makes a folder for the run."""
        _look(config)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Of several runs, the settings that they have in common are shown."""
        if config.get("plan_only"):
            _look(config)


def _look(config: DictConfig) -> None:
    trainer = str(config.trainer.get("v1", {}).get("trainer_mode", ""))
    plans = bool(config.get("plan_only"))
    if not plans and not trainer.startswith("recipe_"):
        return
    from recipe.async_engine.core.errors import RecipeError
    from recipe.async_engine.flags.plan_only import show

    own = _without_hydra(config)
    try:
        status = show(own, trainer) if plans else _check(own, trainer)
    except RecipeError as error:
        sys.stderr.write(f"\n{type(error).__name__}: {error}\n")
        status = 1
    if plans or status:
        sys.stdout.flush()
        sys.exit(status)


def _check(config: DictConfig, trainer: str) -> int:
    from recipe.async_engine.flags.plan_only import findings
    from recipe.async_engine.settings.problems import ConfigError

    if found := findings(config, trainer).problems:
        raise ConfigError(found)
    return 0


def _without_hydra(config: DictConfig) -> DictConfig:
    """A copy as a main's task gets it."""
    own = copy.deepcopy(config)
    with read_write(own), open_dict(own):
        own.pop("hydra", None)
    return own

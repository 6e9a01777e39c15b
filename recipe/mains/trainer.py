# SPDX-License-Identifier: Apache-2.0
"""The modes as v1 trainers of stock verl, which verl's task runner constructs, initializes and calls `fit` of.

Contract: verl's `TaskRunnerV1` drives a `FlaggedTrainer` as it drives its own trainers. The run is then this package's,
in the task runner's process: its trainer, its record (``metrics.jsonl``, ``summary.json``), its errors. A configuration
that cannot run has usually been refused in the main's process (`before_run`); if the main was a user's own, it is
refused here, when Ray and the task runner are up. Ctrl-C ends the run at once, as it ends verl's own.

Shown by tests/e2e/test_flags.py.
"""

from __future__ import annotations

import sys
import time
from typing import Any, ClassVar

import ray
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from recipe.async_engine.inspection.check import check, plain
from recipe.async_engine.inspection.nodes import check_nodes, cluster_resources
from recipe.async_engine.outside import MODES
from recipe.async_engine.record.run_record import RunRecord
from recipe.async_engine.run.display import Display
from recipe.async_engine.run.runner import TaskRunner
from recipe.async_engine.shadowing import check_not_shadowed
from recipe.mains.arguments import PREFIX, refused, take_arguments
from recipe.mains.plan_only import JUDGES


class NoAgentLoops:
    """Stands in for verl's agent-loop manager, which the task runner makes; the modes have their own."""

    @classmethod
    def create(cls, **settings: Any) -> NoAgentLoops:
        """Return an object without agent loops.

        Raises:
            ConfigError: one of verl's own trainers asks for agent loops, so the flag's mode does not run.
        """
        if settings.get("llm_client") is not None:
            advice = (
                "+recipe has chosen a mode, and this main runs one of verl's own trainers: set trainer.use_v1=true."
            )
            raise refused("trainer.v1.trainer_mode", "as configured", "what +recipe has chosen", advice)
        return cls()


class FlaggedTrainer(PPOTrainer):
    """Runs a mode in the place of one of verl's v1 trainers."""

    name: ClassVar[str]  # the value of ``trainer.v1.trainer_mode``
    mode: ClassVar[str]

    def __init__(self, config: DictConfig) -> None:
        # verl's own constructor is not called, since it would build a replay buffer that nothing uses.
        self.config = config
        from recipe.async_engine.run.driver import only_rehearse

        check_not_shadowed()
        take_arguments(config, self.mode)
        only_rehearse(config)
        # verl's main has started Ray, or joined a cluster.
        there = cluster_resources() if ray.is_initialized() else None
        self._plan = check(config, available=there, judges=JUDGES)
        if there is not None and len(there.nodes) > 1:
            check_nodes(plain(config), self._plan.settings.async_training.timeouts.startup)

    def init(self) -> None:
        """The run's processes start in `fit`."""

    def _nothing(self) -> None:
        """Do nothing: verl's own loop, which would call this, does not run."""

    get_llm_client = get_teacher_client = get_reward_handles = on_sample_end = on_step_end = _nothing

    def fit(self, agent_loop_manager: NoAgentLoops) -> None:
        """Run to the end; raise `RunFailed` if the run ends with an error."""
        from recipe.async_engine.run.driver import RunFailed, take_in
        from recipe.report.account import settled

        record = RunRecord(self.config.trainer.default_local_dir, self.mode, time.time())
        display = Display(self.mode, self._plan.total_steps)
        settings = OmegaConf.to_container(self.config, resolve=True)
        summary: dict[str, Any] = {}
        try:
            trainer, timeouts = MODES[self.mode].trainer, self._plan.settings.async_training.timeouts
            for event in TaskRunner().run(settings, trainer, timeouts):
                take_in(event, record, display)
        except BaseException as error:
            record.fail(error)
            raise
        finally:
            record.settle(settled)
            summary = record.close(None)
            display.end(summary)
        if summary["error"] is not None:
            sys.stderr.flush()
            raise RunFailed(f"{summary['error']['name']}: {summary['error']['message']}")


def flagged(mode: str) -> type[FlaggedTrainer]:
    """Return the trainer class that is registered with verl for a mode."""
    return type(f"Flagged_{mode}", (FlaggedTrainer,), {"name": PREFIX + mode, "mode": mode})


TRAINERS = tuple(map(flagged, MODES))

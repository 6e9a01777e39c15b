# SPDX-License-Identifier: Apache-2.0
"""This package's modes as v1 trainers of verl, for runs of stock verl's main with a flag (``+recipe=...``).

Contract: verl's `TaskRunnerV1` uses a `FlaggedTrainer` like one of its own trainers. In the task runner's process,
`FlaggedTrainer.fit` runs this package's trainer, writes the run's files (``metrics.jsonl``, ``summary.json``) and
raises the error of a failed run. A configuration that cannot run has usually been refused in the main process already
(`before_run`); with a user's own main program, it is refused here, after Ray has started. Ctrl-C ends the run at once,
as in verl. Shown by tests/e2e/test_flags.py.
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
    """An empty replacement for verl's agent-loop manager in verl's task runner; the modes have their own manager."""

    @classmethod
    def create(cls, **settings: Any) -> NoAgentLoops:
        """Return an empty object. verl calls this to create the agent-loop manager.

        Raises:
            ConfigError: the caller runs one of verl's own trainers, although ``+recipe`` has chosen a mode.
        """
        if settings.get("llm_client") is not None:
            advice = (
                "+recipe has chosen a mode, but this main program runs one of verl's own trainers: set "
                "trainer.use_v1=true."
            )
            raise refused("trainer.v1.trainer_mode", "as configured", "the mode that +recipe has chosen", advice)
        return cls()


class FlaggedTrainer(PPOTrainer):
    """A v1 trainer of verl that runs one of this package's modes instead of verl's training loop."""

    name: ClassVar[str]  # This value of ``trainer.v1.trainer_mode`` selects the trainer.
    mode: ClassVar[str]

    def __init__(self, config: DictConfig) -> None:
        # Do not call verl's constructor, because it would create a replay buffer that nothing uses.
        self.config = config
        from recipe.async_engine.run.driver import only_rehearse

        check_not_shadowed()
        take_arguments(config, self.mode)
        only_rehearse(config)
        # verl's main has already started Ray or joined a cluster. Check that the plan fits the resources of this Ray.
        there = cluster_resources() if ray.is_initialized() else None
        self._plan = check(config, available=there, judges=JUDGES)
        if there is not None and len(there.nodes) > 1:
            check_nodes(plain(config), self._plan.settings.async_training.timeouts.startup)

    def init(self) -> None:
        """Do nothing, because `fit` starts the run's processes."""

    def _nothing(self) -> None:
        """Do nothing, because only verl's training loop, which does not run here, would call this method."""

    get_llm_client = get_teacher_client = get_reward_handles = on_sample_end = on_step_end = _nothing

    def fit(self, agent_loop_manager: NoAgentLoops) -> None:
        """Run the mode to its end; raise RunFailed if the run ends with an error."""
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
    return type(f"Flagged_{mode}", (FlaggedTrainer,), {"name": PREFIX + mode, "mode": mode})


TRAINERS = tuple(map(flagged, MODES))

# SPDX-License-Identifier: Apache-2.0
"""What every mode's main does: check, start Ray, run, record.

Contract: a configuration that cannot run is refused before any process starts. A run that fails ends with the error
and its traceback on standard error, a non-zero exit status and a summary that names the error. This process imports
neither torch nor verl on the CPU platform: start-up is bound by imports.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from recipe.async_engine.config.plan import RunPlan
from recipe.async_engine.config.secrets import without_secrets
from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.inspection.check import check, plain, unresolved
from recipe.async_engine.inspection.nodes import check_nodes, cluster_resources
from recipe.async_engine.outside import MODES
from recipe.async_engine.record import durable
from recipe.async_engine.record.run_record import RunRecord, exit_status
from recipe.async_engine.run.detect import PlatformChoice, cluster_to_join, inspect_machine
from recipe.async_engine.run.display import Display
from recipe.async_engine.run.heartbeat import control_probe, listen
from recipe.async_engine.run.live import LiveFigures
from recipe.async_engine.run.memory import MemoryMeter
from recipe.async_engine.run.parts import Forks, Parts
from recipe.async_engine.run.profiled import under_nsight, write_timeline
from recipe.async_engine.run.ray_start import shorten_folders, start_ray
from recipe.async_engine.run.rehearsing import only_rehearse
from recipe.async_engine.run.runner import Began, Ended, TaskRunner
from recipe.async_engine.run.shutdown import (
    EndAtOnce,
    EndingOnSignal,
    LastResort,
    StartedProcesses,
    end_in_order,
)
from recipe.async_engine.shadowing import check_not_shadowed

logger = logging.getLogger(__name__)

END_S, LOOK_S, ACCOUNT_S = 40.0, 5.0, 120.0
SETTINGS_FILE = "config.yaml"
# Of ray.init, for a Ray that it starts.
RESOURCES = (
    "num_cpus",
    "num_gpus",
    "resources",
    "labels",
    "object_store_memory",
    "_system_config",
    "_enable_object_reconstruction",
    "_node_name",
)


class RunFailed(RecipeError):
    """The run ended with an error, which has been shown."""


def main(config: DictConfig, mode: str, parts: Parts, trainer_class: str | None = None) -> None:
    """Run ``config``; exit with status 1 if it cannot run or fails, with 128 + signal if one ended it, 3 with alarms.

    Args:
        mode: one of `MODES`.
        parts: what the run has beside the engine.
        trainer_class: the fully qualified name of a trainer in place of the mode's.
    """
    if config.get("plan_only"):
        # Hydra shows the plan before it comes here; this is for a configuration that was composed otherwise.
        sys.stderr.write("plan_only=true: nothing is started; Hydra's command line shows the plan\n")
        sys.exit(1)
    try:
        plain(config)  # as a whole, before single settings are asked for
        trainer_class = trainer_class or MODES[mode].trainer
        summary = run(config, mode, parts, trainer_class, began=psutil.Process().create_time())
    except MissingMandatoryValue as error:
        sys.stderr.write(f"\nConfigError: {unresolved(error)}\n")
        sys.exit(1)
    except RecipeError as error:
        sys.stderr.write(f"\n{type(error).__name__}: {error}\n")
        sys.exit(1)
    except EndAtOnce as end:
        sys.exit(end.status)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    if summary["stopped_by"] is not None:
        sys.exit(128 + signal.Signals[summary["stopped_by"]])
    sys.exit(exit_status(summary, config.async_training.alarms.exit_status))


def run(config: DictConfig, mode: str, parts: Parts, trainer_class: str, began: float | None = None) -> dict[str, Any]:
    """Run ``config``; returns the summary. Times count from ``began`` (seconds since the epoch), by default from now.

    Raises:
        WrongInstallation: another package has the name of one of the modes.
        ConfigError: the configuration cannot run.
        RunFailed: the run ended with an error.
    """
    began = time.time() if began is None else began
    check_not_shadowed()
    ray_init = config.ray_kwargs.ray_init
    shorten_folders(ray_init)
    where = os.environ, inspect_machine(ray_init.get("_temp_dir")), ray_init.get("address")
    choice = parts.laptop.choose_platform(*where, device=config.trainer.device)
    os.environ.update(choice.environment)
    cluster = None if ray.is_initialized() else cluster_to_join(*where)
    with open_dict(config):
        if cluster is not None:
            _leave_out_resources(ray_init, cluster)
        config.trainer.default_local_dir = os.path.abspath(config.trainer.default_local_dir)
        if choice.is_cpu:
            config.trainer.device = "cpu"
    parts.laptop.fill_builtin_task(config)
    only_rehearse(config)
    plan = check(config, judges=parts.judges)
    try:
        record = RunRecord(config.trainer.default_local_dir, mode, began)
    except OSError as error:
        raise RunFailed(
            f"trainer.default_local_dir={config.trainer.default_local_dir} cannot be used: {error}"
        ) from error
    ray_of_its_own = cluster is None and not ray.is_initialized()
    with EndingOnSignal() as signals:
        return _Run(config, parts, choice, plan, record, signals, ray_of_its_own).run(mode, trainer_class)


def _leave_out_resources(ray_init: DictConfig, cluster: str) -> None:
    """Leave out what describes a Ray that the run would start itself: Ray refuses it where a cluster is joined."""
    left_out = [name for name in RESOURCES if ray_init.pop(name, None) is not None]
    if left_out:
        names = ", ".join(left_out)
        logger.warning("%s: joining it, so ray_kwargs.ray_init leaves out %s; the cluster has its own", cluster, names)


def _write_settings(config: DictConfig) -> None:
    """Keep what the run was made with, in place of Hydra's copies, which have secrets in plain text."""
    settings = without_secrets(OmegaConf.to_container(config, resolve=True))
    file = Path(config.trainer.default_local_dir, SETTINGS_FILE)
    durable.write(file, OmegaConf.to_yaml(OmegaConf.create(settings)))


def _take_environment(config: DictConfig) -> dict[str, str]:
    """Take the variables for the run's processes out of the configuration, so that nothing that writes it has them."""
    given = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True).get("runtime_env") or {}
    variables = given.get("env_vars") or {}
    if variables:
        with open_dict(config):
            config.ray_kwargs.ray_init.runtime_env.env_vars = {}
    taken = {str(name): str(value) for name, value in variables.items() if value is not None}
    loggers = OmegaConf.select(config, "trainer.logger")
    if "rl_insight" in ([loggers] if isinstance(loggers, str) else loggers or ()):
        # As verl's main does (verl/trainer/main_ppo.py:52); without it that tracker says nothing.
        taken.setdefault("VERL_RL_INSIGHT_ENABLE", "1")
    return taken


@dataclass
class _Run:
    """One run, from its first process to its last."""

    config: DictConfig
    parts: Parts
    choice: PlatformChoice
    plan: RunPlan
    record: RunRecord
    signals: EndingOnSignal
    ray_of_its_own: bool

    def __post_init__(self) -> None:
        self._timeouts = self.plan.settings.async_training.timeouts
        self._meter = MemoryMeter()
        self._peak: float | None = None
        # Ray's own processes included, unless they are a cluster's or the caller's.
        self._started = StartedProcesses(own=self.ray_of_its_own)
        self._look_at = 0.0
        self._forks: Forks | None = None
        self._display: Display | None = None
        self._last_resort = LastResort(self._end_by_force)

    def run(self, mode: str, trainer_class: str) -> dict[str, Any]:
        """See the function of this name."""
        try:
            self._start()
            self._display = Display(mode, self.plan.total_steps)
            self._follow(trainer_class, self._display)
        except BaseException as error:
            failed = self._started.blamed(error)
            self.record.fail(failed)
            if failed is not error:
                raise failed from error
            raise
        finally:
            unended = self._end()
        if (recorded := self.record.summary["error"]) is not None:
            raise RunFailed(f"{recorded['name']}: {recorded['message']}")
        if unended is not None:
            raise RunFailed(f"the run did not end in order: {type(unended).__name__}: {unended}") from unended
        return self.record.summary

    def _start(self) -> None:
        what = "starting Ray, or joining its cluster (async_training.timeouts.startup)"
        self._last_resort.allow(what, self._timeouts.startup)
        _write_settings(self.config)
        given = _take_environment(self.config)
        if self.ray_of_its_own:
            # By inheritance: Ray writes the values that its runtime_env has to its own log.
            os.environ.update(given)
            given = {}
            self._forks = self.parts.laptop.forks(self.config, self.choice)
        joins = not self.ray_of_its_own and not ray.is_initialized()
        start_ray(self.config, self.choice, self._forks, given, own=self.ray_of_its_own)
        self._started.look_for_needed()
        if joins:
            check(self.config, available=cluster_resources(), judges=self.parts.judges)
            self._last_resort.allow(
                "asking the cluster's nodes (async_training.timeouts.startup)", 2 * self._timeouts.startup
            )
            check_nodes(plain(self.config), self._timeouts.startup)

    def _follow(self, trainer_class: str, display: Display) -> None:
        """Start the trainer's actor and take in what it yields until it ends."""
        # Beside the main where that node has a CPU: the loss of either ends the run.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        actor = ray.remote(concurrency_groups={"beside": 2, "live": 1})(TaskRunner)
        runner = actor.options(num_cpus=1, scheduling_strategy=here, **under_nsight(self.config)).remote()
        stop, beat = (method.options(concurrency_group="beside").remote for method in (runner.stop, runner.beat))
        events = runner.run.options(num_returns="streaming").remote(
            OmegaConf.to_container(self.config, resolve=True), trainer_class, self._timeouts
        )
        live = LiveFigures(runner.live.options(concurrency_group="live").remote)
        self.signals.ask(stop, self._timeouts.stop)
        with control_probe(self._timeouts.heartbeat) as control:
            for event in listen(events, beat, control, self._timeouts, lambda: self._alive(live, display)):
                take_in(event, self.record, display)
        if self.record.summary["error"] is not None and (lost := self._started.lost()) is not None:
            raise lost

    def _alive(self, live: LiveFigures, display: Display) -> None:
        self._last_resort.allow(
            "taking in a step, or writing it to trainer.default_local_dir (async_training.timeouts.heartbeat)",
            2 * self._timeouts.heartbeat,
        )
        if time.monotonic() >= self._look_at:
            # While their parents live: those of one that is killed later could not be found then.
            self._started.look()
            self._look_at = time.monotonic() + LOOK_S
        if (figures := live.newest()) is not None:
            display.live(figures)

    def _end(self) -> BaseException | None:
        """End everything, then report; returns the first error."""
        self._last_resort.allow("ending the run's processes and writing its summary", END_S)
        steps = {
            "ending stopped processes": self._started.end_stopped,
            "writing Ray's timeline": lambda: write_timeline(self.config),
            "ending Ray": self._leave_ray,
            "ending the processes of the run": self._end_processes,
        }
        said: dict[str, Callable[[], Any]] = {
            "making the run's account": self._settle,
            "writing summary.json": lambda: self.record.close(self._peak),
        }
        if (display := self._display) is not None:
            said["showing the summary"] = lambda: display.end(self.record.summary)
        try:
            unended = end_in_order(steps)
            if unended is not None and self.record.summary["error"] is None:
                message = f"the run did not end in order: {unended}"
                self.record.fail({"name": type(unended).__name__, "message": message})
            return unended or end_in_order(said)
        finally:
            self._last_resort.stop()

    def _settle(self) -> None:
        self._last_resort.allow("making the run's account, and writing its summary", ACCOUNT_S + END_S)
        self.record.settle(self.parts.account)

    def _leave_ray(self) -> None:
        self._peak = self._meter.stop()
        self._started.look()
        ray.shutdown()

    def _end_processes(self) -> None:
        if self._forks is not None:
            self._forks.stop()
        if killed := self._started.end():
            logger.warning("%d processes of the run did not end by themselves and were killed", len(killed))

    def _end_by_force(self, why: str) -> None:
        """This main is stuck: end what it has started, then say so."""
        lost = self._started.lost()
        self._started.look()
        self._started.end(grace_s=0)
        if self.record.summary["error"] is None:
            self.record.fail(lost or {"name": "MainStuck", "message": why})
        error = self.record.summary["error"]
        sys.stderr.write(f"\n{why}\n{error['name']}: {error['message']}\n")
        self.record.close(self._peak)


def take_in(event: Any, record: RunRecord, display: Display) -> None:
    """Take one event of `TaskRunner.run` into the run's record and onto the screen."""
    if isinstance(event, Began):
        record.begin_at(event.step)
        record.update(event.state)
        display.resume(event.step)
    elif isinstance(event, Ended):
        record.update(event.state)
        if event.error is not None:
            sys.stderr.write(f"\n{event.error['traceback']}")
            record.fail(event.error)
    else:
        state, metrics = event
        record.update(state)
        record.step(metrics)
        display.step(metrics)

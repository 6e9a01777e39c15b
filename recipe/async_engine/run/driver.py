# SPDX-License-Identifier: Apache-2.0
"""The main process of every mode: it checks the configuration, starts Ray and the trainer, and writes the run's files.

Contract: a configuration that cannot run is refused before any process starts. A run that fails ends with the error and
its traceback on standard error, a non-zero exit status and a summary that names the error. On the CPU platform this
process imports neither torch nor verl, because their imports would take most of the start-up time.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from recipe.async_engine.actors.watch import Questions
from recipe.async_engine.config.plan import RunPlan
from recipe.async_engine.config.secrets import without_secrets
from recipe.async_engine.config.validation import Judge
from recipe.async_engine.core.deadlines import ACCOUNT_S, END_S
from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.inspection.check import check, plain, unresolved
from recipe.async_engine.inspection.nodes import check_nodes, cluster_resources
from recipe.async_engine.outside import MODES
from recipe.async_engine.record import durable
from recipe.async_engine.record.events import Recorded
from recipe.async_engine.record.run_record import RunRecord, exit_status
from recipe.async_engine.run.detect import Machine, PlatformChoice, cluster_to_join, inspect_machine
from recipe.async_engine.run.display import Display
from recipe.async_engine.run.ray_start import (
    Forks,
    leave_out_resources,
    shorten_folders,
    start_ray,
    take_environment,
    under_nsight,
    write_timeline,
)
from recipe.async_engine.run.runner import Began, Ended, TaskRunner
from recipe.async_engine.run.shutdown import EndAtOnce, EndingOnSignal, StartedProcesses, end_in_order
from recipe.async_engine.run.supervisor import LastResort, control_probe, listen
from recipe.async_engine.shadowing import check_not_shadowed

logger = logging.getLogger(__name__)

LOOK_S = 3.0
SETTINGS_FILE = "config.yaml"
REHEARSAL_FOLDER = "rehearsal"


class RunFailed(RecipeError):
    """The run ended with an error that the user has already been shown."""


class Laptop(Protocol):
    """The functions of `recipe.laptop` (for runs without an accelerator), which this package must not import."""

    def choose_platform(
        self, environ: Mapping[str, str], machine: Machine, ray_address: str | None = None, device: str | None = None
    ) -> PlatformChoice:
        """Choose the platform of a run from the environment variables, the machine and two settings."""

    def fill_builtin_task(self, config: DictConfig) -> None:
        """If the built-in task is configured, create its files, and fill in their paths where ``config`` has null."""

    def forks(self, config: DictConfig, choice: PlatformChoice) -> Forks | None:
        """Start the process from which Ray's workers are forked, and return it; None if the run cannot use forks."""


@dataclass(frozen=True)
class Parts:
    """Objects of other packages that `recipe.mains.run` passes to a run, because this package must not import them.

    Attributes:
        judges: checks of the configuration in addition to this package's own.
        account: computes, from the event record, the time account for the summary: what the accelerators did, and for
            how long.
    """

    laptop: Laptop
    judges: Sequence[Judge]
    account: Callable[[Recorded], dict[str, Any]]


def main(config: DictConfig, mode: str, parts: Parts, trainer_class: str | None = None) -> None:
    """Run ``config``, then exit: with status 1 after a failure, 128 + signal after a signal, 3 after alarms, else 0.

    ``mode`` is one of `MODES`, and ``trainer_class`` the fully qualified name of a trainer other than the mode's own.
    """
    if config.get("plan_only"):
        # For a command line, Hydra has shown the plan and ended the process before this function is called. So the
        # caller is other code, for which no plan is shown.
        sys.stderr.write("plan_only=true: nothing is started; Hydra's command line shows the plan\n")
        sys.exit(1)
    try:
        plain(config)  # this checks the whole configuration before any single setting is read
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
    """Run ``config`` and return the summary.

    ``began`` is the time, in seconds since 1970, from which the summary counts the run's duration; by default, that is
    the time of the call.

    Raises:
        WrongInstallation: another package hides one of the modes by its name.
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
            leave_out_resources(ray_init, cluster)
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


def only_rehearse(config: DictConfig) -> None:
    """If ``rehearse_only`` is set, change ``config`` so that the run only rehearses, in a subfolder of its folder.

    The run uses no checkpoint, validation or tracker (`recipe.async_engine.trainer.rehearsal`).
    """
    if not config.get("rehearse_only"):
        return
    with open_dict(config):
        config.async_training.rehearsal = True
        trainer = config.trainer
        trainer.default_local_dir = os.path.join(trainer.default_local_dir, REHEARSAL_FOLDER)
        trainer.resume_mode, trainer.save_freq, trainer.logger = "disable", -1, []
        trainer.val_only = trainer.val_before_train = False


def _write_settings(config: DictConfig) -> None:
    """Write the run's settings without secrets. Hydra's own copies, which would have the secrets, are switched off."""
    settings = without_secrets(OmegaConf.to_container(config, resolve=True))
    file = Path(config.trainer.default_local_dir, SETTINGS_FILE)
    durable.write(file, OmegaConf.to_yaml(OmegaConf.create(settings)))


@dataclass
class _Run:
    config: DictConfig
    parts: Parts
    choice: PlatformChoice
    plan: RunPlan
    record: RunRecord
    signals: EndingOnSignal
    ray_of_its_own: bool

    def __post_init__(self) -> None:
        self._timeouts = self.plan.settings.async_training.timeouts
        # If the run starts a Ray of its own, the processes of that Ray are recorded too. Those of a cluster, or of a
        # Ray that the caller has started, are not.
        self._started = StartedProcesses(own=self.ray_of_its_own)
        self._look_at = 0.0
        self._forks: Forks | None = None
        self._display: Display | None = None
        self._last_resort = LastResort(self._end_by_force)

    def run(self, mode: str, trainer_class: str) -> dict[str, Any]:
        try:
            self._start()
            self._display = Display(mode, self.plan.total_steps)
            self._follow(trainer_class, self._display)
        except BaseException as error:
            failed = self._started.cause_of(error)
            self.record.fail(failed)
            if failed is not error:
                raise failed from error
            raise
        finally:
            unended = self._end()
        if (recorded := self.record.summary["error"]) is not None:
            raise RunFailed(f"{recorded['name']}: {recorded['message']}")
        if unended is not None:
            raise RunFailed(f"the shutdown of the run failed: {type(unended).__name__}: {unended}") from unended
        return self.record.summary

    def _start(self) -> None:
        what = "starting Ray, or joining its cluster (async_training.timeouts.startup)"
        self._last_resort.allow(what, self._timeouts.startup)
        _write_settings(self.config)
        given = take_environment(self.config)
        if self.ray_of_its_own:
            # Set the variables here, so that workers inherit them. If they were passed in runtime_env, Ray would log
            # their values.
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
        """Start the trainer's actor and process its events until the run ends."""
        # Place the trainer on the main process's node if a CPU is free there. If trainer and main process were on
        # different nodes, the loss of either node would end the run.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        actor = ray.remote(concurrency_groups={"beside": 2, "live": 1})(TaskRunner)
        runner = actor.options(num_cpus=1, scheduling_strategy=here, **under_nsight(self.config)).remote()
        stop, beat = (method.options(concurrency_group="beside").remote for method in (runner.stop, runner.beat))
        events = runner.run.options(num_returns="streaming").remote(
            OmegaConf.to_container(self.config, resolve=True), trainer_class, self._timeouts
        )
        live = Questions({"figures": runner.live.options(concurrency_group="live").remote}, 0.0)
        self.signals.ask(stop, self._timeouts.stop)
        with control_probe(self._timeouts.heartbeat) as control:
            for event in listen(events, beat, control, self._timeouts, lambda: self._alive(live, display)):
                take_in(event, self.record, display)
        if self.record.summary["error"] is not None and (lost := self._started.lost()) is not None:
            raise lost

    def _alive(self, live: Questions, display: Display) -> None:
        self._last_resort.allow(
            "processing a step, or writing it to trainer.default_local_dir (async_training.timeouts.heartbeat)",
            2 * self._timeouts.heartbeat,
        )
        if time.monotonic() >= self._look_at:
            # Descendants can only be found through their parents, so look for them while their parents live.
            self._started.look()
            self._started.measure()
            self._look_at = time.monotonic() + LOOK_S
        with suppress(RayError):  # the figures are optional, and an error of the run arrives with the run's events
            for _, figures in live.answered():
                display.live(ray.get(figures, timeout=0))

    def _end(self) -> BaseException | None:
        """End all processes, then write and show the summary; return the first error, or None."""
        self._last_resort.allow("ending the run's processes and writing its summary", END_S)
        steps = {
            "ending stopped processes": self._started.end_stopped,
            "writing Ray's timeline": lambda: write_timeline(self.config),
            "ending Ray": self._leave_ray,
            "ending the processes of the run": self._end_processes,
        }
        said: dict[str, Callable[[], Any]] = {
            "computing the run's time account": self._settle,
            "writing summary.json": lambda: self.record.close(self._started.peak_gib),
        }
        if (display := self._display) is not None:
            said["showing the summary"] = lambda: display.end(self.record.summary)
        try:
            unended = end_in_order(steps)
            if unended is not None and self.record.summary["error"] is None:
                message = f"the shutdown of the run failed: {unended}"
                self.record.fail({"name": type(unended).__name__, "message": message})
            return unended or end_in_order(said)
        finally:
            self._last_resort.stop()

    def _settle(self) -> None:
        self._last_resort.allow("computing the run's time account, and writing its summary", ACCOUNT_S + END_S)
        self.record.settle(self.parts.account)

    def _leave_ray(self) -> None:
        self._started.look()
        ray.shutdown()

    def _end_processes(self) -> None:
        if self._forks is not None:
            self._forks.stop()
        if killed := self._started.end():
            logger.warning("%d processes of the run did not end by themselves and were killed", len(killed))

    def _end_by_force(self, why: str) -> None:
        """End all processes that this process has started, and write the summary, because the main thread is stuck."""
        lost = self._started.lost()
        self._started.look()
        self._started.end(grace_s=0)
        if self.record.summary["error"] is None:
            self.record.fail(lost or {"name": "MainStuck", "message": why})
        error = self.record.summary["error"]
        sys.stderr.write(f"\n{why}\n{error['name']}: {error['message']}\n")
        self.record.close(self._started.peak_gib)


def take_in(event: Any, record: RunRecord, display: Display) -> None:
    """Process one event of `TaskRunner.run`: add it to the run's files and show it."""
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

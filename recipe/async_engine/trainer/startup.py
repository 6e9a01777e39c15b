# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of a run in parallel.

Contract: accelerators are reserved first (`engines.reservation`). Then the training workers, the rollout and the
log-prob servers start in parallel, within one deadline (``async_training.timeouts.startup``). Replicas on the trainer's
accelerators start after the training workers, and sleep when the run begins. If a part fails to start, the launch ends
with the error of the first part that failed. A server gets no requests before it has weights. If the run has a critic,
it is verl's critic, which is another role of the training workers. The critic trains on every batch, and the actor only
from step ``trainer.critic_warmup`` on.

Shown by tests/e2e/test_fully_async.py, test_model_engine.py and test_critic.py.
"""

import itertools
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import ray
from omegaconf import OmegaConf
from ray.exceptions import RayActorError, RayTaskError
from verl.trainer.ppo.utils import need_teacher_policy
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.utils import update_prometheus_config

from recipe.async_engine.actors.control import sign_of_life
from recipe.async_engine.actors.replacement import Replacements, Restarts, clear_replica
from recipe.async_engine.config.log_prob_servers import LogProbServers
from recipe.async_engine.config.placement import wanted
from recipe.async_engine.config.plan import RunPlan
from recipe.async_engine.config.sections import SHARED, Timeouts
from recipe.async_engine.config.verdicts import PLACEHOLDER
from recipe.async_engine.core.groups import OnNonFinite
from recipe.async_engine.core.plain import postponed
from recipe.async_engine.core.scoring import Anchor
from recipe.async_engine.engines.manager import ReplicaManager
from recipe.async_engine.engines.reservation import Reservations
from recipe.async_engine.log_prob_servers.replica import ModelEngineReplica, launch
from recipe.async_engine.rewards.scoring_worker import ScoringManager
from recipe.async_engine.rollout.client import ResumingClient
from recipe.async_engine.rollout.group_run import SchedulerSettings
from recipe.async_engine.rollout.teachers import Teachers, start_teachers, teacher_clients
from recipe.async_engine.rollout.trajectory_manager import TrajectoryManager, manager_class
from recipe.async_engine.rollout.trajectory_worker import filter_metric
from recipe.async_engine.trainer.actor_worker import ActorWorker, PublishedWeights
from recipe.async_engine.trainer.stages import Stages, TrainingFailed
from recipe.async_engine.trainer.verl_settings import for_hybrid_replicas
from recipe.async_engine.weights.hybrid_publisher import HybridPublisher
from recipe.async_engine.weights.publisher import Handles, WeightPublisher
from recipe.async_engine.weights.snapshot import widest

Publisher = TypeVar("Publisher", bound=WeightPublisher)


@dataclass(frozen=True)
class RolloutSide:
    """The managers of the rollout servers, the agent-loop workers and the reward workers."""

    replicas: ReplicaManager
    agents: TrajectoryManager
    rewards: ScoringManager

    def workers(self, timeout_s: float) -> dict[str, Callable[[], Any]]:
        """Return functions for `side_by_side`, each of which waits until all workers of one kind have started.

        If a worker cannot start, its function raises the worker's error.
        """

        def are_made() -> None:
            ray.get([sign_of_life(worker).remote() for worker in self.agents.agent_loop_workers], timeout=timeout_s)

        return {
            "the agent-loop workers": are_made,
            "the reward workers": partial(self.rewards.until_ready, timeout_s),
        }


def _users_manager(config: Any) -> str | None:
    """Return the name of the user's agent-loop manager class, or None.

    The setting ``agent_loop_manager_class`` is only a placeholder if verl's own main has started the run in a mode of
    this package. Then the result is None.
    """
    named = config.actor_rollout_ref.rollout.agent.get("agent_loop_manager_class")
    return None if named == PLACEHOLDER else named


def start_agents(config: Any, reservations: Reservations, replicas: ReplicaManager) -> RolloutSide:
    """Create the agent-loop workers and the reward workers; the servers of ``replicas`` are launched later."""
    manager = manager_class(_users_manager(config))
    rewards = ScoringManager(config, reservations)
    agents = manager.create(
        config=config,
        llm_client=replicas.get_client(ResumingClient),
        teacher_client=teacher_clients(config),
        reward_loop_worker_handles=rewards.reward_loop_worker_handles,
    )
    return RolloutSide(replicas, agents, rewards)


def side_by_side(parts: dict[str, Callable[[], Any]], timeout_s: float) -> dict[str, Any]:
    """Run each of the functions ``parts`` on a thread of its own, and return their results by name.

    Raises:
        TrainingFailed: a function did not return in time, or failed because an actor could not be created.
        Exception: any other error of a function. If several fail, the error is that of the first.
    """
    pool = ThreadPoolExecutor(max_workers=len(parts), thread_name_prefix="startup")
    began = time.monotonic()
    futures = {name: pool.submit(part) for name, part in parts.items()}
    done, pending = wait(futures.values(), timeout=timeout_s, return_when=FIRST_EXCEPTION)
    # If a function failed or took too long, the run and all of its processes end, so do not wait for other threads.
    pool.shutdown(wait=False, cancel_futures=True)
    results = {name: _result(name, future) for name, future in futures.items() if future in done}
    if pending:
        late = [name for name, future in futures.items() if future in pending]
        raise TrainingFailed(
            f"{', '.join(late)} were not up after {time.monotonic() - began:.0f} s; raise "
            "async_training.timeouts.startup if the model is large, and check that the cluster has the "
            "accelerators that trainer.n_gpus_per_node and rollout.n_gpus_per_node ask for"
        )
    return results


def _result(name: str, part: Future[Any]) -> Any:
    try:
        return part.result()
    except RayTaskError:
        raise
    except RayActorError as error:
        said = re.sub(r"\x1b\[\d*m", "", str(error))
        # The message quotes a chain of exceptions. The first of them is the cause.
        cause = re.search(r"^[A-Za-z_][\w.]*(?:Error|Exception|Exit|NotMade|Interrupt)\b.*$", said, re.MULTILINE)
        words = f"{cause[0]}{postponed(said)}\n" if cause else ""
        raise TrainingFailed(f"{name} could not be made: {words}{said}") from error


def scheduler_settings(config: Any, plan: RunPlan) -> SchedulerSettings:
    """Return the settings of a run's scheduler."""
    training = plan.settings.async_training
    filtering = filter_metric(config) is not None
    batches = config.algorithm.filter_groups.get("max_num_gen_batches", 0) if filtering else 0
    return SchedulerSettings(
        group_size=plan.answers_per_group,
        slots=plan.max_concurrent_trajectories,
        slots_with_tools=plan.max_trajectories_with_tools,
        max_retries=training.max_group_retries,
        max_consecutive_failures=plan.batch_groups,
        on_non_finite=OnNonFinite(training.on_non_finite),
        filter_groups=filtering,
        filter_limit=max(0, batches or 0) * plan.batch_groups,
        prompt_timeout_s=training.timeouts.prompt,
        places=plan.engine_places,
    )


class Startup:
    """The part of a trainer that starts a run's processes."""

    config: Any
    plan: RunPlan
    timeouts: Timeouts
    stages: Stages
    actor_worker: type[ActorWorker] = ActorWorker
    actor_role = "actor"
    """verl's name for the role of the workers that train the policy."""
    references: Sequence[ModelEngineReplica] = ()
    """The servers of the reference policy."""
    teachers: Teachers | None = None
    fail: Callable[[BaseException], None]
    server_class: type[ModelEngineReplica] = ModelEngineReplica
    """The class of the log-prob servers."""
    reservations: Reservations
    is_up = False
    """Whether the rollout has started, so that ``publisher`` and ``published`` exist."""
    publisher: WeightPublisher
    published: PublishedWeights
    hybrid: HybridPublisher | None = None
    """The publisher of the hybrid replicas (those on the trainer's accelerators), or None if there are none."""
    restarts: Restarts
    """The run's budget for replacing lost replicas and servers."""

    def init_workers(self) -> None:
        """Start every process of the run."""
        self.reserve()
        servers = self.plan.settings.servers
        launch_servers = self._server_launcher()
        hybrid = ReplicaManager(for_hybrid_replicas(self.config)) if self.plan.hybrid_replicas else None
        parts: dict[str, Callable[[], Any]] = {
            "the training workers": partial(self._start_training_side, hybrid),
            "the rollout side": partial(self._start_rollout, hybrid),
        }
        if servers.enabled:
            parts["the log-prob servers"] = launch_servers
        if servers.reference_replicas:
            numbers = range(servers.replicas, servers.replicas + servers.reference_replicas)
            parts["the servers of the reference policy"] = partial(launch_servers, numbers=numbers, static=True)
        if need_teacher_policy(self.config):
            parts["the teachers"] = partial(start_teachers, self.config, self.reservations)
        started = side_by_side(parts, self.timeouts.startup)
        self.use_rollout(started["the rollout side"], hybrid)
        if servers.enabled:
            self._use_servers(started["the log-prob servers"], servers)
        if servers.reference_replicas:
            # The servers of the reference policy get no new weights, so they are not passed to the publisher.
            self.references = started["the servers of the reference policy"]
            handles = {replica.server_address: replica.server_handle for replica in self.references}
            agents, timeout_s = self.async_rollout_manager, self.timeouts.startup
            agents.tell("use_reference", handles, servers.timeout, timeout_s=timeout_s)
        if "the teachers" in started:
            self._use_teachers(started["the teachers"])

    def _use_teachers(self, teachers: Teachers) -> None:
        """Have the agent-loop workers use the teachers' servers, and lost ones replaced."""

        def tell(handles: dict[str, list[Any]]) -> None:
            self.async_rollout_manager.tell("use_teachers", handles, timeout_s=self.timeouts.startup)

        self.teachers = teachers
        tell(teachers.server_handles)
        teachers.watch(self.restarts, self.timeouts.startup, tell, self.fail)

    def _server_launcher(self) -> Callable[..., list[ModelEngineReplica]]:
        return partial(
            launch,
            self.config,
            self.plan.settings.servers,
            self.timeouts.weight_sync,
            self.reservations,
            replica_class=self.server_class,
        )

    def reserve(self) -> None:
        """Reserve the accelerators of all processes; raise NothingFree if they do not become free in time."""
        self.reservations = Reservations()
        parts = wanted(OmegaConf.to_container(self.config, resolve=True), self.plan.settings)
        # The limit is a little shorter than that of the whole launch, because the error of a failed reservation says
        # more than that of a launch that took too long.
        self.reservations.reserve(parts, 0.9 * self.timeouts.startup)

    def _start_training_side(self, hybrid: ReplicaManager | None) -> None:
        """Start the training workers, and then the hybrid replicas, to which the workers pass weights."""
        self.start_training()
        if hybrid is not None:
            side_by_side({"the hybrid replicas": partial(hybrid.launch, self.actor_rollout_wg)}, self.timeouts.startup)

    def _start_rollout(self, hybrid: ReplicaManager | None) -> RolloutSide:
        balancer = None if hybrid is None else hybrid.global_load_balancer
        replicas = ReplicaManager(self.config, self.reservations, self.plan.hybrid_replicas, balancer)
        side, timeout_s = start_agents(self.config, self.reservations, replicas), self.timeouts.startup
        parts = side.workers(timeout_s)
        if self.plan.settings.async_training.placement != SHARED:
            parts["the rollout servers"] = replicas.launch
        side_by_side(parts, timeout_s)
        return side

    def use_rollout(self, rollout: RolloutSide, hybrid: ReplicaManager | None) -> None:
        """Store the started rollout, and create the publishers that send weights to its replicas."""
        self.async_rollout_manager = rollout.agents
        self.reward_loop_manager = rollout.rewards
        self.restarts = Restarts(self.plan.settings.async_training.max_replica_restarts)
        replacements = Replacements(self.restarts, self.timeouts.startup, clear_replica)
        self.publisher = self._new_publisher(WeightPublisher, rollout.replicas)
        self.publisher.replace_lost(replacements, rollout.replicas.start_another)
        self.stages.use_rollout(rollout.agents, rollout.replicas, rollout.rewards, self.publisher)
        self.published = PublishedWeights(self.actor_rollout_wg, self.plan, self.config.trainer.save_freq > 0)
        if hybrid is not None:
            self._use_hybrid(hybrid, rollout.replicas.get_addresses())
        self.is_up = True

    def _use_hybrid(self, replicas: ReplicaManager, standalone: Sequence[str]) -> None:
        """Create the publisher of the hybrid replicas, and put the replicas to sleep."""
        self.hybrid = self._new_publisher(HybridPublisher, replicas)
        self.hybrid.ranks_agree = self.config.actor_rollout_ref.actor.strategy != "megatron"
        self.hybrid.restart_lost(lambda lost: replicas.start_again(lost, self.timeouts.startup), self.restarts)
        prometheus = self.config.actor_rollout_ref.rollout.prometheus
        if prometheus.enable:
            addresses = [*standalone, *replicas.get_addresses()]
            update_prometheus_config(prometheus, addresses, self.config.actor_rollout_ref.rollout.name)
        self.hybrid.sleep()

    def _new_publisher(self, kind: type[Publisher], replicas: ReplicaManager) -> Publisher:
        return kind(
            config=omega_conf_to_dataclass(replicas.rollout_config.checkpoint_engine),
            actor_wg=self.actor_rollout_wg,
            replicas=replicas.get_replicas(),
            load_balancer=replicas.global_load_balancer,
            timeout_s=self.timeouts.weight_sync,
            weights=self.plan.settings.weights,
            dtype=widest(*self._dtypes_of_receivers()),
        )

    def _dtypes_of_receivers(self) -> list[str]:
        """Return the dtypes, by verl's names, in which the rollout engines and log-prob servers compute."""
        dtypes = [self.config.actor_rollout_ref.rollout.dtype]
        if self.plan.settings.servers.enabled:
            engine = self.config.model_engine_server.engine
            mixed = engine.get("mixed_precision")
            # FSDP2 computes in `param_dtype`, or in bfloat16 if `mixed_precision` is null.
            fsdp = mixed.get("param_dtype", "bf16") if mixed else "bf16"
            dtypes.append(engine.dtype if self.plan.settings.servers.backend == "megatron" else fsdp)
        return dtypes

    def _use_servers(self, replicas: list[ModelEngineReplica], servers: LogProbServers) -> None:
        """Make the publisher send weights to the log-prob servers, and make the agent-loop workers use the servers."""
        numbers = itertools.count(len(replicas) + servers.reference_replicas)
        score_parts = servers.anchor == Anchor.GENERATION

        def tell(handles: Handles) -> None:
            agents, timeout_s = self.async_rollout_manager, self.timeouts.weight_sync
            agents.tell("use_servers", handles, servers.timeout, score_parts, timeout_s=timeout_s)

        launch_servers = self._server_launcher()

        def start_another() -> ModelEngineReplica:
            return launch_servers(numbers=[next(numbers)])[0]

        self.publisher.use_servers(replicas, tell, start_another)

    def start_training(self) -> None:
        """Start the training workers, which build their models."""
        self.stages.start(self.reservations)

    @property
    def actor_rollout_wg(self) -> Any:
        """The group of workers that train the policy, under verl's name."""
        return self.stages.actor_rollout_wg

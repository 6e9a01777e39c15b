# SPDX-License-Identifier: Apache-2.0
"""How a trainer starts the processes of its run and gives each of them its work.

Contract: everything starts side by side (:mod:`recipe.async_engine.trainer.setup`), and nothing is routed to or asked
before it has weights. Shown by tests/e2e/test_fully_async.py and test_model_engine.py.
"""

import itertools
from collections.abc import Sequence

from verl.single_controller.ray import RayClassWithInitArgs
from verl.trainer.ppo.utils import Role
from verl.utils.config import omega_conf_to_dataclass

from recipe.async_engine.core.scoring import Anchor
from recipe.async_engine.core.server_settings import LogProbServers
from recipe.async_engine.model_engine.launch import launch
from recipe.async_engine.model_engine.replica import ModelEngineReplica
from recipe.async_engine.rollout.clearing import clear_replica
from recipe.async_engine.rollout.replacement import Replacements
from recipe.async_engine.trainer.fleet import Fleet, Handles
from recipe.async_engine.trainer.published import PublishedWeights
from recipe.async_engine.trainer.setup import RolloutSide, side_by_side, start_rollout
from recipe.async_engine.weights.publisher import WeightPublisher


class Startup:
    """Mixed into a trainer of verl, which has a plan and timeouts.

    Attributes:
        actor_role: what a training worker does, in verl's words.
        publisher_class: what hands weights to the replicas.
    """

    actor_role = "actor"
    publisher_class: type[WeightPublisher] = WeightPublisher

    def init_workers(self) -> None:
        """Start every process of the run; see :mod:`recipe.async_engine.trainer.setup`."""
        servers = self.plan.settings.servers
        parts = {"the training workers": self._start_training, "the rollout side": lambda: start_rollout(self.config)}
        if servers.enabled:
            parts["the log-prob servers"] = lambda: self._launch_servers(servers)
        if servers.reference_replicas:
            parts["the servers of the reference policy"] = lambda: self._launch_reference(servers)
        started = side_by_side(parts, self.timeouts.startup)
        self._use_rollout(started["the rollout side"])
        if servers.enabled:
            self._use_servers(started["the log-prob servers"], servers)
        if servers.reference_replicas:
            self._use_reference(started["the servers of the reference policy"], servers)

    def _use_rollout(self, rollout: RolloutSide) -> None:
        """Give the rollout side its names in verl's trainer, and its replicas a publisher."""
        self.llm_server_manager = rollout.replicas
        self.async_rollout_manager = rollout.agents
        self.reward_loop_manager = rollout.rewards
        self.publisher = self.checkpoint_manager = self.publisher_class(
            config=omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout.checkpoint_engine),
            actor_wg=self.actor_rollout_wg,
            replicas=rollout.replicas.get_replicas(),
            load_balancer=rollout.replicas.global_load_balancer,
            timeout_s=self.timeouts.weight_sync,
        )
        self.published = PublishedWeights(self.actor_rollout_wg, self.plan, self.config.trainer.save_freq > 0)
        self.fleet = self._new_fleet(rollout)

    def _new_fleet(self, rollout: RolloutSide) -> Fleet:
        budget = self.plan.settings.async_training.max_replica_restarts
        replacements = Replacements(budget, self.timeouts.startup, clear_replica)
        return Fleet(self.publisher, replacements, rollout.replicas.start_another)

    def _launch_servers(
        self, servers: LogProbServers, numbers: Sequence[int] | None = None
    ) -> list[ModelEngineReplica]:
        return launch(self.config, servers, self.timeouts.weight_sync, numbers=numbers)

    def _launch_reference(self, servers: LogProbServers) -> list[ModelEngineReplica]:
        numbers = range(servers.replicas, servers.replicas + servers.reference_replicas)
        return launch(self.config, servers, self.timeouts.weight_sync, numbers=numbers, static=True)

    def _use_reference(self, replicas: list[ModelEngineReplica], servers: LogProbServers) -> None:
        """Have agent-loop workers ask the servers of the reference policy; these get no weights."""
        handles = {replica.server_address: replica.server_handle for replica in replicas}
        self.async_rollout_manager.tell("use_reference", handles, servers.timeout, timeout_s=self.timeouts.startup)

    def _use_servers(self, replicas: list[ModelEngineReplica], servers: LogProbServers) -> None:
        """Give the log-prob servers weights from now on, and work."""
        numbers = itertools.count(len(replicas) + servers.reference_replicas)
        score_parts = servers.anchor == Anchor.GENERATION

        def tell(handles: Handles) -> None:
            agents, timeout_s = self.async_rollout_manager, self.timeouts.weight_sync
            agents.tell("use_servers", handles, servers.timeout, score_parts, timeout_s=timeout_s)

        self.fleet.use_servers(replicas, tell, lambda: self._launch_servers(servers, [next(numbers)])[0])

    def _start_training(self) -> None:
        self._init_resource_pools()
        self._create_worker_classes()
        self._init_worker_groups()
        self._init_models()

    def _create_actor_rollout_classes(self) -> None:
        pool = self.resource_pool_manager.get_resource_pool(Role.ActorRollout)
        self.resource_pool_to_cls[pool][str(Role.ActorRollout)] = RayClassWithInitArgs(
            cls=self.role_worker_mapping[Role.ActorRollout], config=self.config.actor_rollout_ref, role=self.actor_role
        )

# SPDX-License-Identifier: Apache-2.0
"""Stock verl's v1 trainers `separate_async` and `colocate_async` with this package's extensions.

Contract: training is verl's own. Rollout servers that start with dummy weights answer no request before they have the
first complete version, nor while weights are loaded in place. With log-prob servers (``model_engine_server``), the old
log-probs of a batch are available when the batch is sampled; for each answer they were computed by the version that
sampled its last token. If they are missing for an answer, the trainer computes the log-probs of the whole batch.
`recipe.async_engine.v1.sampler` keeps the staleness bound. The flags ``+recipe=separate_async`` and
``+recipe=colocate_async`` select these trainers (docs/flags.md). Shown by tests/e2e/test_v1_trainers.py.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from transfer_queue import KVBatchMeta
from verl import DataProto
from verl.checkpoint_engine import CheckpointEngineManager
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.debug import marked_timer
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from recipe.async_engine.config.v1_validation import read_v1
from recipe.async_engine.core.columns import ENTROPY, OLD_LOG_PROBS
from recipe.async_engine.engines.protocol import engine_class
from recipe.async_engine.engines.reservation import Reservations
from recipe.async_engine.inspection.check import plain
from recipe.async_engine.log_prob_servers.client import ScoringClient
from recipe.async_engine.log_prob_servers.replica import launch
from recipe.async_engine.shadowing import check_not_shadowed
from recipe.async_engine.trainer.log_probs.proximal import entropy_metric
from recipe.async_engine.trainer.shared_worker import HybridActorWorker
from recipe.async_engine.trainer.verl_settings import tell_servers

logger = logging.getLogger(__name__)


class BoundedTrainer(PPOTrainer):
    """Mixin that adds log-prob servers, and rollout servers that wait for the first weights, to a v1 trainer of verl.

    Attributes:
        name: value of ``trainer.v1.trainer_mode`` that selects this trainer.
        of_verl: name of the trainer of verl that is extended, and of its section in ``trainer.v1``.

    Raises:
        ConfigError: a run with this configuration is impossible.
    """

    name: ClassVar[str]
    of_verl: ClassVar[str]

    def __init__(self, config: DictConfig) -> None:
        check_not_shadowed()
        settings = read_v1(plain(config), self.of_verl)
        self._servers, self._timeouts = settings.servers, settings.async_training.timeouts
        with open_dict(config):
            config.trainer.v1.trainer_mode = self.of_verl
            tell_servers(config.actor_rollout_ref.rollout, self._timeouts)
            if self._servers.enabled:
                config.algorithm.rollout_correction.bypass_mode = False
        super().__init__(config)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in (Role.ActorRollout, Role.ActorRolloutRef):
            if role in self.role_worker_mapping:
                # While this worker loads weights into the engine on its own accelerators, it keeps the engine from
                # answering.
                self.role_worker_mapping[role] = ray.remote(HybridActorWorker)

    def _setup(self) -> None:
        engine = self.config.actor_rollout_ref.rollout.name
        RolloutReplicaRegistry.register(engine, lambda: engine_class(engine))
        super()._setup()
        self._scoring: ScoringClient | None = None
        self._server_sync: CheckpointEngineManager | None = None
        if self._servers.enabled:
            replicas = launch(self.config, self._servers, self._timeouts.weight_sync, Reservations())
            handles = {replica.server_address: replica.server_handle for replica in replicas}
            self._scoring = ScoringClient(handles, self._servers.timeout)
            self._server_sync = self._give_weights_to(replicas)

    def _give_weights_to(self, servers: list[RolloutReplica]) -> CheckpointEngineManager | None:
        """Make weight syncs include the log-prob servers.

        The servers must have a version before answers are sampled with it, because they compute these answers'
        log-probs. Return a checkpoint-engine manager for the log-prob servers alone, or None if verl's own manager
        includes them.
        """
        # Only the log-prob servers use this checkpoint engine, because verl passes weights to the colocated rollout
        # without one.
        return CheckpointEngineManager(
            config=omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout.checkpoint_engine),
            actor_wg=self.actor_rollout_wg,
            replicas=servers,
        )

    def get_llm_client(self) -> LLMServerClient:
        """Return verl's client of the rollout servers, with a client of the log-prob servers as an attribute."""
        client = super().get_llm_client()
        client.log_prob_servers = self._scoring
        return client

    @property
    def has_servers(self) -> bool:
        return self._scoring is not None

    def on_init_end(self) -> None:
        self._publish_to_servers()
        super().on_init_end()

    def on_step_end(self) -> None:
        with marked_timer("update_server_weights", self.timing_raw, color="red"):
            self._publish_to_servers()
        super().on_step_end()

    def _publish_to_servers(self) -> None:
        if self._server_sync is not None:
            self._server_sync.update_weights(self.global_steps)

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Use the old log-probs of the log-prob servers; if any are missing, compute those of the whole batch."""
        if self._scoring is None:
            return super()._compute_old_log_prob(batch, metrics)
        scored = self._scored(batch)
        missing = int(scored.batch[OLD_LOG_PROBS].isnan().any(dim=1).sum())
        metrics["model_engine_server/fallback_rows"] = missing
        if missing:
            logger.warning("the trainer computes the log-probs of a batch: no server scored %d answers", missing)
            return super()._compute_old_log_prob(batch, metrics)
        entropy, mask = scored.batch[ENTROPY], scored.batch["response_mask"]
        metrics.update(entropy_metric(entropy, mask, self.config.actor_rollout_ref.actor))
        if "rollout_log_probs" in scored.batch:
            metrics.update(calculate_debug_metrics(scored))
        return batch

    def _scored(self, batch: KVBatchMeta) -> DataProto:
        """Return the log-prob servers' log-probs and entropies for a batch, (rows, R) each.

        The result also has the columns that are needed to compute metrics from them, such as ``response_mask``.
        """
        padding = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if tag.get("is_padding")]
        if padding:
            # verl's padding rows are copies of an answer, shortened to one token, and have no log-probs and entropies:
            # add zeros.
            nothing = [{name: torch.zeros(1) for name in (OLD_LOG_PROBS, ENTROPY)} for _ in padding]
            tq.kv_batch_put(keys=padding, partition_id=batch.partition_id, fields=list_of_dict_to_tensordict(nothing))
        fields = [OLD_LOG_PROBS, ENTROPY, "response_mask"]
        if self.config.actor_rollout_ref.rollout.calculate_log_probs:
            fields += ["responses", "rollout_log_probs"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        return DataProto(batch=data.to_padded_tensor())


class SeparateAsync(BoundedTrainer, PPOTrainerSeparateAsync):
    name = "recipe_separate_async"
    of_verl = "separate_async"

    def _give_weights_to(self, servers: list[RolloutReplica]) -> None:
        # verl's manager sends each version to all replicas in its list before any of them generates with it. Replace
        # the list instead of changing it, because the rollout-server manager uses the same list object.
        manager = self.standalone_checkpoint_manager
        manager.replicas = [*manager.replicas, *servers]

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        if self.has_servers and self.parameter_sync_step > 1 and self.local_trigger_step == 0:
            # Save the weights of this version: verl needs them if it has to compute the log-probs of a later batch of
            # the version. verl itself saves them only if it computes the log-probs of the first batch.
            self.actor_rollout_wg.save_model_to_cpu(0)
        return super()._compute_old_log_prob(batch, metrics)


class ColocateAsync(BoundedTrainer, PPOTrainerColocateAsync):
    name = "recipe_colocate_async"
    of_verl = "colocate_async"


TRAINERS = (SeparateAsync, ColocateAsync)

# SPDX-License-Identifier: Apache-2.0
"""Implements `Stages` with verl's trainer. Only this file subclasses verl's trainer and uses its private members.

Contract: each stage is verl's own method, with verl's names of metrics. The methods of verl's trainer that compute in
worker groups run within a phase of the timeline, so that the event record shows when accelerators compute. Shown by
tests/integration/test_finite_stage.py, test_trainer_group.py and the end-to-end runs.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import ray
from tensordict import TensorDict
from verl import DataProto
from verl.experimental.separation.ray_trainer import SeparateRayPPOTrainer
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup, ResourcePoolManager
from verl.trainer.ppo.core_algos import AdvantageEstimator
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.utils import Role, create_rl_sampler, need_critic, need_reference_policy, need_teacher_policy
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.tensordict_utils import nested_tensor_from_tensor_list
from verl.workers.engine_workers import TrainingWorkerConfig

from recipe.async_engine.actors.sockets import rendezvous_ports
from recipe.async_engine.core.columns import OUTPUT_KEYS
from recipe.async_engine.engines.reservation import Reservations
from recipe.async_engine.rollout.prompts import IndexedDataset, LoaderInUse, UsableBatches, collate
from recipe.async_engine.trainer.actor_worker import BESIDE_METHODS, BESIDE_TRAINING, ActorWorker, CriticWorker
from recipe.async_engine.trainer.batch import compare_last_outputs, in_whole_mini_batches, without_added
from recipe.async_engine.trainer.data_sets import defaults
from recipe.async_engine.trainer.finite_stage import with_scores
from recipe.async_engine.trainer.record_stage import COMPUTE, UPDATE


class TrainerGroup(RayWorkerGroup):
    """verl's group of training workers, which can send weights while they train (`ActorWorker`)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        worker = kwargs.get("ray_cls_with_init")
        if worker is not None:
            # verl has already made the Ray actor class. Make a new one, because concurrency groups cannot be added to
            # it.
            group = ray.remote(concurrency_groups={BESIDE_TRAINING: len(BESIDE_METHODS)})
            worker.cls = group(worker.cls.__ray_actor_class__)
        super().__init__(*args, **{"master_port_range": rendezvous_ports(), **kwargs})

    def _bind_worker_method(self, user_defined_cls: Any, func_generator: Callable[..., Any]) -> Any:
        """Bind the workers' methods as verl does, but apply `make_tokens_ragged` to the arguments of each call."""

        def bound(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            method = func_generator(*args, **kwargs)

            def call(*args: Any, **kwargs: Any) -> Any:
                for data in args:
                    make_tokens_ragged(data)
                return method(*args, **kwargs)

            return call

        return super()._bind_worker_method(user_defined_cls, bound)

    def _execute_remote_single_worker(self, worker: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
        # If an actor has several roles, verl puts the role in front of the method's name, so compare only its end.
        if method_name.endswith(BESIDE_METHODS):
            return getattr(worker, method_name).options(concurrency_group=BESIDE_TRAINING).remote(*args, **kwargs)
        return super()._execute_remote_single_worker(worker, method_name, *args, **kwargs)


def make_tokens_ragged(data: Any) -> None:
    """Make the token dimension of position ids the ragged one. With images, their shape is (rows, 4, tokens).

    If all rows have the same length, verl's trainer makes dimension 1 (of size 4) ragged
    (verl/workers/utils/padding.py:67). verl's workers expect dimension 2 to be ragged, and would raise an error
    (verl/utils/tensordict_utils.py:915).
    """
    positions = data.get("position_ids") if isinstance(data, TensorDict) else None
    if positions is not None and positions.is_nested and positions.dim() == 3 and positions._ragged_idx == 1:
        data["position_ids"] = nested_tensor_from_tensor_list(list(positions.unbind()))


class VerlTrainer(SeparateRayPPOTrainer):
    """verl's trainer, as an implementation of `Stages`.

    Args:
        actor_worker: the class of the workers that train the policy.
        actor_role: verl's name of these workers' role.
        phase: takes the name of a phase, and returns a context that records the phase in the timeline.
        updated: called after an update, with the name of the model ("actor" or "critic") and the metrics of its ranks.
    """

    config: Any
    train_dataloader: Any
    reward_extra_infos_dict: dict[str, Any]
    all_wg: dict[str, Any]
    actor_rollout_wg: Any

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        processor: Any,
        data: tuple[IndexedDataset, IndexedDataset],
        actor_worker: type[ActorWorker],
        actor_role: str,
        phase: Callable[[str], AbstractContextManager[None]],
        updated: Callable[[str, DataProto], None],
    ) -> None:
        roles = {Role.ActorRollout: ray.remote(actor_worker)}
        if need_reference_policy(config):
            roles[Role.RefPolicy] = ray.remote(ActorWorker)
        if need_critic(config):
            roles[Role.Critic] = ray.remote(CriticWorker)
        trainer_pool = {"trainer_pool": [config.trainer.n_gpus_per_node] * config.trainer.nnodes}
        super().__init__(
            config,
            tokenizer,
            roles,
            ResourcePoolManager(trainer_pool, {role: "trainer_pool" for role in roles}),
            TrainerGroup,
            processor=processor,
            train_dataset=data[0],
            val_dataset=data[1],
            collate_fn=partial(collate, defaults=defaults(config)),
            train_sampler=create_rl_sampler(config.data, data[0]),
        )
        # Keep verl from starting a reward model on the trainer's accelerators: here it has accelerators of its own.
        self.use_rm = False
        # verl's update reads `distillation_config` (ray_trainer.py:1340), but verl sets it only when it starts
        # teachers.
        teaches = need_teacher_policy(config)
        self.distillation_config = omega_conf_to_dataclass(config.distillation) if teaches else None
        self.prompts = self.train_dataloader
        self.train_dataloader = LoaderInUse(len(self.train_dataloader))
        self.val_dataloader: Any = UsableBatches(self.val_dataloader)
        self._actor_role, self._phase, self._updated = actor_role, phase, updated

    @property
    def uses_reference(self) -> bool:
        return bool(self.use_reference_policy)

    # The following methods start processes.

    def start(self, reservations: Reservations) -> None:
        """Start the training workers on the accelerators in ``reservations``; verl would reserve its own."""
        manager = self.resource_pool_manager
        manager.resource_pool_dict = {name: reservations.pool(name) for name in manager.resource_pool_spec}
        self.resource_pool_to_cls: dict[Any, Any] = {pool: {} for pool in manager.resource_pool_dict.values()}
        self._create_worker_classes()
        self._init_worker_groups()
        self._init_models()
        if self.ref_in_actor:
            # verl's profiling needs `ref_policy_wg`, which verl's `RayPPOTrainer` sets too (ray_trainer.py:907, 1134).
            self.ref_policy_wg = self.actor_rollout_wg

    def use_rollout(self, agents: Any, servers: Any, rewards: Any, publisher: Any) -> None:
        """Store these objects under the names that verl's own methods use."""
        self.async_rollout_manager, self.llm_server_manager = agents, servers
        self.reward_loop_manager, self.checkpoint_manager = rewards, publisher

    def _create_actor_rollout_classes(self) -> None:
        pool = self.resource_pool_manager.get_resource_pool(Role.ActorRollout)
        self.resource_pool_to_cls[pool][str(Role.ActorRollout)] = RayClassWithInitArgs(
            cls=self.role_worker_mapping[Role.ActorRollout],
            config=self.config.actor_rollout_ref,
            distillation_config=self.config.get("distillation"),
            role=self._actor_role,
        )

    def _create_critic_class(self) -> None:
        """Make the critic as `RayPPOTrainer` does (ray_trainer.py:797).

        `SeparateRayPPOTrainer` only supports a critic with FSDP1.
        """
        if not self.use_critic:
            return
        critic = omega_conf_to_dataclass(self.config.critic)
        critic.engine.infer_max_token_len_per_gpu = critic.ppo_infer_max_token_len_per_gpu
        critic.engine.max_token_len_per_gpu = critic.ppo_max_token_len_per_gpu
        profiler = self.config.critic.get("profiler")
        worker = TrainingWorkerConfig(
            model_type="value_model",
            model_config=critic.model,
            engine_config=critic.engine,
            optimizer_config=critic.optim,
            checkpoint_config=critic.checkpoint,
            profiler_config=omega_conf_to_dataclass(profiler) if profiler else None,
        )
        self.orig_critic_cfg = critic
        pool = self.resource_pool_manager.get_resource_pool(Role.Critic)
        self.resource_pool_to_cls[pool][str(Role.Critic)] = RayClassWithInitArgs(
            cls=self.role_worker_mapping[Role.Critic], config=worker
        )

    # The following methods are the stages of a step.

    def begin_step(self, step: int, metrics: dict[str, Any], timing: dict[str, float]) -> None:
        self.global_steps, self.metrics, self.timing_raw = step, metrics, timing
        self.reward_tensor, self.reward_extra_infos_dict = None, {}

    def balance(self, batch: DataProto, metrics: dict[str, Any]) -> None:
        self._balance_batch(batch, metrics=metrics)

    rewards = SeparateRayPPOTrainer._fit_compute_reward
    reference_log_probs = SeparateRayPPOTrainer._fit_compute_ref_log_prob
    values = SeparateRayPPOTrainer._fit_compute_critic
    update_critic = SeparateRayPPOTrainer._fit_update_critic
    update_actor = SeparateRayPPOTrainer._fit_update_actor
    dump = SeparateRayPPOTrainer._fit_dump_data

    def old_log_probs(self, batch: DataProto) -> tuple[DataProto, float]:
        with self._phase(COMPUTE):
            rollout = self.config.actor_rollout_ref.rollout
            computed, mfu = self._compute_old_log_prob(self._shared(batch, self.actor_rollout_wg, "actor", rollout))
        return without_added(computed, batch), mfu

    def advantages(self, batch: DataProto) -> DataProto:
        """Add the columns ``advantages`` and ``returns`` to the batch.

        For GRPO, if trajectories have several outputs, `compare_last_outputs` then replaces the values that verl
        computed.
        """
        batch = self._fit_compute_advantage(batch)
        algorithm, keys = self.config.algorithm, batch.non_tensor_batch.get(OUTPUT_KEYS)
        if keys is not None and algorithm.adv_estimator == AdvantageEstimator.GRPO:
            by_std = algorithm.get("norm_adv_by_std_in_grpo", True)
            settings = {"adv_estimator": algorithm.adv_estimator, "norm_adv_by_std_in_grpo": by_std}
            compare_last_outputs(batch, keys, partial(compute_advantage, **settings, config=algorithm))
        return batch

    # verl's workers accept a batch only if its rows can be divided equally among ranks, and into whole micro-batches or
    # mini-batches. With several outputs per trajectory this may be impossible, so rows without effect are added for
    # each call.

    def _shared(self, batch: DataProto, group: Any, role: str, scoring: Any = None) -> DataProto:
        """Return the batch with rows added at its end, so that the ranks of a worker group can divide it equally.

        ``scoring`` is the configuration section with the micro-batch size for log-probs, if log-probs are computed.
        """
        rows = 1
        if scoring is not None and not scoring.log_prob_use_dynamic_bsz:
            rows = scoring.log_prob_micro_batch_size_per_gpu or 1
        return in_whole_mini_batches(batch, self._get_dp_size(group, role) * rows, self._filler)

    def _in_mini_batches(self, batch: DataProto, model: Any) -> DataProto:
        """Return the batch with rows added to fill whole mini-batches of ``ppo_mini_batch_size * rollout.n`` rows."""
        size = model.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
        balance = partial(self._balance_batch, metrics={}) if self.config.trainer.balance_batch else None
        return in_whole_mini_batches(batch, size, self._filler, balance)

    @property
    def _filler(self) -> int:
        return int(self.tokenizer.eos_token_id or 0)

    def measure(self, batch: DataProto) -> None:
        self._fit_collect_metrics(batch)
        self._fit_experimental(batch)

    # Each of the following methods runs verl's method of the same name within a phase of the timeline.

    def _compute_values(self, batch: DataProto) -> DataProto:
        with self._phase(COMPUTE):
            return without_added(super()._compute_values(self._shared(batch, self.critic_wg, "train")), batch)

    def _compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        with self._phase(COMPUTE):
            in_actor = self.ref_in_actor
            group, role = (self.actor_rollout_wg, "actor") if in_actor else (self.ref_policy_wg, "ref")
            settings = self.config.actor_rollout_ref
            shared = self._shared(batch, group, role, settings.rollout if in_actor else settings.ref)
            return without_added(super()._compute_ref_log_prob(shared), batch)

    def _update_critic(self, batch: DataProto) -> DataProto:
        with self._phase(UPDATE):
            output = super()._update_critic(self._in_mini_batches(batch, self.config.critic))
        self._updated("critic", output)
        return output

    def _update_actor(self, batch: DataProto) -> DataProto:
        with self._phase(UPDATE):
            output = super()._update_actor(self._in_mini_batches(batch, self.config.actor_rollout_ref.actor))
        self._updated("actor", output)
        return output

    # The following methods are for validation, checkpoints and profiles.

    def validate(self, step: int, generations: Any) -> dict[str, Any]:
        self.global_steps, self.validation_generations_logger = step, generations
        return self._validate()

    def _val_metrics_update(
        self, data_sources: Sequence[str], uids: list[Any], infos: dict[str, list[Any]], turns: list[Any]
    ) -> dict[str, float]:
        data_sources, uids, infos, turns, without = with_scores(data_sources, uids, infos, turns)
        metrics = super()._val_metrics_update(data_sources, uids, infos, turns)
        return {**metrics, "val-aux/num_failed": without}

    def save(self, step: int) -> None:
        self.global_steps = step
        self._save_checkpoint()

    def load(self) -> int:
        self.global_steps = 0
        self._load_checkpoint()
        return int(self.global_steps)

    def load_weights(self, folder: str) -> None:
        self.actor_rollout_wg.load_weights(f"{folder}/actor")
        if self.use_critic:
            self.critic_wg.load_weights(f"{folder}/critic")

    def profile(self, start: bool, run_hook: bool = False) -> None:
        if start:
            self._start_profiling(True)
        else:
            self._stop_profiling(True, run_command=run_hook)

    def close(self) -> None:
        self._shutdown_dump_executor()

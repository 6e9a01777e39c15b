# SPDX-License-Identifier: Apache-2.0
"""A critic among the training workers.

Contract: the critic is verl's, one more role of the training workers, with verl's loss; its values come before the
advantages, its update before the actor's. It trains on every batch, the actor from ``trainer.critic_warmup`` on. Shown
by tests/e2e/test_critic.py.
"""

from verl.single_controller.ray import RayClassWithInitArgs
from verl.trainer.ppo.utils import Role
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import TrainingWorkerConfig


class CriticStage:
    """Mixed into a trainer of verl, before its class."""

    def _create_critic_class(self) -> None:
        """As `RayPPOTrainer` does (ray_trainer.py:797); `SeparateRayPPOTrainer` has a copy for FSDP1 alone."""
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

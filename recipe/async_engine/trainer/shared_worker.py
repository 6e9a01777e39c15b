# SPDX-License-Identifier: Apache-2.0
"""The training worker whose accelerator a rollout engine shares."""

from typing import Any

from verl.single_controller.base.decorator import Dispatch, register

from recipe.async_engine.engines.vllm.weight_worker import DeadlineServerAdapter
from recipe.async_engine.trainer.actor_worker import ActorWorker


class NeighbourAdapter(DeadlineServerAdapter):
    """Loads weights into whichever server has its replica's name at that time: one that died is started again."""

    def _ensure_server_handle(self) -> bool:
        self.server_handle = None
        return super()._ensure_server_handle()


class HybridActorWorker(ActorWorker):
    """verl's worker; what hands its weights to the engine beside it has deadlines and commits versions."""

    rollout: Any

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the models, then the adapter of the rollout engine."""
        super().init_model()
        if self.rollout is None:
            return
        self.rollout = NeighbourAdapter(
            config=self.rollout.config,
            model_config=self.rollout.model_config,
            device_mesh=self.rollout.device_mesh,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> str | None:
        """As verl's; returns the checksum of what the engine beside this rank loaded."""
        await super().update_weights(global_steps=global_steps, mode=mode)
        return self.rollout.checksum

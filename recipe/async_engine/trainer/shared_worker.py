# SPDX-License-Identifier: Apache-2.0
"""The training worker for accelerators that a rollout engine shares."""

from typing import Any

from verl.single_controller.base.decorator import Dispatch, register

from recipe.async_engine.engines.vllm.weight_worker import DeadlineServerAdapter
from recipe.async_engine.trainer.actor_worker import ActorWorker


class NeighbourAdapter(DeadlineServerAdapter):
    """Loads weights into the server that has its replica's name now, since a server that died is started again."""

    def _ensure_server_handle(self) -> bool:
        self.server_handle = None
        return super()._ensure_server_handle()


class HybridActorWorker(ActorWorker):
    """verl's worker, whose transfer of weights to the engine beside it has deadlines and commits versions."""

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
        """Update the engine as verl does, and return the checksum of what the engine beside this rank loaded."""
        await super().update_weights(global_steps=global_steps, mode=mode)
        return self.rollout.checksum

# SPDX-License-Identifier: Apache-2.0
"""The training worker for a run in which trainer and rollout engines use the same accelerators."""

from typing import Any

from verl.single_controller.base.decorator import Dispatch, register

from recipe.async_engine.engines.protocol import adapter_class
from recipe.async_engine.trainer.actor_worker import ActorWorker


def neighbour_adapter(engine: str) -> Any:
    """Return a subclass of the engine's adapter that looks up the server by its name at each transfer of weights.

    The server may have died, and a new one may have replaced it under the same name.
    """
    adapter = adapter_class(engine)

    class NeighbourAdapter(adapter):  # type: ignore[valid-type, misc]
        def _ensure_server_handle(self) -> bool:
            self.server_handle = None
            return bool(super()._ensure_server_handle())

    return NeighbourAdapter


class HybridActorWorker(ActorWorker):
    """verl's training worker, which passes weights to the engine on its accelerators with deadlines and versions."""

    rollout: Any

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the models, and use this package's adapter of the rollout engine instead of verl's."""
        super().init_model()
        if self.rollout is None:
            return
        self.rollout = neighbour_adapter(self.rollout.config.name)(
            config=self.rollout.config,
            model_config=self.rollout.model_config,
            device_mesh=self.rollout.device_mesh,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        """Send weights as verl does.

        With the backend "naive", return the checksum of the weights that the rollout engine has loaded; with any other
        backend, return verl's metrics. The backend is ``mode`` or, if that is "auto", the configured one.
        """
        sent = await super().update_weights(global_steps=global_steps, mode=mode)
        backend = self.config.rollout.checkpoint_engine.backend if mode == "auto" else mode
        return self.rollout.checksum if backend == "naive" else sent

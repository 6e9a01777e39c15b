# SPDX-License-Identifier: Apache-2.0
"""verl's training worker, extended to send a copy of its weights while it trains, and to keep the published weights.

Contract: the calls that send weights run in a Ray concurrency group of their own, `BESIDE_TRAINING`, so that they and
the calls that train batches never wait for each other. What they send is a copy of the weights
(`recipe.async_engine.weights.snapshot`).

If several batches are trained between two publications, the trainer's weights change while the rollout continues with
the published weights. Therefore the trainer keeps a copy of the published weights until the next publication, and
computes the log-probs of all these batches with the copy. A checkpoint that is written between two publications
includes the copy, and a run that resumes from the checkpoint publishes the copy under the same version number. Shown by
tests/integration/test_published_weights.py and tests/e2e/test_published_weights.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.plugin.platform import get_platform
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name, get_vendor
from verl.utils.tensordict_utils import maybe_fix_3d_position_ids
from verl.workers.engine_workers import TrainingWorker

from recipe.async_engine.config.log_prob_servers import Proximal
from recipe.async_engine.config.plan import RunPlan
from recipe.async_engine.core.errors import CheckpointError
from recipe.async_engine.trainer.log_probs import losses
from recipe.async_engine.weights import lora_engine
from recipe.async_engine.weights.arena import in_one_piece, settle
from recipe.async_engine.weights.checksum import SummedSender
from recipe.async_engine.weights.snapshot import WeightSnapshot, Wire

# Importing the losses registers them in this process, so that verl finds them by name.
LOSSES = (losses.BYPASS, losses.LOGLINEAR)


PUBLISHED, TRAINED = "published", "trained"
"""Names of two copies of the weights. `PUBLISHED` has the weights that were published last. `TRAINED` has the newest
weights while the workers use the published ones.
"""

BESIDE_TRAINING = "weights"
"""Name of the actor's concurrency group for the methods in `BESIDE_METHODS`."""
BESIDE_METHODS = ("execute_checkpoint_engine", "send_snapshot")


SHARDED = ("fsdp2", "veomni")
"""Values of ``actor.strategy`` for which the model's parameters are DTensors."""


def free_gathered(module: torch.nn.Module) -> None:
    """Free parameters that FSDP2 has gathered, so that every parameter is a DTensor with this rank's shard.

    With ``reshard_after_forward=false`` a forward pass without a backward pass leaves the gathered tensors in place.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


class ShardCopy:
    """Copies one training rank's weight shards to host memory, and reuses this memory for every copy.

    Training may continue from the copy, so the copy has the exact values of the shards, usually in fp32. (The copy that
    is sent to replicas is another one, a `WeightSnapshot`: the whole model in the rollout's dtype, on rank 0.) `take`
    returns the format of `verl.utils.fsdp_utils.fsdp2_sharded_save_to_cpu`. Unlike that function (fsdp_utils.py:1180),
    `take` also copies tensors that are on the CPU, and copies all shards into one piece of pinned memory.
    """

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []

    @torch.no_grad()
    def take(self, module: torch.nn.Module) -> tuple[dict[str, tuple[torch.Tensor, Any]], Any]:
        """Copy this rank's shards of the module's parameters, and return the copy in verl's format."""
        free_gathered(module)
        parameters = dict(module.named_parameters())
        shards: list[torch.Tensor] = [
            getattr(parameter, "_local_tensor", parameter) for parameter in parameters.values()
        ]
        forms = [(shard.shape, shard.dtype) for shard in shards]
        if forms != [(tensor.shape, tensor.dtype) for tensor in self._tensors]:
            self._tensors = in_one_piece(forms, pinned=torch.cuda.is_available())
        for tensor, shard in zip(self._tensors, shards, strict=True):
            tensor.copy_(shard, non_blocking=True)
        settle()
        specs = [getattr(parameter, "_spec", None) for parameter in parameters.values()]
        copies = dict(zip(parameters, zip(self._tensors, specs, strict=True), strict=True))
        return copies, next(spec for spec in specs if spec is not None)


class ActorWorker(DetachActorWorker):
    """verl's training worker, with copies of its weights that work on every platform and can be written to disk.

    If the copy to be restored does not exist, this worker raises an error, whereas verl's worker does nothing
    (experimental/separation/engine_workers.py:140).
    """

    checkpoint_engine: Any
    _snapshot: WeightSnapshot | None = None
    _shards: dict[str, ShardCopy] | None = None
    _device: Any = None

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the checkpoint engine as verl does, after selecting the training device for this thread."""
        if self._device is not None:
            get_platform().set_device(self._device)
        return super().execute_checkpoint_engine(method, *args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the models, with the training engines of `recipe.async_engine.weights.lora_engine`.

        Rank 0 gets a checkpoint engine that computes the checksum of the weights that it sends.
        """
        lora_engine.register(get_device_name(), get_vendor())
        super().init_model()
        self._device = get_platform().current_device()
        engine = getattr(self, "checkpoint_engine", None)
        if self.rank == 0 and getattr(engine, "wire_format", None) == "named_tensors":
            self.checkpoint_engine = SummedSender(engine)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def snapshot_weights(self, version: int, wire: Wire) -> None:
        """Copy the current weights, in the dtypes that ``wire`` names. `send_snapshot` sends them as ``version``."""
        if self._snapshot is None:
            name = get_platform().device_name
            from_host = name == "cpu" or getattr(self.checkpoint_engine, "from_host", False)
            self._snapshot = WeightSnapshot(self.rank == 0, None if from_host else torch.device(name, self._device))
        self._snapshot.take(lambda: self.actor.engine.get_per_tensor_param()[0], version, wire)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def send_snapshot(self, version: int) -> dict[str, float]:
        """Send the copy of ``version`` to all receivers, and return the checkpoint engine's metrics."""
        assert self._snapshot is not None, "snapshot_weights comes first"
        get_platform().set_device(self._device)
        with self._snapshot.stream(version) as weights:
            return await self.checkpoint_engine.send_weights(weights, global_steps=version) or {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def pass_without_update(self, data: TensorDict) -> None:
        """Do one forward and backward pass over ``data``, as for an update, without changing weights or optimizer.

        ``data`` is the result of verl's `left_right_2_no_padding` for a batch, the same on every rank.
        """
        model, engine = self.actor.model_config, self.actor.engine
        maybe_fix_3d_position_ids(data)
        tu.assign_non_tensor(
            data,
            use_remove_padding=model.get("use_remove_padding", False),
            use_fused_kernels=self.actor.engine_config.use_fused_kernels,
        )
        # Leaving the context of `train_mode` drops the gradients, so no update uses them.
        with engine.train_mode():
            engine.forward_backward_batch(data, negative_likelihood)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_model_to_cpu(self, n: str) -> None:
        """Keep a copy of this rank's shard of the weights under the name ``n``."""
        # Wait, because verl may still be copying offloaded weights to host memory (utils/fsdp_utils.py:203).
        settle()
        if self.config.actor.strategy not in SHARDED:
            super().save_model_to_cpu(n)
            return
        if not hasattr(self, "cpu_saved_models"):
            self.cpu_saved_models: dict[str, Any] = {}
        self._shards = self._shards or {}
        self.cpu_saved_models[n] = self._shards.setdefault(n, ShardCopy()).take(self.actor.engine.module)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def restore_model_from_cpu(self, n: str) -> None:
        """Restore the copy with the name ``n``; raise `CheckpointError` if there is no such copy."""
        self._copy(n)
        settle()
        if self.config.actor.strategy in SHARDED:
            free_gathered(self.actor.engine.module)
        super().restore_model_from_cpu(n)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_weights(self, folder: str) -> None:
        load_weights(self.actor.engine, folder)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def write_copy(self, n: str, folder: str) -> None:
        """Write this rank's shards of the copy with the name ``n`` to the rank's own file in ``folder``."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save(_tensors(self._copy(n)), self._file(folder))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def read_copy(self, n: str, folder: str) -> None:
        """Read a copy that :meth:`write_copy` wrote to ``folder``, and keep it under the name ``n``.

        Raises:
            CheckpointError: the folder has no file for this rank and number of ranks, or the file is damaged or belongs
                to another model.
        """
        file = self._file(folder)
        if not file.is_file():
            raise CheckpointError(
                f"{file} is not there. The checkpoint was written between two weight syncs, so each training rank "
                "needs its own file of the weights that were sent last. Resume with the same number of ranks, or from "
                "another checkpoint (trainer.resume_mode=resume_path)"
            )
        try:
            saved = torch.load(file, weights_only=True)
        except Exception as error:  # torch may raise anything if the file is damaged
            raise CheckpointError(
                f"{file} cannot be read ({type(error).__name__}: {error}): resume from another checkpoint"
            ) from None
        self.save_model_to_cpu(n)
        present = _tensors(self._copy(n))
        if [tensor.shape for tensor in saved] != [tensor.shape for tensor in present]:
            raise CheckpointError(f"{file} has the weights of another model: resume with the checkpoint's own model")
        for tensor, other in zip(present, saved, strict=True):
            tensor.copy_(other)

    def _copy(self, n: str) -> Any:
        copies = getattr(self, "cpu_saved_models", {})
        if n not in copies:
            raise CheckpointError(f"training rank {self.rank} has no copy {n!r} of its weights, only {sorted(copies)}")
        return copies[n]

    def _file(self, folder: str) -> Path:
        return Path(folder) / f"rank_{self.rank}_of_{self.world_size}.pt"


class CriticWorker(TrainingWorker):
    """verl's critic worker, which can also load only the weights of a checkpoint."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_weights(self, folder: str) -> None:
        load_weights(self.engine, folder)


def load_weights(engine: Any, folder: str) -> None:
    """Load only the weights of a checkpoint into one of verl's engines, without the optimizer state."""
    # Try both names, because verl misspells this name in its Megatron engine (engine/megatron/transformer_impl.py:627).
    manager = getattr(engine, "checkpoint_manager", None) or engine.checkpoint_mananager
    contents, manager.checkpoint_load_contents = manager.checkpoint_load_contents, ["model"]
    try:
        engine.load_checkpoint(folder, del_local_after_load=False)
    finally:
        manager.checkpoint_load_contents = contents
    # Megatron's optimizers have their own copies of the weights. Update these copies here, because verl does not do so
    # when it loads only the model.
    if (renew := getattr(engine.optimizer, "reload_model_params", None)) is not None:
        with engine.train_mode():  # this context moves offloaded weights and optimizer state to the device
            renew()


def negative_likelihood(model_output: Any, data: TensorDict, dp_group: Any = None) -> tuple[torch.Tensor, Any]:
    """Return the mean of the tokens' negative log-probs as a loss, in the form that verl's engines expect."""
    return -model_output["log_probs"].values().mean(), {}


def _tensors(copy: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(copy) if isinstance(leaf, torch.Tensor)]


class PublishedWeights:
    """Keeps a copy of the published weights in the training ``workers`` (`ActorWorker`), if the run needs the copy.

    ``saves`` says whether the run writes checkpoints.
    """

    def __init__(self, workers: Any, plan: RunPlan, saves: bool) -> None:
        self._workers = workers
        needed = saves or plan.hybrid_replicas > 0 or plan.proximal in (Proximal.RECOMPUTE, Proximal.SERVER)
        self._are_kept = plan.batches_per_version > 1 and needed

    def keep(self) -> None:
        """Copy the workers' current weights, which have just been published, if the run needs the copy."""
        if self._are_kept:
            self._workers.save_model_to_cpu(PUBLISHED)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the workers use the published weights in the ``with`` block, and restore the newest weights after it."""
        self._workers.save_model_to_cpu(TRAINED)
        try:
            self._workers.restore_model_from_cpu(PUBLISHED)
            yield
        finally:
            self._workers.restore_model_from_cpu(TRAINED)
            self._workers.clear_cpu_model(TRAINED)

    def save(self, checkpoint: str | Path) -> None:
        self._workers.write_copy(PUBLISHED, str(Path(checkpoint) / PUBLISHED))

    def load(self, checkpoint: str | Path) -> None:
        self._workers.read_copy(PUBLISHED, str(Path(checkpoint) / PUBLISHED))

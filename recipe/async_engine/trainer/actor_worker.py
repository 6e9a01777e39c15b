# SPDX-License-Identifier: Apache-2.0
"""The training worker of the modes with separate resources."""

from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.logprobs import bypass, loglinear

# The losses that verl finds by their names in this process.
LOSSES = (bypass.LOSS, loglinear.LOSS)


class CopyError(RecipeError):
    """A copy of the weights is not there, or is another model's."""


class ActorWorker(DetachActorWorker):
    """verl's worker, whose saved weights are copies on every platform, and can be written to disk.

    verl saves with ``.cpu()``, which returns the live tensor itself when it is on the CPU already
    (utils/fsdp_utils.py:1180): what is restored later would be the weights as they are by then. Where there is no copy,
    verl's restoring does nothing (experimental/separation/engine_workers.py:140).
    """

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_model_to_cpu(self, n: str) -> None:
        """Keep a copy of this rank's shard of the weights under the name ``n``."""
        super().save_model_to_cpu(n)
        if not isinstance(self.cpu_saved_models[n], tuple):
            return
        shards, spec = self.cpu_saved_models[n]
        live = {parameter.untyped_storage().data_ptr() for parameter in self._local_shards()}
        copies = {
            name: (shard.clone() if shard.untyped_storage().data_ptr() in live else shard, shard_spec)
            for name, (shard, shard_spec) in shards.items()
        }
        self.cpu_saved_models[n] = copies, spec

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def restore_model_from_cpu(self, n: str) -> None:
        """Go back to the copy of the name ``n``.

        Raises:
            CopyError: there is none.
        """
        self._copy(n)
        super().restore_model_from_cpu(n)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def write_copy(self, n: str, folder: str) -> None:
        """Write this rank's part of the copy ``n`` to a file of its own."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save(_tensors(self._copy(n)), self._file(folder))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def read_copy(self, n: str, folder: str) -> None:
        """Have the copy ``n`` that :meth:`write_copy` wrote.

        Raises:
            CopyError: there is none for this rank among so many, or it is another model's.
        """
        file = self._file(folder)
        if not file.is_file():
            raise CopyError(
                f"{file} is not there: the checkpoint was written in the middle of a version by as many training "
                "ranks, and needs the weights that were published then. Resume with the same number of ranks, or from "
                "another checkpoint (trainer.resume_mode=resume_path)"
            )
        saved = torch.load(file, weights_only=True)
        self.save_model_to_cpu(n)
        present = _tensors(self._copy(n))
        if [tensor.shape for tensor in saved] != [tensor.shape for tensor in present]:
            raise CopyError(f"{file} has the weights of another model")
        for tensor, other in zip(present, saved, strict=True):
            tensor.copy_(other)

    def _copy(self, n: str) -> Any:
        copies = getattr(self, "cpu_saved_models", {})
        if n not in copies:
            raise CopyError(f"training rank {self.rank} has no copy {n!r} of its weights, only {sorted(copies)}")
        return copies[n]

    def _file(self, folder: str) -> Path:
        return Path(folder) / f"rank_{self.rank}_of_{self.world_size}.pt"

    def _local_shards(self) -> list[torch.Tensor]:
        return [getattr(parameter, "_local_tensor", parameter) for parameter in self.actor.engine.module.parameters()]


def _tensors(copy: Any) -> list[torch.Tensor]:
    """The tensors of a copy, in whatever form verl keeps one for the training engine."""
    return [leaf for leaf in tree_leaves(copy) if isinstance(leaf, torch.Tensor)]

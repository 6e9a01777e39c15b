# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The training worker of the modes with separate resources."""

import torch
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register

from recipe.async_engine.logprobs import bypass, loglinear

# The losses that verl finds by their names in this process.
LOSSES = (bypass.LOSS, loglinear.LOSS)


class ActorWorker(DetachActorWorker):
    """verl's worker, whose saved weights are copies on every platform.

    verl saves with ``.cpu()``, which returns the live tensor itself when it is on the CPU already
    (utils/fsdp_utils.py:1180): what is restored later would be the weights as they are by then.
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

    def _local_shards(self) -> list[torch.Tensor]:
        return [getattr(parameter, "_local_tensor", parameter) for parameter in self.actor.engine.module.parameters()]

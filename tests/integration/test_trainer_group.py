# SPDX-License-Identifier: Apache-2.0
"""Ranks meet at a port that no connection is given in between; training workers send weights beside training."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
import torch
from tensordict import TensorDict
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import create_colocated_worker_cls, get_master_addr_port
from verl.utils.tensordict_utils import index_select_tensor_dict, maybe_fix_3d_position_ids
from verl.workers.utils.padding import left_right_2_no_padding

from recipe.async_engine.engines.reservation import Reservations, ReservedReplica
from recipe.async_engine.trainer.verl_trainer import TrainerGroup


class Replica(ReservedReplica):
    """Ranks of another part of a run, on an accelerator that was reserved for them."""

    def __init__(self) -> None:
        self.replica_rank, self.name_suffix, self.is_reward_model = 0, "", False
        self.gpus_per_replica_node = self.nnodes = 1
        self.reservations = cast(Reservations, SimpleNamespace(pool=lambda *_: RayResourcePool([1], use_gpu=False)))

    def get_ray_class_with_init_args(self) -> Any: ...

    async def launch_servers(self) -> None: ...


def start_trainer() -> None:
    TrainerGroup(resource_pool=RayResourcePool([1], use_gpu=False))


def start_replica() -> None:
    asyncio.run(Replica().init_standalone())


@pytest.mark.parametrize("start", [start_trainer, start_replica])
def test_rendezvous_port_is_below_those_of_connections(
    start: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def init(group: RayWorkerGroup, **_: object) -> None:
        asked.append(group._ray_master_port_range)

    # What verl does next with the range: it starts the workers, and asks on their first node.
    monkeypatch.setattr(RayWorkerGroup, "_init_with_resource_pool", init)
    start()
    _, port = get_master_addr_port._function(*asked)
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert 16_000 <= int(port) < min(32_000, lowest)


def training_worker() -> type[Worker]:
    """A class that travels to its process with its code."""

    class TrainingWorker(Worker):
        """Trains until a call about its checkpoint engine has been answered."""

        def __init__(self) -> None:
            super().__init__()
            self.asked = threading.Event()
            self._register_dispatch_collect_info(mesh_name="train", dp_rank=self.rank, is_collect=True)

        @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
        def train(self) -> bool:
            return self.asked.wait(60)

        @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
        def execute_checkpoint_engine(self, method: str) -> str:
            self.asked.set()
            return f"did {method}"

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("train"))
        def turned(self, data: TensorDict) -> TensorDict:
            """Return the rows' positions in the opposite order, taken as verl's workers take micro-batches."""
            maybe_fix_3d_position_ids(data)
            found = index_select_tensor_dict(data, list(range(len(data)))[::-1])["position_ids"]
            return TensorDict({"positions": torch.stack(found.unbind())}, batch_size=len(data))

        @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
        async def send_snapshot(self, version: int) -> int:
            return version

    return TrainingWorker


@pytest.mark.usefixtures("cluster")
def test_what_has_to_do_with_sending_weights_does_not_wait_for_an_update() -> None:
    roles = {"actor": RayClassWithInitArgs(cls=ray.remote(training_worker()))}
    pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1)
    group: Any = TrainerGroup(resource_pool=pool, ray_cls_with_init=create_colocated_worker_cls(roles)).spawn(roles)
    workers = group["actor"]
    update = workers.train()
    assert ray.get(workers.execute_checkpoint_engine(["prepare"]), timeout=60) == ["did prepare"]
    assert ray.get(workers.send_snapshot(3), timeout=60) == [3]
    assert ray.get(update, timeout=60) == [True]


@pytest.mark.usefixtures("cluster")
def test_positions_of_rows_of_one_length_reach_workers() -> None:
    """Once verl's own group needs no help here, `make_tokens_ragged` can go."""
    ones = torch.ones(2, 3, dtype=torch.long)
    positions = torch.arange(24).view(2, 4, 3)
    columns = {"input_ids": ones, "attention_mask": ones, "response_mask": ones, "position_ids": positions}
    for group_class in (TrainerGroup, RayWorkerGroup):
        roles = {"actor": RayClassWithInitArgs(cls=ray.remote(training_worker()))}
        pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1)
        group: Any = group_class(resource_pool=pool, ray_cls_with_init=create_colocated_worker_cls(roles)).spawn(roles)
        data = left_right_2_no_padding(TensorDict(columns, batch_size=2))
        if group_class is RayWorkerGroup:
            with pytest.raises(RuntimeError):
                group["actor"].turned(data)
        else:
            assert torch.equal(group["actor"].turned(data)["positions"], positions.flip(0))

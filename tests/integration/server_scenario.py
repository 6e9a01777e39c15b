# SPDX-License-Identifier: Apache-2.0
"""Two log-prob servers on real Ray, one of two ranks and one of one, fed by a real weight transfer.

The servers treat the transfer's collectives as those of a device, beside which several ranks compute nothing. This is a
separate process, started by test_model_engine_server.py, which prints its results as one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from device_engine import BACKEND
from model_engine_scenarios import TEMPERATURE, VOCABULARY, Scenario, make_model
from verl.workers.config import (
    CheckpointEngineConfig,
    FSDPEngineConfig,
    HFModelConfig,
    RolloutConfig,
)
from weight_sender import TrainerGroup

from recipe.async_engine.config.sections import Weights
from recipe.async_engine.core.scoring import ScoringSettings
from recipe.async_engine.engines.reservation import Reservations
from recipe.async_engine.log_prob_servers.adapter import WorkerSettings
from recipe.async_engine.log_prob_servers.client import ScoringClient
from recipe.async_engine.log_prob_servers.replica import ModelEngineReplica
from recipe.async_engine.log_prob_servers.service import Segment, Unscored
from recipe.async_engine.run.ray_start import start_own
from recipe.async_engine.weights.publisher import WeightPublisher
from recipe.laptop.choice import CPU_ENVIRONMENT

MODEL = Scenario("fsdp2", "qwen3", tied=False)
BROKEN = "model.layers.1.mlp.up_proj.weight"
TIMEOUT_S = 30.0
START_S = 120.0
LATE_S = 0.5
HELD_S = 1.0
LENGTHS = (13, 24, 7, 20, 9)
ENGINE = {"timeout_s": 10.0}
CHECKPOINT_ENGINE = CheckpointEngineConfig(
    backend=BACKEND,
    custom_backend_module="device_engine",
    update_weights_bucket_megabytes=1,
    engine_kwargs={BACKEND: ENGINE},
)


def stream(version: int, fault: str | None = None, until: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a version with a fault; ``until``: file whose creation ends a delay."""
    for name, tensor in make_model(MODEL, seed=version).state_dict().items():
        while name == BROKEN and fault == "held_up" and not os.path.exists(until):
            time.sleep(0.01)
        if name == BROKEN and fault == "cut_off":
            raise ConnectionError("the trainer is gone")
        if name == BROKEN and fault == "missing":
            continue
        yield name, tensor[:-1] if name == BROKEN and fault == "wrong_shape" else tensor
    if fault == "unknown":
        yield "model.layers.2.mlp.up_proj.weight", torch.zeros(3, 4)


class Sync(WeightPublisher):
    """A publisher that only has log-prob servers."""

    def load(self, version: int) -> dict[str, str | None]:
        """Load a version; return each server's error, None if it has the version."""
        for record in self.known.records:
            record.error = None
        asyncio.run(self._load(self.known.records, version))
        return {record.server_id: None if record.error is None else str(record.error) for record in self.known.records}


def sequences() -> list[np.ndarray]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).int().numpy() for length in LENGTHS]


async def answers(client: ScoringClient, version: int, first: int = 4, errors_too: bool = False) -> list[Any]:
    requests = [client.score(Segment(tokens, first), len(tokens), version, 0) for tokens in sequences()]
    return await asyncio.gather(*requests, return_exceptions=errors_too)


def difference(client: ScoringClient, asked: int, right: int, first: int = 4) -> float:
    """Return how answers to requests for version ``asked`` differ from Hugging Face's forward of version ``right``."""
    model, largest = make_model(MODEL, seed=right), 0.0
    for tokens, answer in zip(sequences(), asyncio.run(answers(client, asked, first)), strict=True):
        assert (answer.version, answer.scores.shape) == (right, (2, len(tokens) - first))
        ids = torch.from_numpy(tokens.astype(np.int64))
        with torch.no_grad():
            expected = torch.log_softmax(model(ids[None]).logits[0, :-1] / TEMPERATURE, -1)
        columns = expected.gather(-1, ids[1:, None])[:, 0], -(expected.exp() * expected).sum(-1)
        for computed, column in zip(answer.scores, columns, strict=True):
            largest = max(largest, float(np.abs(computed - column[first - 1 :].numpy()).max()))
    return largest


def refusal(client: ScoringClient, version: int) -> str | None:
    """Return the common refusal of all requests for ``version``, of which none is pending any more."""
    found = asyncio.run(answers(client, version, errors_too=True))
    return str(found[0]) if all(isinstance(outcome, Unscored) for outcome in found) else None


def make_replicas(path: str) -> list[ModelEngineReplica]:
    precision = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = FSDPEngineConfig(
        strategy="fsdp2",
        model_dtype="fp32",
        dtype="float32",
        mixed_precision=precision,
        use_torch_compile=False,
        use_dynamic_bsz=True,
        infer_max_token_len_per_gpu=64,
        infer_micro_batch_size_per_gpu=1,
    )
    settings = WorkerSettings(engine, TEMPERATURE, timeout_s=TIMEOUT_S)
    rollout = RolloutConfig(name="vllm", checkpoint_engine=CHECKPOINT_ENGINE)
    override = {"attn_implementation": "sdpa"}
    model = HFModelConfig(
        path=path, use_remove_padding=False, enable_gradient_checkpointing=False, override_config=override
    )
    replicas = [
        ModelEngineReplica(
            rank, rollout, model, ranks, 2, settings, ScoringSettings(max_batch_tokens=64), Reservations()
        )
        for rank, ranks in enumerate((2, 1))
    ]

    async def start() -> None:
        await asyncio.wait_for(asyncio.gather(*[replica.init_standalone() for replica in replicas]), START_S)

    asyncio.run(start())
    return replicas


async def paused(replica: ModelEngineReplica, client: ScoringClient) -> list[bool]:
    """Return whether a request is answered while serving is paused, and after it is resumed."""
    await replica.pause_serving()
    request = asyncio.ensure_future(answers(client, 1))
    done, _ = await asyncio.wait({request}, timeout=1.0)
    await replica.resume_serving()
    await asyncio.wait_for(request, TIMEOUT_S)
    return [bool(done), request.done()]


def watch(worker: Any, late_s: float) -> None:
    """Record from now on whether the rank receives weights, and delay their staging by ``late_s``."""
    receive, worker.receives = worker._receive, False

    def watched(version: int) -> str:
        worker.receives = True
        try:
            checksum = receive(version)
        finally:
            worker.receives = False
        time.sleep(late_s)
        return checksum

    worker._receive = watched


async def beside_a_transfer(sync: Sync, two_ranks: Any, one_rank: Any, version: int, until: str) -> list[list[bool]]:
    """Return which servers answer for the previous version during the transfer of ``version`` to all, and after it."""
    transfer = asyncio.create_task(asyncio.to_thread(sync.load, version))
    workers = [worker for record in sync.known.records for worker in record.replica.workers]
    async with asyncio.timeout(TIMEOUT_S):
        while not all([await worker.__ray_call__.remote(lambda worker: worker.receives) for worker in workers]):
            await asyncio.sleep(0.01)
        requests = [asyncio.ensure_future(answers(client, version - 1)) for client in (two_ranks, one_rank)]
        await requests[1]
    await asyncio.wait(requests, timeout=HELD_S)
    meanwhile = [request.done() for request in requests]
    Path(until).touch()
    await transfer
    await asyncio.wait_for(asyncio.gather(*requests), TIMEOUT_S)
    return [meanwhile, [request.done() for request in requests]]


def play(path: str) -> dict[str, Any]:
    replicas = make_replicas(path)
    # The second rank of two gets its weights long after the first one has reported them.
    ranks = [*replicas[0].workers, *replicas[1].workers]
    late = [worker.__ray_call__.remote(watch, late_s) for worker, late_s in zip(ranks, (0, LATE_S, 0), strict=True)]
    ray.get(late, timeout=TIMEOUT_S)
    handles = {replica.server_address: replica.server_handle for replica in replicas}
    two_ranks, one_rank = (ScoringClient({name: handle}, TIMEOUT_S) for name, handle in handles.items())
    both = ScoringClient(handles, TIMEOUT_S)
    group = TrainerGroup(stream, bucket_size=1 << 20, **ENGINE)
    sync = Sync(CHECKPOINT_ENGINE, group, [], None, TIMEOUT_S, Weights())
    sync.add_replicas(replicas)
    seen: dict[str, Any] = {"before_any": refusal(both, 0), "first": sync.load(0)}
    seen["version_0"] = [difference(two_ranks, 0, 0), difference(both, 0, 0)]
    seen["faults"] = {}
    for fault in ("missing", "wrong_shape", "unknown", "cut_off"):
        group.more = (fault,)
        seen["faults"][fault] = {
            "errors": sync.load(1),
            "old_version": difference(two_ranks, 0, 0),
            "new_version": refusal(two_ranks, 1),
        }
    group.more = ()
    seen["then"] = sync.load(1)
    # No request for version 1 has come yet, so a late segment of version 0 is still scored by version 0.
    seen["version_0_after_sync"] = difference(two_ranks, 0, 0)
    seen["version_1"] = [difference(two_ranks, 1, 1), difference(both, 1, 1)]
    seen["paused"] = asyncio.run(paused(replicas[0], two_ranks))
    group.more = ("held_up", f"{path}.arrives")
    seen["beside_a_transfer"] = asyncio.run(beside_a_transfer(sync, two_ranks, one_rank, 2, group.more[1]))
    group.more = ()
    pid = ray.get(replicas[0].workers[1].__ray_call__.remote(lambda worker: os.getpid()), timeout=TIMEOUT_S)
    os.kill(pid, signal.SIGKILL)
    seen["after_a_rank_died"] = difference(both, 1, 1)
    seen["asked_from_now_on"] = list(both.servers)
    return seen


def main() -> None:
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    make_model(MODEL, seed=9).save_pretrained(f"{folder}/model")
    variables = {**CPU_ENVIRONMENT, "PYTHONPATH": os.path.dirname(__file__)}
    runtime = {"py_executable": sys.argv[1], "env_vars": variables}
    start = {"num_cpus": 20, "num_gpus": 3, "include_dashboard": False, "log_to_driver": False}
    start_own({**start, "_temp_dir": folder, "runtime_env": runtime}, 300.0)
    try:
        sys.stdout.write(json.dumps(play(f"{folder}/model")) + "\n")
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

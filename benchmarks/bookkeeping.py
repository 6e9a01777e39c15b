# SPDX-License-Identifier: Apache-2.0
"""Cost of one sample on its way from a finished answer to the trainer: this package against stock verl's queue.

    python benchmarks/bookkeeping.py [--samples 1000 10000 100000] [--repeats 3]

A sample is a prompt group of 8 answers of 256 tokens, made in another process. The measured part comes after that:

- stock: the rollouter pickles the group and puts it into the `MessageQueue` actor; the trainer gets and unpickles it.
- ours: the ledger and the gate (issue, ready, take, trained, publish) and the trainer's fetch of the 8 payloads by
  reference. `books` is only the ledger and the gate, which replace the work of the queue itself.

Both process batches of 64 groups in one Ray session, alternately; the results are medians over the repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
import time
from typing import Any

import numpy as np
import ray
import torch
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, _InternalAgentLoopOutput
from verl.experimental.fully_async_policy.detach_utils import RolloutSample
from verl.experimental.fully_async_policy.message_queue import MessageQueue, MessageQueueClient

from recipe.async_engine.core.gate import GateSettings
from recipe.async_engine.core.groups import PromptRef
from recipe.async_engine.core.ledger import SampleLedger
from recipe.async_engine.rollout.trajectory_codec import pack, unpack

ANSWERS, PROMPT_TOKENS, RESPONSE_TOKENS = 8, 32, 256
BATCH = 64


def trajectory() -> dict[str, np.ndarray]:
    """Return what an agent loop produces for one answer, padded as in verl."""
    total = PROMPT_TOKENS + RESPONSE_TOKENS
    return {
        "prompts": np.zeros((1, PROMPT_TOKENS), dtype=np.int64),
        "responses": np.ones((1, RESPONSE_TOKENS), dtype=np.int64),
        "response_mask": np.ones((1, RESPONSE_TOKENS), dtype=np.int64),
        "attention_mask": np.ones((1, total), dtype=np.int64),
        "input_ids": np.ones((1, total), dtype=np.int64),
        "position_ids": np.ones((1, total), dtype=np.int64),
        "rollout_log_probs": np.zeros((1, RESPONSE_TOKENS), dtype=np.float32),
    }


@ray.remote(num_cpus=0)
class Worker:
    """Stands for an agent-loop worker."""

    def __init__(self) -> None:
        row = {name: torch.from_numpy(value) for name, value in trajectory().items()}
        extra = {"version_runs": ((0, RESPONSE_TOKENS),), "exact_versions": True, "reward_extra_info": {"score": 1.0}}
        self.output = _InternalAgentLoopOutput(
            prompt_ids=row.pop("prompts"),
            response_ids=row.pop("responses"),
            response_logprobs=row.pop("rollout_log_probs"),
            reward_score=1.0,
            metrics=AgentLoopMetrics(),
            extra_fields=extra,
            **row,
        )

    def make(self) -> bytes:
        return pack([self.output])


def stock_group(number: int) -> RolloutSample:
    rows = [trajectory() for _ in range(ANSWERS)]
    tensors = {key: torch.from_numpy(np.concatenate([row[key] for row in rows])) for key in rows[0]}
    uids = np.array([f"uid_{number}"] * ANSWERS, dtype=object)
    return RolloutSample(DataProto.from_dict(tensors, non_tensors={"uid": uids}), f"sample_{number}", 0, {})


class Stock:
    """Passes groups through stock verl's queue."""

    def __init__(self) -> None:
        self._queue = MessageQueue.options(num_cpus=0).remote({}, max_queue_size=2 * BATCH)
        self._client = MessageQueueClient(self._queue)
        self._groups = [stock_group(number) for number in range(BATCH)]

    async def batch(self) -> float:
        """Return the seconds for one batch."""
        began = time.perf_counter()
        for group in self._groups:
            assert await self._client.put_sample(ray.cloudpickle.dumps(group))
        for _ in range(BATCH):
            received, _ = await self._client.get_sample()
            ray.cloudpickle.loads(received)
        return time.perf_counter() - began

    def close(self) -> None:
        ray.kill(self._queue)


class Ours:
    """Passes groups through ledger and gate, with payloads by reference."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._ledger = SampleLedger(GateSettings(BATCH, 1, 1, 1))
        self._issued = 0
        self._references: dict[int, list[Any]] = {}

    def batch(self) -> tuple[float, float]:
        """Return (seconds for one batch, the part of them in ledger and gate)."""
        ledger, references = self._ledger, self._references
        began = time.perf_counter()
        started = []
        while ledger.can_issue():
            started.append(ledger.issue(PromptRef(self._issued, 0, f"0-{self._issued}")))
            self._issued += 1
        books = time.perf_counter() - began
        for group in started:
            references[group.id] = [self._worker.make.remote() for _ in range(ANSWERS)]
        ray.wait([last[-1] for last in references.values()], num_returns=len(references), fetch_local=False)
        began = time.perf_counter()
        for group in started:
            ledger.mark_ready(group.id, group.start)
        batch = ledger.take()
        books += time.perf_counter() - began
        began = time.perf_counter()
        payloads = ray.get([reference for group in batch for reference in references[group.id]])
        for payload in payloads:
            unpack(payload)
        fetching = time.perf_counter() - began
        began = time.perf_counter()
        ledger.mark_trained()
        ledger.seal()
        ledger.announce()
        books += time.perf_counter() - began
        for group in batch:
            del references[group.id]
        return books + fetching, books


def measure(samples: int, stock_every: int, worker: Any) -> dict[str, float]:
    """Return each side's seconds per sample, alternating batches; stock only runs in every ``stock_every``-th turn."""
    stock, ours = Stock(), Ours(worker)
    asyncio.run(stock.batch())
    ours.batch()
    times: dict[str, list[float]] = {"stock": [], "ours": [], "books": []}
    for number in range(samples // BATCH):
        whole, books = ours.batch()
        times["ours"].append(whole)
        times["books"].append(books)
        if number % stock_every == 0:
            times["stock"].append(asyncio.run(stock.batch()))
    stock.close()
    return {name: statistics.mean(values) / BATCH for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--stock-every", type=int, default=1, help="measure stock in every n-th batch only")
    arguments = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    ray.init(num_cpus=4, include_dashboard=False, _temp_dir=folder, log_to_driver=False)
    worker = Worker.remote()
    for samples in arguments.samples:
        repeats = [measure(samples, arguments.stock_every, worker) for _ in range(arguments.repeats)]
        per_sample = {
            name: statistics.median(repeat[name] for repeat in repeats) * 1e6 for name in ("stock", "ours", "books")
        }
        row: dict[str, float] = {"samples": samples - samples % BATCH}
        row |= {f"{name}_us": round(value, 1) for name, value in per_sample.items()}
        row |= {f"stock_over_{name}": round(per_sample["stock"] / per_sample[name], 1) for name in ("ours", "books")}
        print(json.dumps(row), flush=True)
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

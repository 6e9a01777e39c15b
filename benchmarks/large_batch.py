# SPDX-License-Identifier: Apache-2.0
"""Costs of long answers, large batches and many trajectories in flight, apart from the accelerators.

    python benchmarks/large_batch.py [assemble] [live] [turn] [control]

Each part runs in a process of its own and prints one line of JSON for each measurement.

- assemble: a batch of 1,024 answers of 32k tokens, packed by other processes as agent-loop workers pack them, is
  fetched from Ray's object store and converted to verl's batch. `growth` is the increase of the process's peak resident
  memory, including the pages that it reads of the object store, as a multiple of the batch's bytes. `versions_s` is the
  trainer's work on token versions in a step, with four versions in each answer: the column, the bound, the statistics.
- live: the real scheduler and ledger over 256 stand-in replicas, whose trajectories end when the benchmark says so. A
  step trains the 1,024 oldest trajectories, of 128 groups, while as many others take their places. CPU seconds per step
  are those of the scheduler's thread and of the trainer's. `control_s` is the longest that a call from another thread
  waited for the scheduler's loop and lock, from the start on.
- turn: like live, but in generation turns: taking a batch interrupts all other trajectories, and the next turn resumes
  them at once, which takes `turn_s`. `collection_cpu_s` is the longest garbage collection.
- control: a real actor like an agent-loop worker, which holds 1,000 trajectories while 7,192 more wait; the result is
  the longest of 200 control calls.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray

ANSWERS, GROUP, PROMPT, RESPONSE = 1024, 8, 512, 32_768
REPLICAS, STEPS = 256, 8
LIVE = (2_048, 8_192, 16_384, 65_536)
HELD, WAITING = 1_000, 7_192


def show(**row: Any) -> None:
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}
    print(json.dumps(rounded), flush=True)


@contextmanager
def own_ray(store_bytes: int) -> Iterator[None]:
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    sizes = {"num_cpus": 4, "object_store_memory": store_bytes}
    ray.init(include_dashboard=False, _temp_dir=folder, log_to_driver=False, **sizes)
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


# Assembling


def make_payload(number: int) -> np.ndarray:
    """Return an agent-loop worker's payload for an answer that four versions sampled."""
    import torch
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, _InternalAgentLoopOutput

    from recipe.async_engine.core.versions import align
    from recipe.async_engine.rollout.trajectory_codec import pack

    tokens = list(range(number, number + RESPONSE))
    part = RESPONSE // 4
    pieces = [(version, tokens[version * part : (version + 1) * part]) for version in range(4)]
    began = time.perf_counter()
    runs = align(pieces, tokens, [1] * RESPONSE).runs
    spent = time.perf_counter() - began
    response, prompt = torch.tensor([tokens]), torch.full((1, PROMPT), 7)
    output = _InternalAgentLoopOutput(
        prompt_ids=prompt,
        response_ids=response,
        input_ids=torch.cat([prompt, response], dim=1),
        position_ids=torch.arange(PROMPT + RESPONSE)[None],
        attention_mask=torch.ones(1, PROMPT + RESPONSE, dtype=torch.int64),
        response_mask=torch.ones(1, RESPONSE, dtype=torch.int64),
        response_logprobs=torch.full((1, RESPONSE), -0.5),
        reward_score=1.0,
        metrics=AgentLoopMetrics(),
        extra_fields={"version_runs": runs, "exact_versions": True, "reward_extra_info": {}, "align_s": spent},
    )
    return pack([output])


def resident(name: str) -> int:
    """Return a memory figure of this process in bytes, from /proc/self/status."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(name))


def new_groups(count: int) -> list[Any]:
    from recipe.async_engine.core.groups import Group, PromptRef
    from recipe.async_engine.rollout.group_run import GroupRun

    row = {"raw_prompt": np.array([[{"role": "user", "content": "?"}]], dtype=object)}
    return [GroupRun(Group(number, PromptRef(number, 0, f"0-{number}"), 0), row, 0) for number in range(count)]


def assemble_once(references: list[Any]) -> dict[str, Any]:
    from recipe.async_engine.rollout.trajectory_codec import unpack
    from recipe.async_engine.rollout.trajectory_manager import TrajectoryManager
    from recipe.async_engine.trainer import batch as batches

    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak
    before, began, used = resident("VmRSS"), time.perf_counter(), time.process_time()
    trajectories = [unpack(payload) for payload in ray.get(references, timeout=600)]
    rows = [row for (row,) in trajectories]
    lengths = [int(row.attention_mask.sum()) for row in rows]
    outputs = [trajectories[first : first + GROUP] for first in range(0, len(rows), GROUP)]
    joiner = SimpleNamespace(reward_loop_worker_handles=[])
    order = random.Random(0).sample(range(len(rows)), len(rows))
    batch = batches.assemble(
        new_groups(len(outputs)), outputs, lambda inputs: TrajectoryManager.join(joiner, inputs), order
    )
    seconds, cpu = time.perf_counter() - began, time.process_time() - used
    assert sum(lengths) == len(rows) * (PROMPT + RESPONSE)
    growth = resident("VmHWM") - before
    size = sum(column.nbytes for column in batch.batch.values())
    began, used = time.perf_counter(), time.process_time()
    runs = [row.extra_fields["version_runs"] for row in rows]
    column = batches._expanded([runs[number] for number in order], RESPONSE)
    metrics = batches.staleness_metrics(batch, version=4, bound=4)
    versions, versions_cpu = time.perf_counter() - began, time.process_time() - used
    assert metrics["fully_async/sampled_tokens"] == len(rows) * RESPONSE
    assert column.shape == (len(rows), RESPONSE)
    workers = sum(row.extra_fields["align_s"] for row in rows)
    return {
        "answers": len(rows),
        "assemble_s": seconds,
        "assemble_cpu_s": cpu,
        "batch_gb": size / 1e9,
        "growth": growth / size,
        "versions_s": versions,
        "versions_cpu_s": versions_cpu,
        "versions_in_all_workers_s": workers,
    }


def assemble_part() -> None:
    with own_ray(2_500_000_000):
        maker = ray.remote(num_cpus=1)(make_payload)
        assemble_once(
            ray.get([ray.put([maker.remote(n) for n in range(GROUP)])])[0]
        )  # imports, and allocation of Ray's buffers
        references = [maker.remote(number) for number in range(ANSWERS)]
        ray.wait(references, num_returns=ANSWERS, timeout=600, fetch_local=False)
        show(part="assemble", **assemble_once(references))


# Many trajectories in flight


class Source:
    """A data source with an unlimited number of prompts."""

    prompts_left = 1 << 40

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def take(self) -> Any:
        from recipe.async_engine.core.groups import Prompt

        return Prompt(0, next(self._numbers), {"raw_prompt": np.array(["?"], dtype=object)})


class Replicas:
    """Stands for the scheduler's pool of workers: 256 equally loaded replicas."""

    alive, lost = REPLICAS, False

    def __init__(self) -> None:
        self.begun: list[asyncio.Future[None]] = []
        self.load: Counter[str] = Counter()
        self._turns = itertools.cycle(range(REPLICAS))
        self.loop: Any = None

    def assign(self, run: Any) -> None:
        self.loop = asyncio.get_running_loop()
        run.key = f"{run.of.group.id}-{run.n}-{len(run.errors)}"
        run.worker_id, run.under_way = f"replica-{next(self._turns)}", True
        self.load[run.worker_id] += 1

    async def attempt(self, run: Any, sampled: Any) -> None:
        """Run a trajectory at a stand-in replica, which generates until it is told to end."""
        from recipe.async_engine.rollout.group_run import TrajectoryScored

        self.begun.append(self.loop.create_future())
        await self.begun[-1]
        self.load[run.worker_id] -= 1
        version, run.under_way = run.of.group.start, False
        run.scored, run.payload = TrajectoryScored(1.0, version, version, True, 0, 0, RESPONSE), run.key

    async def go_on(self) -> None:
        """Do nothing, because no trajectory is held."""

    def metrics(self) -> dict[str, float]:
        return {}

    async def cancel(self, keys: Any) -> None:
        """Do nothing, because no trajectory is cancelled."""

    close = cancel


def probe(scheduler: Any, over: threading.Event, waits: list[float]) -> None:
    async def answer() -> None:
        pass

    while not over.wait(0.02):
        began = time.perf_counter()
        asyncio.run_coroutine_threadsafe(answer(), scheduler._thread.loop).result(60)
        scheduler.counts()
        waits.append(time.perf_counter() - began)


def new_scheduler(live: int, pool: Replicas, turns: bool = False) -> Any:
    from recipe.async_engine.core.gate import GateSettings
    from recipe.async_engine.core.ledger import SampleLedger
    from recipe.async_engine.core.policy import OldestReady, Turns
    from recipe.async_engine.record.timeline import Timeline
    from recipe.async_engine.rollout.group_run import SchedulerSettings
    from recipe.async_engine.rollout.scheduler import RolloutScheduler

    # The trainer's process does the same once it has started.
    gc.collect()
    gc.freeze()
    bound = live // ANSWERS - 1
    ledger = SampleLedger(GateSettings(ANSWERS // GROUP, 1, bound, bound), policy=Turns() if turns else OldestReady())
    settings = SchedulerSettings(group_size=GROUP, slots=live, max_retries=1, max_consecutive_failures=9)
    return RolloutScheduler(ledger, Source(), pool, settings, Timeline(time.monotonic, live))


@contextmanager
def collections() -> Iterator[list[float]]:
    """Record the CPU seconds of each garbage collection, for which every thread waits."""
    spent: list[float] = []

    def note(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            spent.append(-time.thread_time())
        else:
            spent[-1] += time.thread_time()

    gc.callbacks.append(note)
    try:
        yield spent
    finally:
        gc.callbacks.remove(note)


def measure_turn(live: int) -> dict[str, Any]:
    pool = Replicas()
    scheduler = new_scheduler(live, pool, turns=True)
    scheduler.use_places(0, 0.0, 600)
    scheduler.start()
    waits: list[float] = []
    over = threading.Event()
    prober = threading.Thread(target=probe, args=(scheduler, over, waits), daemon=True)
    prober.start()
    scheduler.use_places(live, 1.0, 600)
    while len(pool.begun) < live:
        time.sleep(0.02)
    for done in pool.begun[:ANSWERS]:
        pool.loop.call_soon_threadsafe(done.set_result, None)
    batch = scheduler.take_batch(600)
    assert batch is not None and len(batch) == ANSWERS // GROUP
    scheduler.use_places(0, 0.0, 600).result(600)
    scheduler.batch_trained()
    scheduler.version_sealed()
    scheduler.version_announced()
    began = time.perf_counter()
    scheduler.use_places(live, 1.0, 600)
    while scheduler.manager.running < live - ANSWERS:
        time.sleep(0.002)
    turn = time.perf_counter() - began
    over.set()
    prober.join()
    scheduler.stop(600)
    return {"live": live, "turn_s": turn, "control_s": max(waits)}


def measure_live(live: int) -> dict[str, Any]:
    pool = Replicas()
    scheduler = new_scheduler(live, pool)
    scheduler.start()
    clock = time.pthread_getcpuclockid(scheduler._thread._thread.ident)
    waits: list[float] = []
    over, steps, ended = threading.Event(), [], 0
    prober = threading.Thread(target=probe, args=(scheduler, over, waits), daemon=True)
    prober.start()
    while len(pool.begun) < live:
        time.sleep(0.02)
    for _ in range(STEPS):
        while len(pool.begun) < live + ended:
            time.sleep(0.002)
        ending = pool.begun[ended : ended + ANSWERS]
        ended += ANSWERS
        random.Random(ended).shuffle(ending)

        def end(answers: list[Any] = ending) -> None:
            for done in answers:
                time.sleep(0.0005)  # one after the other, as answers end
                pool.loop.call_soon_threadsafe(done.set_result, None)

        before = time.thread_time(), time.clock_gettime(clock)
        driver = threading.Thread(target=end)
        driver.start()
        batch = scheduler.take_batch(600)
        scheduler.batch_trained()
        scheduler.version_sealed()
        scheduler.version_announced()
        scheduler.metrics()
        trainer = time.thread_time() - before[0]
        while len(pool.begun) < live + ended:
            time.sleep(0.002)
        steps.append((trainer, time.clock_gettime(clock) - before[1]))
        driver.join()
        assert batch is not None and len(batch) == ANSWERS // GROUP
    over.set()
    prober.join()
    scheduler.stop(600)
    trainer, own = (statistics.median(of_thread) for of_thread in zip(*steps[2:], strict=True))
    return {"live": live, "scheduler_cpu_s": own, "trainer_cpu_s": trainer, "control_s": max(waits)}


def live_part() -> None:
    for live in LIVE:
        show(part="live", **measure_live(live))


def turn_part() -> None:
    for live in LIVE:
        with collections() as spent:
            measured = measure_turn(live)
        show(part="turn", **measured, collection_cpu_s=max(spent))


# Control calls


def control_part() -> None:
    from recipe.async_engine.actors.control import Restartable

    class Worker:
        """Holds the calls that it is given."""

        def __init__(self) -> None:
            self.running = 0

        async def run_trajectory(self, key: str) -> None:
            self.running += 1
            await asyncio.sleep(3600)

        async def hold(self) -> int:
            return self.running

    with own_ray(200_000_000):
        made = Restartable(Worker, 1, ("run_trajectory",), max_concurrency=HELD)
        worker = made.options().remote()
        calls = [worker.run_trajectory.remote(str(number)) for number in range(HELD + WAITING)]
        waits = []
        while ray.get(worker.hold.remote(), timeout=600) < HELD or len(waits) < 200:
            began = time.perf_counter()
            ray.get(worker.hold.remote(), timeout=600)
            waits.append(time.perf_counter() - began)
        show(part="control", held=HELD, waiting=len(calls) - HELD, longest_s=max(waits), calls=len(waits))


PARTS = {"assemble": assemble_part, "live": live_part, "turn": turn_part, "control": control_part}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}; all of them by default")
    parts = parser.parse_args().parts
    if len(parts) == 1:
        PARTS[parts[0]]()
        return
    for name in parts:
        subprocess.run([sys.executable, __file__, name], check=True)


if __name__ == "__main__":
    main()

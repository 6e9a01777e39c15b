# SPDX-License-Identifier: Apache-2.0
"""Real processes with one checkpoint engine each, driven the way verl's `CheckpointEngineManager` drives them.

All prepare, then build_topology, init_process_group on all, send and receive at the same time, finalize. Members are
forked, because each would otherwise spend 10 s on importing verl.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from recipe.laptop.transfer.gloo_engine import GlooCheckpointEngine

BUCKET_BYTES = 4096
ANSWER_S = 60.0
CLONE_NEWPID, PR_SET_PDEATHSIG = 0x20000000, 1


def make_weights(seed: int) -> dict[str, torch.Tensor]:
    """Return weights with shapes and dtypes that are easy to get wrong, several of them larger than a bucket."""
    random = torch.Generator().manual_seed(seed)
    embedding = torch.randn(300, 16, generator=random)
    return {
        "embed": embedding,
        "norm": torch.randn(16, generator=random).bfloat16(),
        "scalar": torch.tensor(float(seed)),
        "empty": torch.empty(0, 5, dtype=torch.bfloat16),
        "odd": torch.randint(0, 255, (3, 7), generator=random, dtype=torch.uint8),
        "mask": torch.tensor([True, False, True]),
        "counter": torch.tensor([seed, 1 << 40]),
        "transposed": torch.randn(20, 30, generator=random).t(),
        "exactly_one_bucket": torch.randn(BUCKET_BYTES // 4, generator=random),
        "float8": torch.randn(33, generator=random).to(torch.float8_e4m3fn),
        "lm_head": embedding,
    }


def run_member(pipe: Any, is_master: bool, settings: dict[str, Any]) -> None:
    """Run the loop of one member process, which answers each command with its result or error."""
    engine = GlooCheckpointEngine(BUCKET_BYTES, is_master=is_master, **settings)

    seen: list[str] = []

    async def send(seed: int, version: int | None, fail_at: int | None, outside: bool) -> Any:
        seen.clear()

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for index, item in enumerate(make_weights(seed).items()):
                if index == fail_at:
                    raise ValueError("no such shard")
                seen.append(item[0])
                yield item

        metrics = await engine.send_weights(weights(), global_steps=version)
        return seen if outside else metrics

    async def receive(
        version: int | None, stop_after: int | None = None, die_after: int | None = None, pause_s: float = 0.0
    ) -> Any:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.01)

        ticker = asyncio.create_task(tick())
        got: list[tuple[str, torch.Tensor]] = []
        stream = engine.receive_weights(global_steps=version)
        async for name, tensor in stream:
            if not got:
                await asyncio.sleep(pause_s)
            got.append((name, tensor.clone()))
            if len(got) == die_after:
                os.kill(os.getpid(), signal.SIGKILL)
            if len(got) == stop_after:
                await stream.aclose()
                break
        ticker.cancel()
        return {
            "names": [name for name, _ in got],
            "bytes": [bytes(tensor.reshape(-1).view(torch.uint8).numpy()) for _, tensor in got],
            "kinds": [(str(tensor.dtype), tuple(tensor.shape)) for _, tensor in got],
            "ticks": ticks,
        }

    while True:
        command, arguments = pipe.recv()
        try:
            if command == "send":
                answer = asyncio.run(send(**arguments))
            elif command == "receive":
                answer = asyncio.run(receive(**arguments))
            elif command == "consumed_names":
                answer = seen
            elif command == "shares_memory":
                answer = "memfd:recipe-weights" in Path("/proc/thread-self/maps").read_text()
            else:
                answer = getattr(engine, command)(**arguments)
            pipe.send((True, answer))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))


def can_contain() -> bool:
    """Return whether this user may create process namespaces."""
    pid = os.fork()
    if pid == 0:
        os._exit(ctypes.CDLL(None).unshare(CLONE_NEWPID) != 0)
    return os.waitpid(pid, 0)[1] == 0


def run_contained(*arguments: Any) -> None:
    """Run `run_member` as in a container, in which the other members' processes are invisible."""
    libc = ctypes.CDLL(None)
    libc.unshare(CLONE_NEWPID)  # for its children from now on
    if os.fork() == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        run_member(*arguments)
    os.wait()


class Member:
    """A process with one engine; ``contained``: in a process namespace of its own."""

    def __init__(self, is_master: bool = False, contained: bool = False, **settings: Any) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, far_end = context.Pipe()
        defaults = {"timeout_s": 20.0, "connect_timeout_s": 10.0}
        run = run_contained if contained else run_member
        self.process = context.Process(target=run, args=(far_end, is_master, defaults | settings), daemon=True)
        self.process.start()
        far_end.close()

    def start(self, command: str, **arguments: Any) -> None:
        self.pipe.send((command, arguments))

    def outcome(self) -> tuple[bool, Any]:
        assert self.pipe.poll(ANSWER_S), "the member did not answer in time"
        return self.pipe.recv()

    def call(self, command: str, **arguments: Any) -> Any:
        self.start(command, **arguments)
        good, answer = self.outcome()
        assert good, answer
        return answer

    def stop(self) -> None:
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(10)


class Fleet:
    """Trainer ranks and receivers, connected as verl's manager connects them."""

    def __init__(self, receivers: int, actors: int = 1, **settings: Any) -> None:
        self.actors = [Member(is_master=rank == 0, **settings) for rank in range(actors)]
        self.settings = settings
        self.receivers = [Member(**settings) for _ in range(receivers)]

    @property
    def sender(self) -> Member:
        return self.actors[0]

    def connect(self) -> list[str]:
        members = self.actors + self.receivers
        metadata = [member.call("prepare") for member in members]
        actor_kwargs, receiver_kwargs = GlooCheckpointEngine.build_topology(
            len(self.actors), len(self.receivers), metadata
        )
        kwargs = [
            {name: values[index] for name, values in group.items()}
            for group, count in ((actor_kwargs, len(self.actors)), (receiver_kwargs, len(self.receivers)))
            for index in range(count)
        ]
        for member, arguments in zip(members, kwargs, strict=True):
            member.start("init_process_group", **arguments)
        for member in members:
            good, answer = member.outcome()
            assert good, answer
        return [member.call("topology_epoch") for member in members]

    def start_sync(self, seed: int, version: int | None, fail_at: int | None = None, **receiving: Any) -> None:
        for receiver in self.receivers:
            receiver.start("receive", version=version, **receiving)
        for rank, actor in enumerate(self.actors):
            actor.start("send", seed=seed, version=version, fail_at=fail_at, outside=rank > 0)

    def sync(self, seed: int, version: int | None = None) -> list[Any]:
        """Perform a sync that must succeed, and check what every receiver got; return the senders' answers."""
        self.start_sync(seed, version)
        answers = [actor.outcome() for actor in self.actors]
        for receiver in self.receivers:
            good, answer = receiver.outcome()
            assert good, answer
            check_received(answer, seed)
        assert all(good for good, _ in answers), answers
        for member in self.actors + self.receivers:
            member.call("finalize")
        return [answer for _, answer in answers]

    def stop(self) -> None:
        for member in self.actors + self.receivers:
            member.stop()


def check_received(answer: dict[str, Any], seed: int) -> None:
    expected = make_weights(seed)
    assert answer["names"] == list(expected)
    assert answer["kinds"] == [(str(tensor.dtype), tuple(tensor.shape)) for tensor in expected.values()]
    flat = [bytes(tensor.reshape(-1).view(torch.uint8).numpy()) for tensor in expected.values()]
    assert answer["bytes"] == flat

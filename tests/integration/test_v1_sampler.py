# SPDX-License-Identifier: Apache-2.0
"""The bounded sampler in verl's sampling loop, over a queue and a trainer of this process; groups end in any order."""

from __future__ import annotations

import itertools
import random
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import replay_buffer
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from recipe.async_engine.v1.sampler import BoundedReplayBuffer, SamplerError

BATCH = 4


class Queue:
    """What verl's replay buffer asks TransferQueue for."""

    def __init__(self) -> None:
        self.items: dict[str, dict[str, Any]] = {}

    def kv_list(self) -> dict[str, dict[str, Any]]:
        return {"train": {key: dict(tag) for key, tag in self.items.items()}}

    def kv_clear(self, partition_id: str, keys: list[str]) -> None:
        for key in keys:
            self.items.pop(key, None)


class Trainer:
    """The part of verl's v1 trainer that issues prompts and samples, with its names."""

    def __init__(self, queue: Queue, threshold: int, batches: int, chunk: int | None, sampler: type | None) -> None:
        self.config = SimpleNamespace(
            data=OmegaConf.create({"train_batch_size": BATCH * batches, "gen_batch_size": chunk})
        )
        self.queue, self.global_steps, self.issued, self.failed = queue, 1, itertools.count(), 0
        common = {
            "trainer_mode": "separate_async",
            "trainer_config": {"parameter_sync_step": batches},
            "max_off_policy_threshold": threshold,
            "max_off_policy_strategy": "wait",
            "sampler_kwargs": {},
            "refill_fn": self._add_prompts_to_generate,
        }
        self.buffer: Any = ReplayBufferAsync(**common) if sampler is None else sampler(**common)
        self.trained: list[tuple[str, int]] = []
        materialize = self.buffer._materialize_batch

        def note(partition: str, keys: list[str], snapshot: Any) -> Any:
            born = self.buffer.prompt_global_steps[partition]
            self.trained += [(key, self.global_steps - born[key]) for key in keys]
            return materialize(partition, keys, snapshot)

        self.buffer._materialize_batch = note

    def _resolve_filter_groups_metric(self) -> None:
        return None

    def _add_prompts_to_generate(self, prompts: int) -> int:
        chunk = self.config.data.gen_batch_size or self.config.data.train_batch_size
        assert prompts > 0 and prompts % chunk == 0
        for _ in range(prompts):
            key = f"p{next(self.issued)}"
            self.queue.items[key] = {"is_prompt": True, "status": "running", "global_steps": self.global_steps}
        return prompts

    def _add_batch_to_generate(self) -> None:
        self._add_prompts_to_generate(self.config.data.train_batch_size)

    def train(self, steps: int, batches: int) -> list[tuple[str, int]]:
        """What is trained, with the versions that each group is old."""
        for _ in range(steps):
            self._add_batch_to_generate()
            for _ in range(batches):
                self.buffer.sample(self.global_steps, "train", BATCH)
            self.global_steps += 1
        return self.trained


def run(
    monkeypatch: pytest.MonkeyPatch,
    *,
    sampler: type | None,
    threshold: int,
    warmup: int,
    batches: int = 1,
    chunk: int | None = 1,
    seed: int = 0,
    failures: float = 0.0,
    steps: int = 8,
) -> tuple[Trainer, list[tuple[str, int]]]:
    queue, order = Queue(), random.Random(seed)

    def one_ends(seconds: float) -> None:
        running = [key for key, tag in queue.items.items() if tag["status"] == "running"]
        assert running, "the sampler waits and nothing is under way"
        chosen = order.choice(running)
        failed = order.random() < failures
        trainer.failed += failed
        queue.items[chosen]["status"] = "failure" if failed else "finished"

    monkeypatch.setattr(replay_buffer, "tq", queue)
    # Its own name for the module: other threads of this process sleep as ever.
    monkeypatch.setattr(replay_buffer, "time", SimpleNamespace(sleep=one_ends, time=time.time))
    trainer = Trainer(queue, threshold, batches, chunk, sampler)
    if warmup:
        trainer._add_prompts_to_generate(warmup * BATCH * batches)
    return trainer, trainer.train(steps, batches)


@settings(max_examples=60)
@given(
    threshold=st.integers(1, 4),
    warmup=st.integers(0, 5),
    batches=st.integers(1, 3),
    whole=st.booleans(),
    failures=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 10_000),
)
def test_no_group_is_trained_past_the_bound_and_each_issued_one_is_trained_once_or_failed(
    threshold: int, warmup: int, batches: int, whole: bool, failures: float, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        trainer, trained = run(
            monkeypatch,
            sampler=BoundedReplayBuffer,
            threshold=threshold,
            warmup=warmup,
            batches=batches,
            chunk=None if whole and not failures else 1,
            failures=failures,
            seed=seed,
        )
    assert all(0 <= age < threshold for _, age in trained)
    keys = [key for key, _ in trained]
    assert len(set(keys)) == len(keys) == 8 * batches * BATCH
    left = sum(tag["status"] != "failure" for tag in trainer.queue.items.values())
    assert next(trainer.issued) == len(keys) + trainer.failed + left


@pytest.mark.parametrize("warmup", [2, 3])
def test_verls_strategy_wait_trains_past_it_where_as_many_batches_are_issued_ahead(
    monkeypatch: pytest.MonkeyPatch, warmup: int
) -> None:
    _, trained = run(monkeypatch, sampler=None, threshold=2, warmup=warmup)
    assert max(age for _, age in trained) == warmup > 2 - 1


def test_prompts_beyond_the_bound_are_owed_and_not_taken_from_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, trained = run(monkeypatch, sampler=BoundedReplayBuffer, threshold=2, warmup=3, steps=1)
    # Two versions' worth of the four batches that were asked for.
    assert next(trainer.issued) == 2 * BATCH
    assert trainer.buffer._owed == 2 * BATCH
    assert [age for _, age in trained] == [0] * BATCH


def test_batch_that_cannot_be_filled_in_chunks_says_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SamplerError, match=r"data\.gen_batch_size=1"):
        run(monkeypatch, sampler=BoundedReplayBuffer, threshold=1, warmup=0, chunk=BATCH, failures=0.5)


def test_checkpoint_of_a_larger_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = run(monkeypatch, sampler=BoundedReplayBuffer, threshold=1, warmup=0, steps=1)
    trainer.global_steps = 5
    trainer.queue.items["old"] = {"is_prompt": True, "status": "running", "global_steps": 2}
    with pytest.raises(SamplerError, match="Resume with the threshold"):
        trainer._add_batch_to_generate()


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"max_off_policy_threshold": None}, "is null"), ({"trainer_mode": "sync"}, "trainer_mode=sync")],
)
def test_what_it_cannot_bound_is_refused(changes: dict[str, Any], words: str) -> None:
    trainer = Trainer(Queue(), 1, 1, 1, None)
    arguments = {
        "trainer_mode": "separate_async",
        "trainer_config": {},
        "max_off_policy_threshold": 1,
        "max_off_policy_strategy": "drop",
        "sampler_kwargs": {},
        "refill_fn": trainer._add_prompts_to_generate,
    }
    with pytest.raises(SamplerError, match=words):
        BoundedReplayBuffer(**{**arguments, **changes})

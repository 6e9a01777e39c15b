# SPDX-License-Identifier: Apache-2.0
"""Every prompt of every epoch is given once, across restarts at any point."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from remote_fakes import Rows, make_loader, make_source

from recipe.async_engine.core.columns import DATASET_INDEX
from recipe.async_engine.core.groups import Group, Prompt, PromptRef
from recipe.async_engine.core.policy import OldestReady
from recipe.async_engine.rollout.prompts import DataFailed, IndexedDataset, PromptFeed, PromptSource, sample_of

SIZE, EPOCHS = 7, 3


def take(source: PromptSource, count: int | None = None) -> list[tuple[int, int]]:
    """(epoch, index) of the next ``count`` prompts, or of all that are left."""
    taken = []
    while count is None or len(taken) < count:
        prompt = source.take()
        if prompt is None:
            break
        taken.append((prompt.epoch, prompt.index))
    return taken


def test_rows_carry_their_index_and_other_attributes_are_the_data_sets() -> None:
    rows = Rows(5)
    rows.flavour = "vanilla"
    dataset = IndexedDataset(rows)
    assert [dataset[n][DATASET_INDEX] for n in range(len(dataset))] == [0, 1, 2, 3, 4]
    assert dataset.flavour == "vanilla"
    with pytest.raises(AttributeError):
        _ = dataset.colour


def test_prompts_come_epoch_by_epoch_with_their_rows() -> None:
    source = make_source(3, epochs=2)
    assert source.prompts_left == 6
    first = source.take()
    assert first.row["raw_prompt"][0] == [{"role": "user", "content": "prompt 0"}]
    assert first.reference == PromptRef(index=0, epoch=0, uid="0-0")
    assert take(source) == [(0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert (source.prompts_left, source.take()) == (0, None)


def test_prompts_left_counts_down_to_zero() -> None:
    source = make_source(3, epochs=2, seed=1)
    left = [source.prompts_left]
    while source.take() is not None:
        left.append(source.prompts_left)
    assert left == [6, 5, 4, 3, 2, 1, 0]


def test_shuffled_epochs_have_every_prompt_in_different_orders() -> None:
    taken = take(make_source(20, epochs=2, seed=5))
    first, second = taken[:20], taken[20:]
    assert sorted(taken) == [(epoch, index) for epoch in range(2) for index in range(20)]
    assert [index for _, index in first] != [index for _, index in second]


@pytest.mark.parametrize("before", [0, 5, 6, 9])
def test_an_incomplete_last_batch_is_left_out_and_the_next_epoch_is_in_the_order_of_verls_loader(before: int) -> None:
    size, batch, epochs, seed = 8, 3, 3, 7
    loader = make_loader(size, seed, batch_size=batch, drop_last=True)
    expected = [
        (epoch, int(index)) for epoch in range(epochs) for rows in loader for index in rows[DATASET_INDEX].tolist()
    ]
    whole = PromptSource(make_loader(size, seed), epochs, epoch_prompts=6)
    assert whole.prompts_left == len(expected) == 18
    assert take(whole) == expected
    assert whole.prompts_left == 0
    first = PromptSource(make_loader(size, seed), epochs, epoch_prompts=6)
    taken = take(first, before)
    second = PromptSource(make_loader(size, seed), epochs, epoch_prompts=6)
    second.restore(first.state())
    assert second.prompts_left == 18 - before
    assert len(set(taken + take(second))) == 18


@pytest.mark.parametrize("seed", [None, 11])
@pytest.mark.parametrize("before", range(SIZE * EPOCHS + 1))
def test_restored_source_gives_exactly_the_prompts_that_were_not_taken(seed: int | None, before: int) -> None:
    first = make_source(SIZE, EPOCHS, seed)
    taken = take(first, before)
    state = first.state()
    second = make_source(SIZE, EPOCHS, seed)
    second.restore(state)
    assert second.prompts_left == SIZE * EPOCHS - before
    everything = [(epoch, index) for epoch in range(EPOCHS) for index in range(SIZE)]
    assert sorted(taken + take(second)) == everything


def test_restored_source_goes_on_in_the_order_of_the_interrupted_epoch() -> None:
    whole = take(make_source(SIZE, EPOCHS, seed=3))
    first = make_source(SIZE, EPOCHS, seed=3)
    take(first, 3)
    second = make_source(SIZE, EPOCHS, seed=3)
    second.restore(first.state())
    assert take(second, SIZE - 3) == whole[3:SIZE]


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("before", range(SIZE * EPOCHS + 1))
def test_source_that_is_saved_right_after_it_was_restored_goes_on_in_the_same_order(
    seed: int | None, before: int
) -> None:
    whole = take(make_source(SIZE, EPOCHS + 1, seed))
    state = make_source(SIZE, EPOCHS, seed)
    take(state, before)
    saved = state.state()
    for _ in range(2):
        source = make_source(SIZE, EPOCHS + 1, seed)
        source.restore(saved)
        saved = source.state()
    assert take(source, SIZE - before % SIZE) == whole[before : before + SIZE - before % SIZE]


def test_source_can_be_restored_several_times_in_a_row() -> None:
    taken: list[tuple[int, int]] = []
    state: dict[str, Any] | None = None
    for _ in range(SIZE * EPOCHS):
        source = make_source(SIZE, EPOCHS, seed=2)
        if state is not None:
            source.restore(state)
        part = take(source, 2)
        taken += part
        state = source.state()
    assert sorted(taken) == [(epoch, index) for epoch in range(EPOCHS) for index in range(SIZE)]


def test_sample_has_the_rows_own_fields_and_the_groups_name() -> None:
    prompt = make_source(3).take()
    row = {**prompt.row, "a tensor": object()}
    sample = sample_of(row, Group(9, prompt.reference, start=0))
    assert sample == {"raw_prompt": [{"role": "user", "content": "prompt 0"}], "level": np.int64(0), "uid": "0-0"}


@pytest.mark.parametrize("count", [1, 2])
def test_prompts_that_were_put_back_are_the_next_ones_also_after_a_restart(count: int) -> None:
    source = make_source(3, epochs=2)
    everything = take(make_source(3, epochs=2))
    for taken in range(0, 7 - count):
        last = [source.take() for _ in range(count)]
        source.put_back(last)
        assert source.prompts_left == 6 - taken
        again = make_source(3, epochs=2)
        again.restore(source.state())
        assert take(again) == everything[taken:]
        assert source.take() is last[0]


@pytest.mark.parametrize("put_back", [True, False])
def test_position_of_a_checkpoint_that_has_one_prompt_put_back_or_none_is_read(put_back: bool) -> None:
    source, again = make_source(3, epochs=2), make_source(3, epochs=2)
    last = [source.take() for _ in range(2)][1]
    again.restore({**source.state(), "put_back": last if put_back else None})
    assert take(again) == take(make_source(3, epochs=2))[1 if put_back else 2 :]


@pytest.mark.parametrize(
    ("signal_number", "said"),
    [
        (signal.SIGSTOP, r"within 6 s.*dataloader_num_workers.*timeouts\.prompt"),
        (signal.SIGKILL, "RuntimeError.*worker|worker process of it has died"),
    ],
)
def test_worker_process_of_a_data_loader_that_stopped_or_died_is_named(signal_number: int, said: str) -> None:
    loader = make_loader(40, num_workers=1, prefetch_factor=1)

    async def feed() -> None:
        prompts = PromptFeed(PromptSource(loader, epochs=1), timeout_s=6.0)
        await prompts.take()
        assert prompts.pop().index == 0
        (worker,) = loader._iterator._workers
        os.kill(worker.pid, signal_number)
        try:
            # What it had prepared by then comes first.
            for _ in range(4):
                await prompts.take()
                prompts.pop()
        finally:
            worker.kill()

    with pytest.raises(DataFailed, match=said):
        asyncio.run(feed())


def test_checkpoint_does_not_wait_again_for_a_loader_that_was_late_already() -> None:
    hangs = threading.Event()

    class Hanging(PromptSource):
        def take(self) -> Prompt | None:
            hangs.wait(60)
            return None

    async def feed() -> float:
        prompts = PromptFeed(Hanging(make_loader(4), epochs=1), timeout_s=2.0)
        with pytest.raises(DataFailed, match="gave no prompt within 2 s"):
            await prompts.take()
        began = time.monotonic()
        with pytest.raises(DataFailed, match="gave no prompt within 2 s"):
            async with prompts.standstill():
                pass
        hangs.set()
        return time.monotonic() - began

    assert asyncio.run(feed()) < 1.0


class Counting(PromptSource):
    """``taken``: prompts so far."""

    taken = 0

    def take(self) -> Prompt | None:
        prompt = super().take()
        self.taken += prompt is not None
        return prompt


class Failing(PromptSource):
    """Its loader has so many prompts."""

    def __init__(self, prompts: int, epochs: int = 1) -> None:
        super().__init__(make_loader(SIZE), epochs)
        self.taken, self._prompts = 0, prompts

    def take(self) -> Prompt | None:
        if self.taken == self._prompts:
            raise ValueError("a torn row")
        self.taken += 1
        return super().take()


@pytest.mark.parametrize("prompts", [0, 1, 3])
def test_prompts_that_came_before_a_loader_failed_are_given_before_it_is_said(prompts: int) -> None:
    async def feed() -> int:
        fed, given = PromptFeed(Failing(prompts), timeout_s=10.0), 0
        with pytest.raises(DataFailed, match="ValueError: a torn row"):
            while True:
                while fed.is_short:
                    await fed.take()
                assert fed.pop() is not None
                given += 1
        return given

    assert asyncio.run(feed()) == prompts


def test_some_are_taken_ahead_and_a_position_is_that_of_what_was_given() -> None:
    policy = OldestReady()
    policy.at_hand = 3
    everything = take(make_source(SIZE, EPOCHS, seed=1))

    async def feed() -> None:
        source = Counting(make_loader(SIZE, seed=1), EPOCHS)
        fed = PromptFeed(source, timeout_s=10.0, policy=policy)
        for given in range(SIZE * EPOCHS):
            while fed.is_short:
                await fed.take()
            prompt = fed.pop()
            assert (prompt.epoch, prompt.index) == everything[given]
            assert source.taken == min(given + 3, SIZE * EPOCHS)
            assert fed.left == SIZE * EPOCHS - given - 1
        assert not fed.is_short and fed.pop() is None

    asyncio.run(feed())


def test_feed_gives_every_prompt_once_and_its_position_is_that_of_what_it_gave() -> None:
    async def feed() -> list[tuple[int, int]]:
        source, given = make_source(3, epochs=2, seed=1), []
        while True:
            prompts = PromptFeed(source, timeout_s=10.0)
            assert prompts.left == 6 - len(given)
            await prompts.take()
            prompt = prompts.pop()
            if prompt is None:
                assert prompts.left == 0
                return given
            given.append((prompt.epoch, prompt.index))
            await prompts.take()
            async with prompts.standstill() as state:
                source = make_source(3, epochs=2, seed=1)
                source.restore(state)

    assert sorted(asyncio.run(feed())) == [(epoch, index) for epoch in range(2) for index in range(3)]

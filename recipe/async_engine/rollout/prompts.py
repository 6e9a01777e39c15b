# SPDX-License-Identifier: Apache-2.0
"""Prompts in the order of verl's data loader, one at a time, with a position that a checkpoint can hold.

Contract: every prompt has an identity (epoch, data set index) that is stable across restarts, and a prompt that was
taken before ``state`` was read is not given again after ``restore``, but for those that were put back. The data
loader is the user's code and may take any time, or fail: a :class:`PromptFeed` calls it beside the event loop, with a
deadline.
Shown by tests/integration/test_prompts.py.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from pebble import asynchronous
from torch.utils.data import Dataset

from recipe.async_engine.core.columns import DATASET_INDEX
from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.core.groups import Group
from recipe.async_engine.core.prompts import PromptRef

AHEAD = 16
"""Prompts that are taken from the data loader before they are needed."""


class DataFailed(RecipeError):
    """The training data gave no prompt: its loader raised, or did not answer in time."""


class IndexedDataset(Dataset):
    """A verl data set whose rows carry their index; every other attribute is the wrapped data set's."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = dict(self._dataset[index])
        row[DATASET_INDEX] = int(index)
        return row

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":
            raise AttributeError(name)
        return getattr(self._dataset, name)


class LoaderInUse:
    """What verl's trainer has in the place of its data loader, which only the feed's thread may call.

    verl's checkpoint would read the loader's position on the trainer's thread, while a prompt is taken.
    """

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Leave the loader as it is."""


@dataclass(frozen=True)
class Prompt:
    """One row of the training data: ``row`` is verl's batch of one, as the data loader collates it."""

    epoch: int
    index: int
    row: dict[str, Any]

    @property
    def reference(self) -> PromptRef:
        return PromptRef(index=self.index, epoch=self.epoch, uid=f"{self.epoch}-{self.index}")


def sample_of(row: dict[str, Any], group: Group) -> dict[str, Any]:
    """The fields of one data row as an agent loop takes them, with the group's uid; tensors stay behind."""
    sample = {key: value[0] for key, value in row.items() if isinstance(value, np.ndarray)}
    sample.pop(DATASET_INDEX, None)
    sample["uid"] = group.prompt.uid
    return sample


class PromptSource:
    """Iterates a stateful data loader (batch size 1) over ``epochs`` epochs.

    Args:
        epoch_prompts: how many prompts to give of each epoch; None for all of them.
    """

    def __init__(self, dataloader: Any, epochs: int, epoch_prompts: int | None = None) -> None:
        self._dataloader = dataloader
        self._epoch_prompts = len(dataloader) if epoch_prompts is None else epoch_prompts
        self._epochs = epochs
        self._epoch = 0
        self._taken_in_epoch = 0
        self._iterator: Iterator[dict[str, Any]] | None = None
        self._restored: dict[str, Any] | None = None
        """The data loader's state of a checkpoint, until the first prompt is taken after it."""
        self._put_back: deque[Prompt] = deque()

    @property
    def prompts_left(self) -> int:
        return self._not_taken + len(self._put_back)

    @property
    def _not_taken(self) -> int:
        return max(0, (self._epochs - self._epoch) * self._epoch_prompts - self._taken_in_epoch)

    def put_back(self, prompts: Iterable[Prompt]) -> None:
        """Have the last prompts taken, in their order, be the next ones to take."""
        self._put_back.extendleft(reversed(list(prompts)))

    def take(self) -> Prompt | None:
        """The next prompt, or None when every epoch is done."""
        if self._put_back:
            return self._put_back.popleft()
        while self._not_taken:
            if self._iterator is None:
                self._iterator = iter(self._dataloader)
            row = next(self._iterator, None)
            self._restored = None
            if row is not None and self._taken_in_epoch < self._epoch_prompts:
                self._taken_in_epoch += 1
                return Prompt(self._epoch, int(row[DATASET_INDEX][0]), row)
            # To its end, although the rest is not used: a sampler draws its next order from where it ended.
            for _ in self._iterator:
                pass
            self._iterator = None
            self._epoch += 1
            self._taken_in_epoch = 0
        return None

    def state(self) -> dict[str, Any]:
        """What :meth:`restore` needs to go on after the last prompt taken, or with those that were put back."""
        return {
            "epoch": self._epoch,
            "taken_in_epoch": self._taken_in_epoch,
            "put_back": list(self._put_back),
            "dataloader": self._restored if self._iterator is None else self._dataloader.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._epoch = state["epoch"]
        self._taken_in_epoch = state["taken_in_epoch"]
        put_back = state["put_back"]
        # Checkpoints that were written before there could be more have one, or None.
        self._put_back = deque(put_back if isinstance(put_back, list) else filter(None, [put_back]))
        self._iterator, self._restored = None, state["dataloader"]
        if self._restored is not None:
            self._dataloader.load_state_dict(self._restored)


class PromptFeed:
    """Hands a source's prompts to one event loop, which never waits for the data loader.

    Some are taken before they are asked for: :meth:`pop` gives the first, :meth:`take` has another one taken. What the
    loader fails with is raised when those are gone.

    Args:
        source: from now on only this feed calls it, on threads, one after the other; one that hangs is left behind.
        timeout_s: the data loader's deadline for one prompt, and for its position.

    Attributes:
        left: prompts that :meth:`pop` will still give.
    """

    def __init__(self, source: PromptSource, timeout_s: float) -> None:
        self.left = source.prompts_left
        self._source = source
        self._timeout_s = timeout_s
        self._ahead: deque[Prompt] = deque()
        self._late: DataFailed | None = None
        self._failed: DataFailed | None = None
        # One thing at a time, so that a position is that of a moment.
        self._lock = asyncio.Lock()

    @property
    def is_short(self) -> bool:
        """Whether another prompt should be taken."""
        there = len(self._ahead)
        return there < (AHEAD if self._failed is None else 1) and there < self.left

    def pop(self) -> Prompt | None:
        """The first prompt that was taken ahead; None if there is none."""
        if not self._ahead:
            return None
        self.left -= 1
        return self._ahead.popleft()

    async def take(self) -> None:
        """Take another prompt ahead, if one is wanted and the source has one.

        Raises:
            DataFailed: the data loader raised, or gave no prompt in time, and none is here.
        """
        async with self._lock:
            if not self.is_short:
                return
            if self._failed is not None:
                raise self._failed
            try:
                prompt = await self._do(self._source.take, "gave no prompt")
            except DataFailed as error:
                self._failed = error
                if self._ahead:
                    return
                raise
            if prompt is None:
                self.left = len(self._ahead)
            else:
                self._ahead.append(prompt)

    @asynccontextmanager
    async def standstill(self) -> AsyncIterator[dict[str, Any]]:
        """The source's state after the prompts that :meth:`pop` has given; inside, it gives none.

        Raises:
            DataFailed: the data loader raised, or did not tell in time.
        """
        async with self._lock:
            self._source.put_back(self._ahead)
            self._ahead.clear()
            yield await self._do(self._source.state, "did not tell its position")

    async def _do(self, work: Callable[[], Any], what: str) -> Any:
        if self._late is not None:
            raise self._late  # its thread hangs in the loader

        @asynchronous.thread(name="prompt-feed", daemon=True)
        def attempt() -> Any:
            try:
                return work()
            except BaseException as error:  # a data set may raise anything
                raise DataFailed(f"the training data's loader {what}: {type(error).__name__}: {error}") from error

        try:
            async with asyncio.timeout(self._timeout_s):
                return await attempt()
        except TimeoutError:
            self._late = DataFailed(
                f"the training data's loader {what} within {self._timeout_s:g} s; look at the data set and at its "
                "worker processes (data.dataloader_num_workers), or raise async_training.timeouts.prompt"
            )
            raise self._late from None

# SPDX-License-Identifier: Apache-2.0
"""Gives prompts in the order of verl's data loader, one at a time, with a position that a checkpoint can hold.

Contract: every prompt has an identity (epoch, data set index) that is the same after a restart. A prompt that was taken
before ``state`` was read is not given again after ``restore``, except for those that were put back. The data loader is
the user's code, which may take any time or fail. Therefore a :class:`PromptFeed` calls it on another thread than the
event loop's, with a deadline.

Shown by tests/integration/test_prompts.py.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import torch
from pebble import asynchronous
from ray import cloudpickle
from torch.utils.data import Dataset

from recipe.async_engine.core.columns import ARGUMENTS, DATASET_INDEX, FAILURE
from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.core.groups import Group, Prompt
from recipe.async_engine.core.plain import told
from recipe.async_engine.core.policy import AdmissionPolicy, OldestReady, chosen_prompt

logger = logging.getLogger(__name__)


class DataFailed(RecipeError):
    """The training data gave no prompt, because its loader raised or did not answer in time."""


class PromptFailed(RecipeError):
    """The data set gave no usable row for one prompt."""


class IndexedDataset(Dataset):
    """A data set with verl's interface, in which a faulty row costs only its own prompt.

    If a row cannot be read, or cannot be sent to another process, the row has the field `FAILURE` with the reason
    instead. A null field gets its default, as if the field were missing, because joined files have nulls for columns
    that one of them lacks. Every other attribute is the wrapped data set's.

    Args:
        dataset: the data set to wrap.
        defaults: the value of a null field, by the field's name.
        is_indexed: whether the rows carry their index.
    """

    def __init__(self, dataset: Any, defaults: Mapping[str, Any] | None = None, is_indexed: bool = True) -> None:
        self._dataset = dataset
        self._defaults = {} if defaults is None else dict(defaults)
        self._is_indexed = is_indexed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            row = self._row(index)
        except (Exception, SystemExit) as error:  # a data set may raise anything
            row = {FAILURE: f"row {index} of the data set: {told(error)}"}
        if self._is_indexed:
            row[DATASET_INDEX] = int(index)
        return row

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return several rows, as torch's loader asks for a batch."""
        return [self[index] for index in indices]

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def _row(self, index: int) -> dict[str, Any]:
        several = getattr(self._dataset, "__getitems__", None)
        found = self._dataset[index] if several is None else several([index])[0]
        if not isinstance(found, Mapping):
            raise TypeError(f"a row must be a mapping of fields, and is {type(found).__name__}")
        row = {name: self._defaults.get(name) if value is None else value for name, value in found.items()}
        if wrong := [name for name in row if not isinstance(name, str)]:
            raise TypeError(f"fields must have names, and one is {wrong[0]!r}")
        if taken := ARGUMENTS & row.keys():
            raise ValueError(f"agent loops have an argument of the name of its field {min(taken)}: rename it")
        if "raw_prompt" not in row:
            raise KeyError(f"there is no raw_prompt among its fields ({', '.join(row)}), which agent loops are given")
        # The row is sent to other processes and written into checkpoints.
        cloudpickle.loads(cloudpickle.dumps({k: v for k, v in row.items() if not isinstance(v, torch.Tensor)}))
        return row


def collate(rows: Sequence[dict[str, Any]], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return verl's batch of these rows: stacked tensors if all rows have one of the same shape, otherwise objects.

    Unlike verl's function, it accepts rows with different fields. A row that lacks a field gets the default, or None.
    Failed rows are left out unless all rows have failed.
    """
    lost = [row[FAILURE] for row in rows if FAILURE in row]
    if lost and DATASET_INDEX not in rows[0]:  # the scheduler reports lost training prompts
        logger.error("%d of %d rows of the data are left out, the first: %s", len(lost), len(rows), lost[0])
    rows = [row for row in rows if FAILURE not in row] or rows
    batch: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values: list[Any] = [row.get(name, defaults.get(name)) for row in rows]
        if all(isinstance(value, torch.Tensor) for value in values) and len({value.shape for value in values}) == 1:
            batch[name] = torch.stack(values)
        else:
            batch[name] = np.fromiter(values, dtype=object, count=len(values))
    if not any(isinstance(column, torch.Tensor) for column in batch.values()):
        # verl's batches have at least one tensor.
        batch["dummy_tensor"] = torch.zeros((len(rows), 1), dtype=torch.uint8)
    return batch


class UsableBatches:
    """A loader of validation batches that skips batches in which every row has failed."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the usable batches; raise PromptFailed if the data set has no usable row at all."""
        given, failed = 0, None
        for batch in self._loader:
            failed = failed or failure_of(batch)
            if FAILURE not in batch:
                given += 1
                yield batch
        if failed is not None and not given:
            raise failed


class LoaderInUse:
    """Stands for the data loader in verl's trainer, because only the feed's thread may call the real one.

    Otherwise verl's checkpoint would read the loader's position on the trainer's thread while a prompt is taken.
    """

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""


def failure_of(row: Mapping[str, Any]) -> PromptFailed | None:
    """Return why a prompt cannot be answered, or None if its row is usable."""
    return PromptFailed(str(row[FAILURE][0])) if FAILURE in row else None


def sample_of(row: dict[str, Any], group: Group) -> dict[str, Any]:
    """Return the fields of one data row as an agent loop takes them, without tensors and with the group's uid."""
    sample = {key: value[0] for key, value in row.items() if isinstance(value, np.ndarray)}
    sample.pop(DATASET_INDEX, None)
    sample["uid"] = group.prompt.uid
    return sample


class PromptSource:
    """Iterates over a stateful data loader (batch size 1) for ``epochs`` epochs.

    Args:
        dataloader: the data loader.
        epochs: the number of epochs.
        epoch_prompts: how many prompts of each epoch are given. None gives all of them.
    """

    def __init__(self, dataloader: Any, epochs: int, epoch_prompts: int | None = None) -> None:
        self._dataloader = dataloader
        self._epoch_prompts = len(dataloader) if epoch_prompts is None else epoch_prompts
        self._epochs = epochs
        self._epoch = 0
        self._taken_in_epoch = 0
        self._iterator: Iterator[dict[str, Any]] | None = None
        self._restored: dict[str, Any] | None = None
        """The data loader's state from a checkpoint, until the first prompt is taken after it."""
        self._put_back: deque[Prompt] = deque()

    @property
    def prompts_left(self) -> int:
        return self._not_taken + len(self._put_back)

    @property
    def _not_taken(self) -> int:
        return max(0, (self._epochs - self._epoch) * self._epoch_prompts - self._taken_in_epoch)

    def put_back(self, prompts: Iterable[Prompt]) -> None:
        """Give the prompts that were taken last once more, in their order."""
        self._put_back.extendleft(reversed(list(prompts)))

    def take(self) -> Prompt | None:
        """Return the next prompt, or None when every epoch is done."""
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
            # Read the iterator to its end, because a sampler draws the next order from where this one ended.
            for _ in self._iterator:
                pass
            self._iterator = None
            self._epoch += 1
            self._taken_in_epoch = 0
        return None

    def state(self) -> dict[str, Any]:
        """Return what :meth:`restore` needs to continue after the last prompt taken."""
        return {
            "epoch": self._epoch,
            "taken_in_epoch": self._taken_in_epoch,
            "put_back": list(self._put_back),
            "dataloader": self._restored if self._iterator is None else self._dataloader.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state that :meth:`state` returned."""
        self._epoch = state["epoch"]
        self._taken_in_epoch = state["taken_in_epoch"]
        put_back = state["put_back"]
        # Checkpoints of earlier versions have one prompt, or None.
        self._put_back = deque(put_back if isinstance(put_back, list) else filter(None, [put_back]))
        self._iterator, self._restored = None, state["dataloader"]
        if self._restored is not None:
            self._dataloader.load_state_dict(self._restored)


class PromptFeed:
    """Hands a source's prompts to one event loop, which never waits for the data loader.

    Some prompts are taken before they are needed: :meth:`pop` returns one of them, and :meth:`take` takes another one
    from the source. An error of the loader is raised when these prompts are used up.

    Args:
        source: the source of prompts. From now on only this feed calls it, on threads, one call after the other. A call
            that hangs is abandoned.
        timeout_s: the data loader's deadline for one prompt, and for its position.
        policy: chooses among the prompts that were taken before they are needed.

    Attributes:
        left: the number of prompts that :meth:`pop` will still return.
    """

    def __init__(self, source: PromptSource, timeout_s: float, policy: AdmissionPolicy | None = None) -> None:
        self._policy = policy or OldestReady()
        self.left = source.prompts_left
        self._source = source
        self._timeout_s = timeout_s
        self._ahead: deque[Prompt] = deque()
        self._late: DataFailed | None = None
        self._failed: DataFailed | None = None
        # One call at a time, so that a position belongs to one moment.
        self._lock = asyncio.Lock()

    @property
    def is_short(self) -> bool:
        """Whether another prompt should be taken from the source."""
        there = len(self._ahead)
        return there < (max(1, self._policy.at_hand) if self._failed is None else 1) and there < self.left

    def pop(self) -> Prompt | None:
        """Return the prompt that the policy chooses among those at hand, or None if it chooses none."""
        place = chosen_prompt(self._policy, tuple(self._ahead)) if self._ahead else None
        if place is None:
            return None
        self.left -= 1
        prompt = self._ahead[place]
        del self._ahead[place]
        return prompt

    async def take(self) -> None:
        """Take another prompt from the source, if one is wanted and the source has one.

        Raises:
            DataFailed: the data loader raised or gave no prompt in time, and no prompt is at hand.
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
        """Return the source's state after the prompts that :meth:`pop` has returned, and take no prompt meanwhile.

        Raises:
            DataFailed: the data loader raised, or did not tell its position in time.
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
                # If a worker process died while it sent tensors, torch only raises one of these errors.
                died = " (a worker process of it has died)" if isinstance(error, EOFError | ConnectionError) else ""
                raise DataFailed(f"the training data's loader {what}{died}: {told(error)}") from error

        try:
            async with asyncio.timeout(self._timeout_s):
                return await attempt()
        except TimeoutError:
            self._late = DataFailed(
                f"the training data's loader {what} within {self._timeout_s:g} s; look at the data set and at its "
                "worker processes (data.dataloader_num_workers), or raise async_training.timeouts.prompt"
            )
            raise self._late from None

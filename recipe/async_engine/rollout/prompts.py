# SPDX-License-Identifier: Apache-2.0
"""Reads prompts one at a time from verl's data loader, in the data loader's order, and stores the position in the data.

Contract: every prompt has an identity (epoch, data set index) that is the same after a restart. After
:meth:`PromptSource.restore`, the prompts that had been taken when the state was stored are not returned again, unless
they had been put back. The data loader runs users' code, which may fail or take any time, so :class:`PromptFeed` calls
it with a deadline, on a separate thread. Shown by tests/integration/test_prompts.py.
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

ROLLOUT_N = "__rollout_n__"
"""Column with a prompt's own number of trajectories, which overrides ``rollout.n`` as in verl's v1 trainers."""


class DataFailed(RecipeError):
    """The data loader of the training data raised an error, or did not return in time."""


class PromptFailed(RecipeError):
    """A row of the data set cannot be used as a prompt, or the whole data set has no usable row."""


class IndexedDataset(Dataset):
    """A wrapper of verl's data set with which a faulty row makes only its own prompt fail.

    A row that cannot be read, or cannot be sent to another process, is replaced by a row whose field `FAILURE` has the
    reason. A null in a field is replaced by the field's default: if a data set has several files, a row has nulls in
    the columns that its file lacks. All other attributes are those of the wrapped data set.

    Args:
        defaults: the defaults of fields, by the field's name.
        is_indexed: whether each row gets its index in the field `DATASET_INDEX`.
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
        """Return several rows, for torch's data loader, which calls this method to get a batch."""
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
            raise TypeError(f"the names of a row's fields must be strings, and one is {wrong[0]!r}")
        if taken := ARGUMENTS & row.keys():
            raise ValueError(f"the row's field {min(taken)} has the name of an argument of agent loops: rename it")
        if "raw_prompt" not in row:
            raise KeyError(f"the row has no field raw_prompt for agent loops, only {', '.join(row)}")
        # Check that the row can be pickled, because it is sent to other processes and written into checkpoints.
        cloudpickle.loads(cloudpickle.dumps({k: v for k, v in row.items() if not isinstance(v, torch.Tensor)}))
        return row


def collate(rows: Sequence[dict[str, Any]], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Join rows into a batch in the form of verl's own ``collate_fn``.

    A field becomes a stacked tensor if all rows have tensors of one shape, and otherwise an array of objects. Rows may
    have different fields, which verl's function does not allow: a missing field gets its default, or None. Rows with
    the field `FAILURE` are left out, unless all rows have it.
    """
    lost = [row[FAILURE] for row in rows if FAILURE in row]
    # Rows without an index are validation data. The scheduler reports unusable rows of training data.
    if lost and DATASET_INDEX not in rows[0]:
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
        # verl's batches need at least one tensor.
        batch["dummy_tensor"] = torch.zeros((len(rows), 1), dtype=torch.uint8)
    return batch


class UsableBatches:
    """A loader of validation batches that skips batches without a usable row."""

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
    """Takes the place of the data loader in verl's trainer: only the prompt feed's thread may call the real one.

    With the real data loader, verl would read the position in the data when it saves a checkpoint, possibly while
    that thread is taking a prompt.
    """

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing, because ``state`` comes from `state_dict`, which returns an empty mapping."""


def failure_of(row: Mapping[str, Any]) -> PromptFailed | None:
    """Return the error of a row or batch that could not be read, or None if it is usable."""
    return PromptFailed(str(row[FAILURE][0])) if FAILURE in row else None


def group_size(row: Mapping[str, Any], usual: int) -> int:
    """Return a prompt's number of trajectories: the row's value of `ROLLOUT_N`, or ``usual`` if it has none.

    Raises:
        PromptFailed: the value of the column is not a whole number of at least 1.
    """
    asked = row[ROLLOUT_N][0] if ROLLOUT_N in row else None
    # In a column of numbers, NaN stands for a missing number.
    if asked is None or (isinstance(asked, float | np.floating) and np.isnan(asked)):
        return usual
    if isinstance(asked, int | float | np.number) and asked >= 1 and asked % 1 == 0:
        return int(asked)
    raise PromptFailed(f"the data's column {ROLLOUT_N} has {asked!r}, which is not a whole number of at least 1")


def sample_of(row: dict[str, Any], group: Group) -> dict[str, Any]:
    """Return the input of an agent loop: the prompt's uid, and the fields of ``row`` except tensors and the index."""
    sample = {key: value[0] for key, value in row.items() if isinstance(value, np.ndarray)}
    sample.pop(DATASET_INDEX, None)
    sample["uid"] = group.prompt.uid
    return sample


class PromptSource:
    """Takes prompts from a stateful data loader of batch size 1 for ``epochs`` epochs.

    An epoch has ``epoch_prompts`` prompts; None means all prompts of the data loader.
    """

    def __init__(self, dataloader: Any, epochs: int, epoch_prompts: int | None = None) -> None:
        self._dataloader = dataloader
        self._epoch_prompts = len(dataloader) if epoch_prompts is None else epoch_prompts
        self._epochs = epochs
        self._epoch = 0
        self._taken_in_epoch = 0
        self._iterator: Iterator[dict[str, Any]] | None = None
        self._restored: dict[str, Any] | None = None
        """The data loader's state that `restore` got from a checkpoint, until a prompt is taken; otherwise None."""
        self._put_back: deque[Prompt] = deque()

    @property
    def prompts_left(self) -> int:
        return self._not_taken + len(self._put_back)

    @property
    def _not_taken(self) -> int:
        return max(0, (self._epochs - self._epoch) * self._epoch_prompts - self._taken_in_epoch)

    def put_back(self, prompts: Iterable[Prompt]) -> None:
        """Put back the prompts that were taken last, so that they are returned again in the same order."""
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
            # Read the iterator to its end, because the sampler's random state at the end of an epoch decides the order
            # of the next epoch.
            for _ in self._iterator:
                pass
            self._iterator = None
            self._epoch += 1
            self._taken_in_epoch = 0
        return None

    def state(self) -> dict[str, Any]:
        """Return the position after the last prompt that was taken, for :meth:`restore`."""
        return {
            "epoch": self._epoch,
            "taken_in_epoch": self._taken_in_epoch,
            "put_back": list(self._put_back),
            "dataloader": self._restored if self._iterator is None else self._dataloader.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the position that :meth:`state` returned, possibly in an earlier run."""
        self._epoch = state["epoch"]
        self._taken_in_epoch = state["taken_in_epoch"]
        put_back = state["put_back"]
        # Checkpoints of earlier versions of this package have a single prompt or None here, instead of a list.
        self._put_back = deque(put_back if isinstance(put_back, list) else filter(None, [put_back]))
        self._iterator, self._restored = None, state["dataloader"]
        if self._restored is not None:
            self._dataloader.load_state_dict(self._restored)


class PromptFeed:
    """A buffer of prompts for an event loop, which must not block on the data loader.

    :meth:`take` adds a prompt from the source to the buffer, and :meth:`pop` removes one. After an error of the data
    loader the buffered prompts are still returned before :meth:`take` raises the error.

    Args:
        source: the source of prompts, which only this feed may use. The feed calls it on another thread, one call at a
            time. A call that hangs is abandoned.
        timeout_s: seconds within which the data loader has to return a prompt, or its position in the data.
        policy: the admission policy, which chooses among the buffered prompts.

    Attributes:
        left: number of prompts that :meth:`pop` has not returned yet, in all remaining epochs.
    """

    def __init__(self, source: PromptSource, timeout_s: float, policy: AdmissionPolicy | None = None) -> None:
        self._policy = policy or OldestReady()
        self.left = source.prompts_left
        self._source = source
        self._timeout_s = timeout_s
        self._ahead: deque[Prompt] = deque()
        self._late: DataFailed | None = None
        self._failed: DataFailed | None = None
        # Held while a prompt is taken and while the position is read, so that these do not overlap.
        self._lock = asyncio.Lock()

    @property
    def is_short(self) -> bool:
        """Whether the buffer should get another prompt from the source."""
        there = len(self._ahead)
        return there < (max(1, self._policy.at_hand) if self._failed is None else 1) and there < self.left

    def pop(self) -> Prompt | None:
        """Remove and return the buffered prompt that the admission policy chooses, or None if it chooses no prompt."""
        place = chosen_prompt(self._policy, tuple(self._ahead)) if self._ahead else None
        if place is None:
            return None
        self.left -= 1
        prompt = self._ahead[place]
        del self._ahead[place]
        return prompt

    async def take(self) -> None:
        """Add a prompt from the source to the buffer, if the buffer `is_short` and the source has a prompt.

        Raises:
            DataFailed: the data loader raised or returned no prompt in time, and the buffer is empty.
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
        """Yield the state of the source, as if only the prompts that :meth:`pop` has returned had been taken from it.

        No prompt is taken from the source during the ``async with`` block.

        Raises:
            DataFailed: the data loader raised, or did not return its position in time.
        """
        async with self._lock:
            self._source.put_back(self._ahead)
            self._ahead.clear()
            yield await self._do(self._source.state, "did not tell its position")

    async def _do(self, work: Callable[[], Any], what: str) -> Any:
        if self._late is not None:
            raise self._late  # the thread of an earlier call hangs in the data loader

        @asynchronous.thread(name="prompt-feed", daemon=True)
        def attempt() -> Any:
            try:
                return work()
            except BaseException as error:  # a data set may raise anything
                # torch raises one of these errors if a worker process of the data loader died while sending tensors.
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

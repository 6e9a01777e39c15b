# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Prompts in the order of verl's data loader, one at a time, with a position that a checkpoint can hold.

Contract: every prompt has an identity (epoch, data set index) that is stable across restarts, and a prompt that was
taken before ``state`` was read is not given again after ``restore``. Shown by tests/integration/test_prompts.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from recipe.async_engine.core.groups import Group
from recipe.async_engine.core.prompts import PromptRef

DATASET_INDEX = "dataset_index"


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


@dataclass(frozen=True)
class Prompt:
    """One row of the training data.

    Attributes:
        epoch: how often the data set had been gone through before.
        index: row of the data set.
        row: verl's batch of one, as the data loader collates it.
    """

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

    @property
    def exhausted(self) -> bool:
        return self._epoch >= self._epochs

    @property
    def prompts_left(self) -> int:
        return max(0, (self._epochs - self._epoch) * self._epoch_prompts - self._taken_in_epoch)

    def take(self) -> Prompt | None:
        """The next prompt, or None when every epoch is done."""
        while not self.exhausted:
            if self._iterator is None:
                self._iterator = iter(self._dataloader)
            row = next(self._iterator, None)
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
        """What :meth:`restore` needs to go on after the last prompt taken."""
        started = self._taken_in_epoch > 0
        return {
            "epoch": self._epoch,
            "taken_in_epoch": self._taken_in_epoch,
            "dataloader": self._dataloader.state_dict() if started else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._epoch = state["epoch"]
        self._taken_in_epoch = state["taken_in_epoch"]
        self._iterator = None
        if state["dataloader"] is not None:
            self._dataloader.load_state_dict(state["dataloader"])
        if self._taken_in_epoch >= self._epoch_prompts:
            # To its end, as `take` does: the next epoch's order is the one that it would have had.
            for _ in self._dataloader:
                pass
            self._epoch += 1
            self._taken_in_epoch = 0

# SPDX-License-Identifier: Apache-2.0
"""Data sets as users write them, good and bad, for `data.custom_cls`; each class is one."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset
from verl.utils.dataset.rl_dataset import RLHFDataset

SIZE, BAD = 24, 3
"""Number of rows of a hostile data set, every `BAD`-th of which is bad."""


def good(index: int) -> dict[str, Any]:
    return {
        "raw_prompt": [{"role": "user", "content": f"sort {index % 10}"}],
        "data_source": "s",
        "reward_model": {"ground_truth": "1"},
        "dummy_tensor": torch.tensor([0], dtype=torch.uint8),
    }


class Good(Dataset):
    """A data set that creates its rows itself."""

    def __init__(
        self, data_files: Any, tokenizer: Any, config: Any, processor: Any = None, max_samples: int = -1
    ) -> None:
        self.config = config

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < SIZE:
            raise IndexError(index)
        return self.spoilt(index) if index % BAD == 0 else good(index)

    def spoilt(self, index: int) -> Any:
        return good(index)


# Data sets that work


class Several(Good):
    """Returns several rows at once, like the data sets of Hugging Face."""

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("torch asks for several where it can")

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [good(index) for index in indices]


class OfSubset(Subset):
    """The second half of verl's data set."""

    def __init__(
        self, data_files: Any, tokenizer: Any, config: Any, processor: Any = None, max_samples: int = -1
    ) -> None:
        rows = RLHFDataset(data_files, tokenizer, config, processor, max_samples)
        super().__init__(rows, range(len(rows) // 2, len(rows)))


class OfTwo(ConcatDataset):
    """verl's data set, twice."""

    def __init__(
        self, data_files: Any, tokenizer: Any, config: Any, processor: Any = None, max_samples: int = -1
    ) -> None:
        super().__init__([RLHFDataset(data_files, tokenizer, config, processor, max_samples) for _ in range(2)])


class Optional(Good):
    """A field that some rows have and that is null in others."""

    def spoilt(self, index: int) -> Any:
        return {**good(index), "level": 3 if index % 2 else None, "agent_name": None, "tools_kwargs": None}


class Tensors(Good):
    """Tensors of other types and shapes, in some rows."""

    def spoilt(self, index: int) -> Any:
        return {**good(index), "embedding": torch.zeros(index + 1, dtype=torch.float16), "mask": torch.tensor(True)}


class Arrays(Good):
    def spoilt(self, index: int) -> Any:
        return {
            **good(index),
            "scores": np.arange(index),
            "scalar": np.float32(1.5),
            "when": np.datetime64("2026-01-01"),
        }


class OfTheBatch(Good):
    """Fields with the names of columns of a training batch."""

    def spoilt(self, index: int) -> Any:
        return {**good(index), "responses": "a", "values": [1], "multi_modal_inputs": "x", "prompts": None}


class NamedAsVerlsOwn(Good):
    """Fields with names of arguments in calls between data and agent loop, which are passed on separately."""

    def spoilt(self, index: int) -> Any:
        return {**good(index), "output": "x", "validate": 1, "trace": None, "trajectory": "y", "trainer_config": 3}


class Lambda(Good):
    def spoilt(self, index: int) -> Any:
        return {**good(index), "check": lambda answer: answer == str(index)}


class Own:
    """An object of a class from the user's file."""

    def __init__(self, index: int) -> None:
        self.index = index


class OwnObjects(Good):
    def spoilt(self, index: int) -> Any:
        return {**good(index), "own": Own(index)}


class Large(Good):
    def spoilt(self, index: int) -> Any:
        return {**good(index), "blob": b"x" * 3_000_000}


class Prints(Good):
    def spoilt(self, index: int) -> Any:
        sys.stdout.write(f"row {index}\n")
        sys.stderr.write(f"row {index}\n")
        return good(index)


class Forks(Good):
    def spoilt(self, index: int) -> Any:
        pid = os.fork()
        if not pid:
            os._exit(3)
        os.waitpid(pid, 0)
        return good(index)


class Runs(Good):
    def spoilt(self, index: int) -> Any:
        subprocess.run([sys.executable, "-c", "raise SystemExit(2)"], check=False)
        return good(index)


class Reseeds(Good):
    """Reseeds the global random generators."""

    def spoilt(self, index: int) -> Any:
        random.seed(0)
        np.random.seed(0)
        return good(index)


class LongerThanSaid(Good):
    def __len__(self) -> int:
        return SIZE - 4


class KeyedByMapping(Good):
    """Rows that are a mapping but not a dict."""

    def spoilt(self, index: int) -> Any:
        from collections import UserDict

        return UserDict(good(index))


class Threads(Good):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.lock = threading.Lock()

    def spoilt(self, index: int) -> Any:
        with self.lock:
            return good(index)


# Data sets that fail only their own prompts, with these messages


class Unpicklable(Exception):
    """An exception that can be pickled but not unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class BadWords(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class ShorterThanSaid(Good):
    words = "IndexError"

    def __len__(self) -> int:
        return SIZE + 8


class Raises(Good):
    words = "ValueError: row 0 is torn"

    def spoilt(self, index: int) -> Any:
        raise ValueError(f"row {index} is torn")


class RaisesItsOwn(Good):
    words = "Unpicklable: one and two"

    def spoilt(self, index: int) -> Any:
        raise Unpicklable("one", "two")


class RaisesWithoutWords(Good):
    words = "BadWords"

    def spoilt(self, index: int) -> Any:
        raise BadWords


class RaisesWithManyWords(Good):
    words = "RuntimeError: xxx"

    def spoilt(self, index: int) -> Any:
        raise RuntimeError("x" * 5_000_000)


class RaisesAKey(Good):
    words = "KeyError: 'answer'"

    def spoilt(self, index: int) -> Any:
        return {}["answer"]


class StopsIteration(Good):
    words = "StopIteration"

    def spoilt(self, index: int) -> Any:
        return next(iter(()))


class Asserts(Good):
    words = "AssertionError: no image"

    def spoilt(self, index: int) -> Any:
        raise AssertionError("no image")


class Exits(Good):
    words = "SystemExit: 5"

    def spoilt(self, index: int) -> Any:
        sys.exit(5)


class Recurses(Good):
    words = "RecursionError"

    def spoilt(self, index: int) -> Any:
        return self.spoilt(index)


class OutOfMemory(Good):
    words = "MemoryError"

    def spoilt(self, index: int) -> Any:
        raise MemoryError("of the GPU")


class NotThere(Good):
    words = "FileNotFoundError"

    def spoilt(self, index: int) -> Any:
        return {**good(index), "image": open("/no/such/image.png", "rb").read()}


class GivesNone(Good):
    words = "TypeError: a row must be a mapping of fields, and is NoneType"

    def spoilt(self, index: int) -> Any:
        return None


class GivesAList(Good):
    words = "a row must be a mapping of fields, and is list"

    def spoilt(self, index: int) -> Any:
        return list(good(index).items())


class GivesText(Good):
    words = "a row must be a mapping of fields, and is str"

    def spoilt(self, index: int) -> Any:
        return "sort 1"


class GivesATensor(Good):
    words = "a row must be a mapping of fields, and is Tensor"

    def spoilt(self, index: int) -> Any:
        return torch.zeros(3)


class WithoutPrompt(Good):
    words = "the row has no field raw_prompt for agent loops, only prompt, data_source"

    def spoilt(self, index: int) -> Any:
        return {"prompt": "sort 1", "data_source": "s"}


class NumbersForNames(Good):
    words = "the names of a row's fields must be strings, and one is 7"

    def spoilt(self, index: int) -> Any:
        return {**good(index), 7: "x"}


class NamedSamplingParams(Good):
    words = "the row's field sampling_params has the name of an argument of agent loops"

    def spoilt(self, index: int) -> Any:
        return {**good(index), "sampling_params": {"temperature": 0.1}}


class WithALock(Good):
    words = "cannot pickle '_thread.lock' object"

    def spoilt(self, index: int) -> Any:
        return {**good(index), "lock": threading.Lock()}


class WithAGenerator(Good):
    words = "cannot pickle 'generator' object"

    def spoilt(self, index: int) -> Any:
        return {**good(index), "rows": (number for number in range(3))}


class WithWhatDoesNotUnpickle(Good):
    words = "missing 1 required positional argument"

    def spoilt(self, index: int) -> Any:
        return {**good(index), "why": Unpicklable("one", "two")}


class ItselfInItself(Good):
    words = "recursion"

    def spoilt(self, index: int) -> Any:
        nested: list[Any] = []
        for _ in range(20_000):
            nested = [nested]
        return {**good(index), "nested": nested}


# Data sets that end the start, with these messages


class EndsInInit(Good):
    ends = "Creating the data set raises RuntimeError: no licence"

    def __init__(self, *arguments: Any, **named: Any) -> None:
        raise RuntimeError("no licence")


class ExitsInInit(Good):
    ends = "Creating the data set raises SystemExit: 1"

    def __init__(self, *arguments: Any, **named: Any) -> None:
        sys.exit(1)


class TakesNothing(Dataset):
    ends = "got an unexpected keyword argument"

    def __init__(self) -> None: ...


class Streams(IterableDataset):
    ends = "An IterableDataset has no rows to go back to"

    def __init__(
        self, data_files: Any, tokenizer: Any, config: Any, processor: Any = None, max_samples: int = -1
    ) -> None: ...

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from map(good, range(SIZE))


class WithoutLength(Dataset):
    ends = "Its len() raises TypeError"

    def __init__(
        self, data_files: Any, tokenizer: Any, config: Any, processor: Any = None, max_samples: int = -1
    ) -> None: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        return good(index)


class LengthRaises(Good):
    ends = "Its len() raises OSError: gone"

    def __len__(self) -> int:
        raise OSError("gone")


class LengthBelowZero(Good):
    ends = "Its len() raises ValueError"

    def __len__(self) -> int:
        return -1


class LengthOfText(Good):
    ends = "Its len() raises TypeError"

    def __len__(self) -> Any:
        return "many"


class Empty(Good):
    ends = "has 0 prompts"

    def __len__(self) -> int:
        return 0


class TooFew(Good):
    ends = "has 2 prompts"

    def __len__(self) -> int:
        return 2


class NoneAtAll(Good):
    ends = "ValueError: torn"

    def __getitem__(self, index: int) -> Any:
        raise ValueError("torn")


class TextForPrompts(Good):
    ends = "One of the first is str, 'sort 1'"

    def __getitem__(self, index: int) -> Any:
        return {**good(index), "raw_prompt": "sort 1"}


class NoDataset:
    ends = "must inherit from torch.utils.data.Dataset"


class MessagesOfText(Good):
    ends = "It raises"

    def __getitem__(self, index: int) -> Any:
        return {**good(index), "raw_prompt": ["sort 1"]}


class TooLong(Good):
    ends = "Raise data.max_prompt_length"

    def __getitem__(self, index: int) -> Any:
        return {**good(index), "raw_prompt": [{"role": "user", "content": "sort 1 " * 500}]}

# SPDX-License-Identifier: Apache-2.0
"""The next weights beside the live ones, in whatever process holds a part of the model.

Contract: until :meth:`StagedWeights.swap` nothing of the live weights changes, and after it nothing of the old ones is
left. A stream that is cut off, lacks a part of the model, or has something that the model does not take is refused
with an error that names the tensor; the next one starts afresh. Staging needs no part of the live weights, so they go
on computing.

What differs is in the subclasses: `recipe.async_engine.engines.vllm.staged_model` is vLLM's model, `staged_adapter` a
LoRA adapter in vLLM, `recipe.async_engine.log_prob_servers.adapter` one rank of a training engine. How a stream
gets into them, and what becomes of its errors, is `Intake`'s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.weights.checksum import StreamChecksum

NamedTensors = Sequence[tuple[str, torch.Tensor]]


class StagingRefused(RecipeError):
    """The staged weights cannot become the live ones; those stay as they are."""


class StagedWeights(ABC):
    """See the module's contract. One thread at a time calls it."""

    version: int | None = None
    """Of the staged weights, once they are complete."""

    @torch.no_grad()
    def begin(self) -> None:
        """A stream starts; whatever was staged before and not swapped in is dropped."""
        self.version = None
        self._begin()

    @torch.no_grad()
    def load(self, weights: NamedTensors) -> None:
        """Take tensors of the stream, which are valid during this call only; raises what they are refused with."""
        self._load(weights)

    @torch.no_grad()
    def complete(self, version: int, problem: str | None = None) -> None:
        """The stream has ended.

        Args:
            version: of the weights that came.
            problem: what went wrong with them here, if anything did.

        Raises:
            StagingRefused: something did, here or on another rank, or a part of the model never came.
        """
        problem = self._agreed(problem or self._lack())
        if problem is not None:
            raise StagingRefused(f"version {version} was refused, the old weights stay: {problem}")
        self._derive()
        self.version = version

    @torch.no_grad()
    def swap(self, version: int) -> None:
        """Make the staged weights the live ones. Nothing may be computed meanwhile.

        Raises:
            StagingRefused: this version is not staged as a whole.
        """
        if self.version != version:
            raise StagingRefused(f"version {version} is not staged; {self.version} is")
        self.version = None
        self._swap()

    @abstractmethod
    def _begin(self) -> None: ...

    @abstractmethod
    def _load(self, weights: NamedTensors) -> None: ...

    @abstractmethod
    def _lack(self) -> str | None:
        """What has not come of the model, or cannot be used; None if it is whole."""

    def _agreed(self, problem: str | None) -> str | None:
        """The problem of all ranks that have to stage alike; None if none of them has any."""
        return problem

    def _derive(self) -> None:  # noqa: B027, most have nothing to derive
        """Do what can be done with the staged weights before the swap."""

    @abstractmethod
    def _swap(self) -> None: ...


class Intake:
    """One stream of weights on its way to where it is staged.

    The first thing that goes wrong is its `problem`; the rest of the stream is let pass, since whoever sends goes
    through it to the end, and others may read it too.
    """

    def __init__(self, staged: StagedWeights, version: int) -> None:
        self._staged, self._version = staged, version
        self._sums = StreamChecksum()
        # Not the error itself, whose traceback would keep the memory that the stream came through.
        self.problem: str | None = None
        self.checksum = ""
        """Of what was loaded, once it is complete."""

    def begin(self) -> None:
        """The stream starts."""
        self._unless_failed(self._staged.begin)

    def take(self, weights: NamedTensors) -> None:
        """Load tensors of the stream, which are valid during this call only."""
        self._unless_failed(lambda: self._load(weights))

    def _load(self, weights: NamedTensors) -> None:
        for name, tensor in weights:
            self._sums.add(name, tensor)
        self._staged.load(weights)

    def fail(self, error: Exception) -> None:
        """The stream has broken."""
        if self.problem is None:
            self.problem = str(error) if isinstance(error, RecipeError) else f"{type(error).__name__}: {error}"

    def end(self) -> None:
        """The stream is over: it is staged as a whole, with its checksum, or there is a `problem`."""
        try:
            self._staged.complete(self._version, self.problem)
            self.checksum = self._sums.value()
        except Exception as error:  # of whatever kind, it is this stream's outcome
            self.problem = None
            self.fail(error)

    def _unless_failed(self, work: Callable[[], None]) -> None:
        if self.problem is None:
            try:
                work()
            except Exception as error:  # of whatever kind, it is this stream's outcome
                self.fail(error)

# SPDX-License-Identifier: Apache-2.0
"""Staging of the next weights beside the live ones, in any process that holds a part of the model.

Contract: until :meth:`StagedWeights.swap` the live weights do not change, and after it nothing of the old ones is left.
A stream that is cut off, lacks a part of the model, or contains something that the model does not accept is refused
with an error that names the tensor; the next stream starts afresh. Staging does not use the live weights, so
computation with them goes on.

Subclasses implement it for vLLM's model (`recipe.async_engine.engines.vllm.staged_model`), for a LoRA adapter in vLLM
(`staged_adapter`), and for one rank of a training engine (`recipe.async_engine.log_prob_servers.adapter`). `Intake`
feeds a stream into them and records its errors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.weights.checksum import StreamChecksum

NamedTensors = Sequence[tuple[str, torch.Tensor]]


class StagingRefused(RecipeError):
    """The staged weights cannot become the live ones, which are unchanged."""


class StagedWeights(ABC):
    """The staging area for weights; only one thread at a time may call it."""

    version: int | None = None
    """Version of the staged weights, once they are complete."""

    @torch.no_grad()
    def begin(self) -> None:
        """Start a stream, dropping anything that was staged but not swapped in."""
        self.version = None
        self._begin()

    @torch.no_grad()
    def load(self, weights: NamedTensors) -> None:
        """Load tensors of the stream, which are valid only during this call; raise an error to refuse them."""
        self._load(weights)

    @torch.no_grad()
    def complete(self, version: int, problem: str | None = None) -> None:
        """End the stream and mark the version as staged.

        Args:
            version: the version that the stream carried.
            problem: an error in this stream so far, if any.

        Raises:
            StagingRefused: there was an error here or on another rank, or a part of the model is missing.
        """
        problem = self._agreed(problem or self._find_problem())
        if problem is not None:
            raise StagingRefused(f"version {version} was refused, the old weights stay: {problem}")
        self._derive()
        self.version = version

    @torch.no_grad()
    def swap(self, version: int) -> None:
        """Make the staged weights the live ones; nothing may be computed meanwhile.

        Raises:
            StagingRefused: this version is not completely staged.
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
    def _find_problem(self) -> str | None:
        """Return what is missing or unusable in the staged weights; None if they are complete."""

    def _agreed(self, problem: str | None) -> str | None:
        """Return the first problem among all ranks that stage together; None if there is none."""
        return problem

    def _derive(self) -> None:  # noqa: B027, most have nothing to derive
        """Prepare what the swap needs, once the staged weights are complete."""

    @abstractmethod
    def _swap(self) -> None: ...


class Intake:
    """One stream of weights that is being staged.

    It records the first error as `problem` and ignores the rest of the stream, because the sender sends it to the end
    and other receivers may need it.
    """

    def __init__(self, staged: StagedWeights, version: int) -> None:
        self._staged, self._version = staged, version
        self._sums = StreamChecksum()
        # Text instead of the error, whose traceback would keep the stream's buffers alive.
        self.problem: str | None = None
        self.checksum = ""
        """Checksum of what was loaded, once it is complete."""

    def begin(self) -> None:
        """Start the stream."""
        self._unless_failed(self._staged.begin)

    def take(self, weights: NamedTensors) -> None:
        """Load tensors of the stream, which are valid only during this call."""
        self._unless_failed(lambda: self._load(weights))

    def _load(self, weights: NamedTensors) -> None:
        for name, tensor in weights:
            self._sums.add(name, tensor)
        self._staged.load(weights)

    def fail(self, error: Exception) -> None:
        """Record an error of the stream, unless there is one already."""
        if self.problem is None:
            self.problem = str(error) if isinstance(error, RecipeError) else f"{type(error).__name__}: {error}"

    def end(self) -> None:
        """End the stream: afterwards either `checksum` or `problem` is set."""
        try:
            self._staged.complete(self._version, self.problem)
            self.checksum = self._sums.value()
        except Exception as error:  # any error is the outcome of this stream
            self.problem = None
            self.fail(error)

    def _unless_failed(self, work: Callable[[], None]) -> None:
        if self.problem is None:
            try:
                work()
            except Exception as error:  # any error is the outcome of this stream
                self.fail(error)

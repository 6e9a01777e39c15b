# SPDX-License-Identifier: Apache-2.0
"""Staging of new weights next to the live ones, in any process that holds the model or a shard of it.

Contract: until :meth:`StagedWeights.swap` the live weights do not change, and the swap replaces all of them. Staging
fails if the stream of weights breaks off, lacks parameters, or contains a tensor that the model does not accept. The
error names the tensor, and nothing of the failed stream is used later. While weights are staged, the process can
compute with the live ones.

`StagedWeights` has subclasses for a rollout engine's model (`recipe.async_engine.engines.staged_model`), for its LoRA
adapter (`staged_adapter`, in the engine's folder), and for one rank of a training engine
(`recipe.async_engine.log_prob_servers.adapter`). `Intake` passes a stream to one of them and records the stream's first
error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.weights.checksum import StreamChecksum

NamedTensors = Sequence[tuple[str, torch.Tensor]]


class StagingRefused(RecipeError):
    """The staged weights cannot become the live ones, which stay as they are."""


class StagedWeights(ABC):
    """The staging area of a process; only one thread at a time may call its methods."""

    version: int | None = None
    """Version of the staged weights, or None if they are incomplete."""

    @torch.no_grad()
    def begin(self) -> None:
        """Start to receive a stream of weights, and drop everything that was staged and is not live."""
        self.version = None
        self._begin()

    @torch.no_grad()
    def load(self, weights: NamedTensors) -> None:
        """Load some tensors of the stream, which are valid only during this call; raise an error if one is unusable."""
        self._load(weights)

    @torch.no_grad()
    def complete(self, version: int, problem: str | None = None) -> None:
        """End the stream and mark the version as staged. ``problem`` is the stream's first error, or None.

        Raises:
            StagingRefused: the stream had an error, or lacks parameters, on this rank or another one.
        """
        problem = self._agreed(problem or self._find_problem())
        if problem is not None:
            raise StagingRefused(f"version {version} was refused, the old weights stay: {problem}")
        self._derive()
        self.version = version

    @torch.no_grad()
    def swap(self, version: int) -> None:
        """Make the staged weights live. The model must not compute anything meanwhile.

        Raises:
            StagingRefused: the staged weights are incomplete, or are of another version.
        """
        if self.version != version:
            raise StagingRefused(f"version {version} is not staged; the staged version is {self.version}")
        self.version = None
        self._swap()

    @abstractmethod
    def _begin(self) -> None: ...

    @abstractmethod
    def _load(self, weights: NamedTensors) -> None: ...

    @abstractmethod
    def _find_problem(self) -> str | None:
        """Return a text that names what is missing or unusable in the staged weights, or None if they are complete."""

    def _agreed(self, problem: str | None) -> str | None:
        """Return the first problem among all ranks that share the model, or None if no rank has a problem.

        If no other rank shares the model, return ``problem``.
        """
        return problem

    def _derive(self) -> None:  # noqa: B027, most subclasses have nothing to derive
        """Compute from the complete staged weights whatever else `_swap` needs. By default, nothing is needed."""

    @abstractmethod
    def _swap(self) -> None: ...


class Intake:
    """Passes one stream of weights to `StagedWeights`.

    After an error, whose text becomes `problem`, the rest of the stream is still read but ignored, so that the transfer
    can go on for other receivers.
    """

    def __init__(self, staged: StagedWeights, version: int) -> None:
        self._staged, self._version = staged, version
        self._sums = StreamChecksum()
        # Keep only the error's text, because its traceback would keep the stream's buffers alive.
        self.problem: str | None = None
        self.checksum = ""
        """Checksum of the loaded weights if they are complete, otherwise empty."""

    def begin(self) -> None:
        self._unless_failed(self._staged.begin)

    def take(self, weights: NamedTensors) -> None:
        """Load some tensors of the stream, which are valid only during this call. Ignore them after an error."""
        self._unless_failed(lambda: self._load(weights))

    def _load(self, weights: NamedTensors) -> None:
        for name, tensor in weights:
            self._sums.add(name, tensor)
        self._staged.load(weights)

    def fail(self, error: Exception) -> None:
        """Record ``error`` as the stream's error, unless the stream has had an error before."""
        if self.problem is None:
            self.problem = str(error) if isinstance(error, RecipeError) else f"{type(error).__name__}: {error}"

    def end(self) -> None:
        """End the stream. Afterwards either `checksum` or `problem` is set."""
        try:
            self._staged.complete(self._version, self.problem)
            self.checksum = self._sums.value()
        except Exception as error:  # Any error is recorded as the outcome of this stream.
            self.problem = None
            self.fail(error)

    def _unless_failed(self, work: Callable[[], None]) -> None:
        if self.problem is None:
            try:
                work()
            except Exception as error:  # Any error is recorded as the outcome of this stream.
                self.fail(error)

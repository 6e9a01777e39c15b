# SPDX-License-Identifier: Apache-2.0
"""What a log-prob server does next: score a batch, move to newer weights, or wait.

A pure state machine; the clock is passed in. Weights arrive in three steps: `begin_load`, `staged` (complete beside the
live ones) and `promoted` (they are the live ones now). Contract:

- A batch is scored by one version, the live one, and nothing is promoted while a batch is being scored.
- ``anchor: generation``: a request is scored by the version that sampled its tokens. A server moves on only when the
  requests of its live version have been scored, or ``drain_s`` after the newer weights were complete; what comes too
  late is scored by the live version and marked. It moves on when somebody asks for the newer version or the next
  weights come, so that a request which is on its way during a weight sync still finds its version.
- ``anchor: latest``: a server moves on at once. A request names the oldest version that will do, and waits
  for it.
- Requests of the oldest groups go first. A batch has at most ``max_batch_tokens``, a larger request its own batch; no
  request waits for a fuller batch longer than ``max_delay_s``.
- A request whose version will not come is handed back, never kept.
- Weights that turn out to be others than were sent (`refused`) score nothing, and nothing else is scored before the
  next ones are live.
- With ``holds_for_weights`` nothing is scored from `may_stage` to the end of a load.

Shown by tests/core/test_scoring.py.
"""

from dataclasses import dataclass
from enum import StrEnum

STATIC = 0
"""The version of weights that never change: those of the reference policy."""


class Anchor(StrEnum):
    """Whose log-probs the proximal ones are."""

    GENERATION = "generation"
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class ScoringSettings:
    """How a server forms batches and when it moves on; times in seconds, sizes in tokens of prompt and response."""

    anchor: Anchor = Anchor.GENERATION
    max_batch_tokens: int = 16384
    max_delay_s: float = 0.05
    drain_s: float = 10.0
    holds_for_weights: bool = False


@dataclass(frozen=True, slots=True)
class ScoringRequest:
    """One sequence to score."""

    id: int  # unique at its server
    version: int  # that sampled the tokens, or, with ``anchor: latest``, the oldest that will do
    tokens: int  # length of the sequence
    start: int  # of its prompt group; the oldest are trained first
    arrived: float  # when it came


@dataclass(frozen=True, slots=True)
class ScoringBatch:
    """Sequences to score together by ``version``; for those in ``late`` that is not the version they should have."""

    version: int
    requests: tuple[ScoringRequest, ...]
    late: frozenset[int]

    @property
    def tokens(self) -> int:
        return sum(request.tokens for request in self.requests)


@dataclass(frozen=True, slots=True)
class Promotion:
    """Swap the staged weights in."""

    version: int


class ScoringQueue:
    """A server's requests and versions. The owner does what `next` says and reports it with `scored` or `promoted`."""

    def __init__(self, settings: ScoringSettings, live: int | None = None) -> None:
        """``live``: the version that the weights have from the start, if they are not only placeholders."""
        self.live = live
        self.paused = False
        self.joining = False
        """The ranks join the group of a weight sync, beside which nothing is scored that may not be beside weights."""
        self._settings = settings
        self._loading: int | None = None
        self._staged: int | None = None
        self._staged_at = 0.0
        self._is_refused = False
        self._waiting: dict[int, ScoringRequest] = {}
        self._busy = False

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def newest(self) -> int | None:
        """The newest version that is live, staged or on its way."""
        staged = None if self._is_refused else self._staged
        return max((version for version in (self.live, staged, self._loading) if version is not None), default=None)

    # Requests

    def submit(self, request: ScoringRequest) -> bool:
        """Take a request; False if its version was never here and is not on its way, so that it must go elsewhere."""
        if request.id in self._waiting:
            raise ValueError(f"request {request.id} waits already")
        if not self._comes(request.version):
            return False
        self._waiting[request.id] = request
        return True

    def withdraw(self, request_id: int) -> bool:
        """Nobody waits for this one any more; False if it is not waiting (it is being scored, or was)."""
        return self._waiting.pop(request_id, None) is not None

    # Weights

    def begin_load(self, version: int) -> None:
        """Weights are on their way. If others are still staged, `next` promotes those first: see `may_stage`."""
        if self._loading is not None:
            raise ValueError(f"version {self._loading} is on its way already")
        if self.newest is not None and version < self.newest:
            raise ValueError(f"version {version} is older than version {self.newest}")
        self._loading = version

    @property
    def loading(self) -> int | None:
        """The version that is on its way."""
        return self._loading

    @property
    def may_stage(self) -> bool:
        """Whether those on their way may come: their place is free, and nothing is scored that may not be beside it."""
        return self._staged is None and self.may_join

    @property
    def may_join(self) -> bool:
        """Whether nothing is scored that may not be beside a collective of weights."""
        return not (self._settings.holds_for_weights and self._busy)

    def staged(self, now: float) -> None:
        """The weights on their way are complete on every rank, beside the live ones."""
        if self._loading is None or not self.may_stage:
            raise ValueError("no weights are on their way, or others are staged")
        self._staged, self._loading, self._staged_at = self._loading, None, now

    def load_failed(self) -> list[ScoringRequest]:
        """The weights on their way will not come. Returns the requests that wait for them, which must go elsewhere."""
        self._loading = None
        return self._lost()

    def refused(self) -> list[ScoringRequest]:
        """The weights that came last, staged or live, are not those that were sent. Returns as `load_failed`.

        What is staged still takes the place of the live weights, so that others can be staged.
        """
        self.live = None
        self._is_refused = self._staged is not None
        return self._lost()

    def promoted(self) -> None:
        """The staged weights are the live ones."""
        assert self._staged is not None and not self._busy
        self.live, self._staged, self._is_refused = None if self._is_refused else self._staged, None, False

    def _lost(self) -> list[ScoringRequest]:
        lost = [request for request in self._waiting.values() if not self._comes(request.version)]
        for request in lost:
            del self._waiting[request.id]
        return lost

    def _comes(self, version: int) -> bool:
        """Whether a request for ``version`` will be answered here without further weights being announced."""
        if self._settings.anchor is Anchor.LATEST:
            return self.newest is not None and version <= self.newest
        staged = None if self._is_refused else self._staged
        return version in (staged, self._loading) or (self.live is not None and version <= self.live)

    # Decisions

    def next(self, now: float) -> ScoringBatch | Promotion | None:
        """What to do now; None: wait for the next event, or until `wake_at`. A batch counts as begun."""
        if self._busy:
            return None
        if self._staged is not None and self._moves_on(now):
            return Promotion(self._staged)
        ready = self._ready()
        if self.live is None or not ready or not self._is_due(ready, now):
            return None
        chosen: list[ScoringRequest] = []
        room = self._settings.max_batch_tokens
        for request in ready:
            if chosen and request.tokens > room:
                break
            chosen.append(request)
            room -= request.tokens
        for request in chosen:
            del self._waiting[request.id]
        self._busy = True
        late = frozenset(request.id for request in chosen if self._is_late(request))
        return ScoringBatch(self.live, tuple(chosen), late)

    def scored(self) -> None:
        """The batch has been scored, or could not be."""
        assert self._busy
        self._busy = False

    def wake_at(self) -> float | None:
        """When `next` may say something else without any other event; None if never."""
        if self._busy:
            return None
        times = [request.arrived + self._settings.max_delay_s for request in self._ready()]
        if self._staged is not None and self.live is not None and self._is_wanted:
            times.append(self._staged_at + self._settings.drain_s)
        return min(times, default=None)

    def _moves_on(self, now: float) -> bool:
        if self.live is None or self._settings.anchor is Anchor.LATEST:
            return True
        on_time = any(request.version == self.live for request in self._waiting.values())
        return self._is_wanted and (not on_time or now >= self._staged_at + self._settings.drain_s)

    @property
    def _is_wanted(self) -> bool:
        """Whether the staged weights are asked for, or in the way of the next ones."""
        live = self.live
        assert live is not None
        return self._loading is not None or any(request.version > live for request in self._waiting.values())

    def _ready(self) -> list[ScoringRequest]:
        """What the live version may score now, first things first."""
        live = self.live
        holds = self.joining or (
            self._settings.holds_for_weights and self._loading is not None and self._staged is None
        )
        if live is None or self.paused or holds:
            return []
        ready = [request for request in self._waiting.values() if request.version <= live]
        return sorted(ready, key=lambda request: (request.start, request.id))

    def _is_due(self, ready: list[ScoringRequest], now: float) -> bool:
        if sum(request.tokens for request in ready) >= self._settings.max_batch_tokens:
            return True
        if self._staged is not None and self._is_wanted:
            return True
        return now >= min(request.arrived for request in ready) + self._settings.max_delay_s

    def _is_late(self, request: ScoringRequest) -> bool:
        live = self.live
        assert live is not None
        if self._settings.anchor is Anchor.LATEST:
            return request.version > live
        return request.version < live

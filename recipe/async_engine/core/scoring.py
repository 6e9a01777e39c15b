# SPDX-License-Identifier: Apache-2.0
"""Decides what a log-prob server does next: score a batch, switch to newer weights, or wait.

This is a pure state machine; the clock is passed in. Weights arrive in three steps: `begin_load`, `staged` (they are
complete, next to the live weights) and `promoted` (they have become the live weights). Contract:

- A batch is scored by one version, the live one, and nothing is promoted while a batch is being scored.
- ``anchor: generation``: a request is scored by the version that sampled its tokens. A server switches to staged
  weights only after the requests for its live version have been scored, or ``drain_s`` seconds after the newer weights
  were complete; requests for older versions are scored by the live version and marked as late. It switches only when a
  request needs the newer version or the next weights arrive, so that a request that arrives during a weight sync still
  finds its version.
- ``anchor: latest``: a server switches at once. A request names the oldest acceptable version, and waits for it.
- Requests of the oldest groups are scored first. A batch has at most ``max_batch_tokens`` tokens, and a larger request
  is a batch of its own. No request waits longer than ``max_delay_s`` seconds for a fuller batch.
- A request whose version will not arrive is returned to the caller, never kept.
- Weights that differ from those that were sent (`refused`) score nothing, and nothing is scored until the next weights
  are live.
- With ``holds_for_weights`` nothing is scored from `may_stage` to the end of a load.

Shown by tests/core/test_scoring.py.
"""

from dataclasses import dataclass
from enum import StrEnum

STATIC = 0
"""Version of weights that never change, which are those of the reference policy."""


class Anchor(StrEnum):
    """Which version computes the proximal log-probs."""

    GENERATION = "generation"
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class ScoringSettings:
    """How a server forms batches and switches weights. Times are in seconds, sizes in tokens of prompt and response."""

    anchor: Anchor = Anchor.GENERATION
    max_batch_tokens: int = 16384
    max_delay_s: float = 0.05
    drain_s: float = 10.0
    holds_for_weights: bool = False


@dataclass(frozen=True, slots=True)
class ScoringRequest:
    """One sequence to score."""

    id: int  # unique at the server
    version: int  # version that sampled the tokens; with ``anchor: latest``, the oldest acceptable version
    tokens: int  # length of the sequence
    start: int  # start version of the prompt group; groups with the oldest are trained first
    arrived: float  # time of arrival in seconds


@dataclass(frozen=True, slots=True)
class ScoringBatch:
    """Sequences that ``version`` scores together. Those in ``late`` should have been scored by an older version."""

    version: int
    requests: tuple[ScoringRequest, ...]
    late: frozenset[int]

    @property
    def tokens(self) -> int:
        return sum(request.tokens for request in self.requests)


@dataclass(frozen=True, slots=True)
class Promotion:
    """The decision that the staged weights become the live ones."""

    version: int


class ScoringQueue:
    """The requests and versions of a server. The caller carries out `next` and then calls `scored` or `promoted`."""

    def __init__(self, settings: ScoringSettings, live: int | None = None) -> None:
        """Create the queue; ``live`` is the version of the initial weights, or None if they are only placeholders."""
        self.live = live
        self.joining = False
        """True while the ranks join the group of a weight sync; nothing may be scored during that time."""
        self._settings = settings
        self._loading: int | None = None
        self._staged: int | None = None
        self._staged_at = 0.0
        self._is_refused = False
        self._waiting: dict[int, ScoringRequest] = {}
        self._busy = False

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._waiting)

    @property
    def newest(self) -> int | None:
        """Return the newest version that is live, staged or being loaded."""
        staged = None if self._is_refused else self._staged
        return max((version for version in (self.live, staged, self._loading) if version is not None), default=None)

    # Methods about requests.

    def submit(self, request: ScoringRequest) -> bool:
        """Queue a request; return False if this server never had and will not have its version (ask another one)."""
        if request.id in self._waiting:
            raise ValueError(f"request {request.id} is already queued")
        if not self._comes(request.version):
            return False
        self._waiting[request.id] = request
        return True

    def withdraw(self, request_id: int) -> bool:
        """Drop a request that is no longer needed; return False if it is already being scored or has been scored."""
        return self._waiting.pop(request_id, None) is not None

    # Methods about weights.

    def begin_load(self, version: int) -> None:
        """Announce that weights of ``version`` will be loaded. If others are staged, `next` promotes those first."""
        if self._loading is not None:
            raise ValueError(f"version {self._loading} is already being loaded")
        if self.newest is not None and version < self.newest:
            raise ValueError(f"version {version} is older than version {self.newest}")
        self._loading = version

    @property
    def loading(self) -> int | None:
        """Return the version that is being loaded, or None."""
        return self._loading

    @property
    def may_stage(self) -> bool:
        """Return whether loading weights may begin: the staging area is free, and `may_join` holds."""
        return self._staged is None and self.may_join

    @property
    def may_join(self) -> bool:
        """Return whether a collective of the weight sync may run now.

        If ``holds_for_weights`` is set, none may run while a batch is being scored.
        """
        return not (self._settings.holds_for_weights and self._busy)

    def staged(self, now: float) -> None:
        """Record that the weights being loaded are complete on every rank, next to the live ones."""
        if self._loading is None or not self.may_stage:
            raise ValueError("no weights are being loaded, or other weights are still staged")
        self._staged, self._loading, self._staged_at = self._loading, None, now

    def load_failed(self) -> list[ScoringRequest]:
        """Give up the weights being loaded. Return the requests that waited for them, for another server to score."""
        self._loading = None
        return self._lost()

    def refused(self) -> list[ScoringRequest]:
        """Record that the weights that arrived last, staged or live, differ from those that were sent.

        Return the requests that waited for these weights, which another server must score. Refused staged weights are
        still promoted later, to free the staging area for the next weights.
        """
        self.live = None
        self._is_refused = self._staged is not None
        return self._lost()

    def promoted(self) -> None:
        """Record that the staged weights have become the live ones."""
        assert self._staged is not None and not self._busy
        self.live, self._staged, self._is_refused = None if self._is_refused else self._staged, None, False

    def _lost(self) -> list[ScoringRequest]:
        lost = [request for request in self._waiting.values() if not self._comes(request.version)]
        for request in lost:
            del self._waiting[request.id]
        return lost

    def _comes(self, version: int) -> bool:
        """Return whether this server will score a request for ``version``, with weights that it has or expects."""
        if self._settings.anchor is Anchor.LATEST:
            return self.newest is not None and version <= self.newest
        staged = None if self._is_refused else self._staged
        return version in (staged, self._loading) or (self.live is not None and version <= self.live)

    # Methods that decide what the server does next.

    def next(self, now: float) -> ScoringBatch | Promotion | None:
        """Return what to do now, or None to wait for an event or until `wake_at`. A returned batch counts as begun."""
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
        """Record that scoring the present batch has ended, successfully or not."""
        assert self._busy
        self._busy = False

    def wake_at(self) -> float | None:
        """Return the time at which `next` may change its answer without another event, or None if it will not."""
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
        """Return whether a request needs the staged weights, or the next weights need the staging area."""
        live = self.live
        assert live is not None
        return self._loading is not None or any(request.version > live for request in self._waiting.values())

    def _ready(self) -> list[ScoringRequest]:
        """Return the requests that the live version may score now, those of the oldest groups first."""
        live = self.live
        holds = self.joining or (
            self._settings.holds_for_weights and self._loading is not None and self._staged is None
        )
        if live is None or holds:
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

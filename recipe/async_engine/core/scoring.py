# SPDX-License-Identifier: Apache-2.0
"""Decides what a log-prob server does next: score a batch, switch to newer weights, or wait.

Scoring means computing the log-probs of the tokens of a sequence. Weights go through three states: being loaded,
*staged* (complete, in memory next to the ones in use) and *live* (in use). Contract:

- A batch is scored with the live weights, which never change while a batch is being scored.
- With ``anchor: generation``, a request should be scored by the version that sampled its tokens. So staged weights
  become live only when a request needs them or the next weights arrive, and only after the requests for the live
  version have been scored, or ``drain_s`` seconds after the weights were staged. A request for a version older than the
  live one is scored by the live one, and marked as late.
- With ``anchor: latest``, staged weights become live at once. A request names the oldest acceptable version, and waits
  for it.
- Requests of the oldest groups are scored first. A batch has at most ``max_batch_tokens`` tokens, and a larger request
  is a batch of its own. No request waits longer than ``max_delay_s`` seconds for a fuller batch.
- A request for a version that this server will not get is returned to the caller.
- If weights arrived damaged (`refused`), nothing is scored until the next weights are live.
- With ``holds_for_weights``, nothing is scored while weights are being loaded.

The state machine has no clock; times are passed in. Shown by tests/core/test_scoring.py.
"""

from dataclasses import dataclass
from enum import StrEnum

STATIC = 0
"""Version number of the reference policy's weights, which never change."""


class Anchor(StrEnum):
    """Which policy version computes the proximal log-probs: the one that sampled the tokens, or the newest."""

    GENERATION = "generation"
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class ScoringSettings:
    """How a log-prob server forms batches and switches weights; the module's docstring explains each setting."""

    anchor: Anchor = Anchor.GENERATION
    max_batch_tokens: int = 16384
    max_delay_s: float = 0.05
    drain_s: float = 10.0
    holds_for_weights: bool = False


@dataclass(frozen=True, slots=True)
class ScoringRequest:
    """A request to compute the log-probs of one sequence, a prompt with its response."""

    id: int  # unique at the server
    version: int  # version that sampled the tokens; with ``anchor: latest``, the oldest acceptable version
    tokens: int  # length of the sequence
    start: int  # version of the prompt group's oldest token; the oldest groups are scored first
    arrived: float  # time of arrival in seconds


@dataclass(frozen=True, slots=True)
class ScoringBatch:
    """Requests that are scored together, with the weights of ``version``.

    late: ids of those requests that an older version should have scored.
    """

    version: int
    requests: tuple[ScoringRequest, ...]
    late: frozenset[int]

    @property
    def tokens(self) -> int:
        return sum(request.tokens for request in self.requests)


@dataclass(frozen=True, slots=True)
class Promotion:
    """The decision that the staged weights, those of ``version``, become the live ones."""

    version: int


class ScoringQueue:
    """The waiting requests and the weights of one log-prob server. The server does what `next` returns."""

    def __init__(self, settings: ScoringSettings, live: int | None = None) -> None:
        """Create an empty queue; ``live`` is the version of the initial weights, or None for placeholder weights."""
        self.live = live
        self.paused = False
        self.joining = False
        """Whether the ranks are joining the process group of a weight sync; nothing is scored during that time."""
        self._settings = settings
        self._loading: int | None = None
        self._staged: int | None = None
        self._staged_at = 0.0
        self._is_refused = False
        self._waiting: dict[int, ScoringRequest] = {}
        self._busy = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def newest(self) -> int | None:
        """Return the newest version among the live, staged and loading weights, or None if there are no weights."""
        staged = None if self._is_refused else self._staged
        return max((version for version in (self.live, staged, self._loading) if version is not None), default=None)

    def submit(self, request: ScoringRequest) -> bool:
        """Queue a request; return False if this server cannot score it, because it will not have the needed version."""
        if request.id in self._waiting:
            raise ValueError(f"request {request.id} is already queued")
        if not self._comes(request.version):
            return False
        self._waiting[request.id] = request
        return True

    def withdraw(self, request_id: int) -> bool:
        """Remove a waiting request; return False if it does not wait, because it is being scored or was scored."""
        return self._waiting.pop(request_id, None) is not None

    def begin_load(self, version: int) -> None:
        """Record that weights of ``version`` are to be loaded. Weights that are still staged then become live first."""
        if self._loading is not None:
            raise ValueError(f"version {self._loading} is already being loaded")
        if self.newest is not None and version < self.newest:
            raise ValueError(f"version {version} is older than version {self.newest}, which this server has already")
        self._loading = version

    @property
    def loading(self) -> int | None:
        return self._loading

    @property
    def may_stage(self) -> bool:
        """Return whether the loading of weights may begin: no weights are staged, and `may_join` is True."""
        return self._staged is None and self.may_join

    @property
    def may_join(self) -> bool:
        """Return whether a weight sync may communicate now: with ``holds_for_weights``, not while a batch is scored."""
        return not (self._settings.holds_for_weights and self._busy)

    def staged(self, now: float) -> None:
        """Record that the weights being loaded are complete on every rank."""
        if self._loading is None or not self.may_stage:
            raise ValueError(
                "no weights can become staged now: none are being loaded, others are still staged, or a batch is being "
                "scored (with holds_for_weights)"
            )
        self._staged, self._loading, self._staged_at = self._loading, None, now

    def load_failed(self) -> list[ScoringRequest]:
        """Record that loading weights failed.

        Return the requests that waited for these weights. Another server must score these requests.
        """
        self._loading = None
        return self._lost()

    def refused(self) -> list[ScoringRequest]:
        """Record that the weights that arrived last, staged or live, differ from those that were sent.

        From now on no weights are live. If the differing weights are staged, `next` still returns a `Promotion`, so
        that the staging memory becomes free, but they do not become live.

        Return the requests that waited for the differing weights. Another server must score these requests.
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
        """Return whether this server has, or is loading, weights that can score a request for ``version``."""
        if self._settings.anchor is Anchor.LATEST:
            return self.newest is not None and version <= self.newest
        staged = None if self._is_refused else self._staged
        return version in (staged, self._loading) or (self.live is not None and version <= self.live)

    def next(self, now: float) -> ScoringBatch | Promotion | None:
        """Return what the server must do now. None means: wait until `wake_at`, or until the state changes."""
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
        """Record that the scoring of the batch from `next` has ended, successfully or not."""
        assert self._busy
        self._busy = False

    def wake_at(self) -> float | None:
        """Return the time in seconds at which to call `next` again even if nothing else happens; None for never."""
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
        """Return whether a request needs the staged weights, or the next weights need the memory of the staged ones."""
        live = self.live
        assert live is not None
        return self._loading is not None or any(request.version > live for request in self._waiting.values())

    def _ready(self) -> list[ScoringRequest]:
        """Return the requests that may be scored with the live weights now, those of the oldest groups first."""
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

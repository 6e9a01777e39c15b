# SPDX-License-Identifier: Apache-2.0
"""Which policy version sampled each token of an answer, stored as run-length codes.

Contract. Each token is labelled with the version that sampled it, or with `NOT_SAMPLED` if no policy sampled it (tool
and environment tokens). The cost of handling a complete answer depends on its number of version changes, not on its
number of tokens; only an answer that its agent loop has shortened is read token by token. A label that cannot be known
exactly is never newer than the true version, and the answer's labels are then marked as inexact. Test:
tests/core/test_versions.py.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, groupby, pairwise
from operator import gt

from recipe.async_engine.core.errors import VersionRecordError

NOT_SAMPLED = -1
"""The label of a token that no policy sampled, such as a tool's output."""

Runs = list[tuple[int, int]]
"""Run-length code of the versions of consecutive tokens: (version, number of tokens), ..."""

Context = tuple[int, tuple[int, ...]]
"""The number of tokens before a piece, and the last `CONTEXT` of them. A piece is what one request generated."""
CONTEXT = 16

ALIGNMENT_WORK = 32
"""Largest number of comparisons that `align` makes per token. Only degenerate answers (one repeated token) need more.
"""


def run_lengths(versions: Iterable[int]) -> Runs:
    """Return the run-length code of the versions of consecutive tokens: (version, number of tokens), ..."""
    return [(version, len(list(run))) for version, run in groupby(versions)]


def last_runs(runs: Sequence[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """Return the end of the run-length code ``runs``: the code of its last ``count`` tokens."""
    found: list[tuple[int, int]] = []
    for version, length in reversed(runs):
        if count <= 0:
            break
        found.append((version, min(length, count)))
        count -= length
    return found[::-1]


def joined(runs: Iterable[tuple[int, int]], more: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the run-length code of the tokens whose code is ``runs``, followed by those whose code is ``more``."""
    found: Runs = []
    for version, count in (*runs, *more):
        _append(found, version, count)
    return found


class RequestVersions:
    """Records which policy version samples which tokens of a rollout server's open requests.

    A request starts with the version at its submission. After each weight swap, further tokens belong to the new
    version.
    """

    def __init__(self) -> None:
        # Each request has pairs (version, number of tokens sampled before this version), in the order of the versions.
        self._begun: dict[str, list[tuple[int | None, int]]] = {}

    def submit(self, request_id: str, version: int | None) -> None:
        """Record a request that is about to enter the engine, and the engine's version (None if unknown)."""
        self._begun[request_id] = [(version, 0)]

    def forget(self, request_id: str) -> None:
        self._begun.pop(request_id, None)

    def submitted(self, request_id: str) -> int | None:
        """Return the version of the engine when the request was submitted, or None if that is not known."""
        return self._begun[request_id][0][0] if request_id in self._begun else None

    def swap(self, sampled: Mapping[str, int], version: int) -> None:
        """Record a weight swap to ``version``. ``sampled`` has each request's number of tokens so far, 0 if missing."""
        for request_id, begun in self._begun.items():
            begun.append((version, sampled.get(request_id, 0)))

    def swapped_under(self, request_id: str) -> bool:
        """Return whether weights were swapped since the request was submitted."""
        return len(self._begun.get(request_id, ())) > 1

    def runs(self, request_id: str, tokens: int) -> list[tuple[int, int]] | None:
        """Return the versions of a request's first ``tokens`` tokens as run-length code, or None if any is unknown."""
        begun = self._begun.get(request_id, [(None, 0)])
        ends = [before for _, before in begun[1:]] + [tokens]
        found: list[tuple[int, int]] = []
        for (version, before), end in zip(begun, ends, strict=True):
            count = min(end, tokens) - before
            if count <= 0:
                continue
            if version is None:
                return None
            found = joined(found, [(version, count)])
        return found


@dataclass(frozen=True, slots=True)
class Alignment:
    """The policy versions of a response's tokens. If `exact` is False, they may be older than the true versions."""

    runs: Runs
    exact: bool

    @property
    def oldest(self) -> int:
        return min(version for version, _ in self.runs if version != NOT_SAMPLED)

    @property
    def newest(self) -> int:
        return max(version for version, _ in self.runs)


def align(
    generated: Sequence[tuple[int, Sequence[int]]], response_ids: Sequence[int], response_mask: Sequence[int]
) -> Alignment:
    """Return the policy version of each token of an agent loop's response.

    generated: (version, token ids) of every piece that a server generated for the trajectory, in order. response_ids,
    response_mask: the agent loop's response, of equal length; mask 0 marks tokens that no policy sampled.

    The agent loop keeps no versions, and may drop the end of a piece or whole pieces. A *reading* of the response is a
    way to compose its sampled tokens from the pieces in order, using all of a piece, only its beginning, or nothing.
    Each token is labelled with the oldest version that any reading gives it, so a staleness computed from the labels is
    never too small. The labels are exact if all readings agree. If there is no reading, or finding all readings takes
    too much work, every sampled token gets the oldest version in ``generated``.

    Raises:
        VersionRecordError: the lengths differ, or tokens are marked as sampled but nothing was generated.
    """
    if len(response_ids) != len(response_mask):
        raise VersionRecordError(f"the response has {len(response_ids)} tokens, but its mask has {len(response_mask)}")
    sampled = list(compress(response_ids, response_mask))
    pieces = [(version, list(tokens)) for version, tokens in generated if len(tokens)]
    if any(version < 0 for version, _ in pieces):
        raise VersionRecordError(f"generated tokens have a negative version: {[version for version, _ in pieces]}")
    if sampled and not pieces:
        raise VersionRecordError(f"{len(sampled)} tokens are marked as sampled, but no generation was recorded")
    if sampled == list(chain.from_iterable(tokens for _, tokens in pieces)):
        # The sampled tokens are those of all pieces, whole and in order, so this is their only reading.
        return Alignment(_with_unsampled([(version, len(tokens)) for version, tokens in pieces], response_mask), True)
    read = _readings(pieces, sampled)
    if read is None:
        oldest = min(version for version, _ in pieces)
        return Alignment(_with_unsampled([(oldest, len(sampled))], response_mask), exact=False)
    return Alignment(_with_unsampled(read.runs, response_mask), read.exact)


def align_in(
    generated: Sequence[tuple[int, Sequence[int]]],
    contexts: Sequence[Context],
    prompt: Sequence[int],
    response_ids: Sequence[int],
    response_mask: Sequence[int],
) -> Alignment:
    """Return what `align` returns for one of several outputs of an agent loop, each with its own ``prompt``.

    If an agent loop rewrites its context, each of its outputs has only some of the pieces, and may train only the end
    of a piece whose beginning another output trains. ``contexts`` describes the tokens before each piece, and so says
    where in the output the piece can begin. This function first uses the pieces only there. If that does not give exact
    labels, it uses all pieces as `align` does.
    """
    sequence, first = [*prompt, *response_ids], len(prompt)
    trained = _trained_runs(response_mask)
    pieces, starts = [], []
    for (version, tokens), (length, last) in zip(generated, contexts, strict=True):
        if length >= len(sequence) or tuple(sequence[max(0, length - CONTEXT) : length]) != last:
            continue
        run = bisect_right(trained, length - first, key=lambda run: run[1])
        if run == len(trained):
            continue
        begin, end, before = trained[run]
        # The first tokens of a piece may be context here.
        known = max(0, begin + first - length)
        if known < len(tokens) and sequence[length : length + known] == list(tokens[:known]):
            pieces.append((version, list(tokens[known : end + first - length])))
            starts.append(before + length + known - first - begin)
    read = _readings(pieces, list(compress(response_ids, response_mask)), starts)
    if read is not None and read.exact:
        return Alignment(_with_unsampled(read.runs, response_mask), exact=True)
    return align(generated, response_ids, response_mask)


def _trained_runs(response_mask: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (first place, end, number of trained tokens before) for each run of trained tokens of a response."""
    found, place, before = [], 0, 0
    for is_trained, count in run_lengths(map(bool, response_mask)):
        if is_trained:
            found.append((place, place + count, before))
            before += count
        place += count
    return found


def context_of(tokens: Sequence[int]) -> Context:
    """Return the number of ``tokens`` and the last `CONTEXT` of them.

    ``tokens`` are all tokens of a request to a server. What the server generates for the request is a piece.
    """
    return len(tokens), tuple(tokens[-CONTEXT:])


def _readings(
    pieces: Sequence[tuple[int, list[int]]], sampled: list[int], starts: Sequence[int] | None = None
) -> Alignment | None:
    """Return the oldest version that any reading (see `align`) gives each token; None if no reading is found.

    With ``starts``, each piece can begin at only one position in ``sampled``.

    The first loop goes through the pieces in order. It finds the positions in ``sampled`` at which a piece can begin,
    which are those up to which earlier pieces can cover all tokens, and how many tokens of the piece match at each of
    them. The second loop goes from the last piece to the first. It keeps only the positions from which this piece and
    later ones can cover all tokens up to the end, and gives the piece's version to all tokens that the piece can cover.
    """
    end = len(sampled)
    work_left = ALIGNMENT_WORK * (end + sum(len(tokens) for _, tokens in pieces))
    explained = {0}
    agreements: list[tuple[int, dict[int, int]]] = []
    for number, (version, tokens) in enumerate(pieces):
        agreed: dict[int, int] = {}
        for start in explained if starts is None else explained & {starts[number]}:
            agreed[start] = _agreement(tokens, sampled, start)
            work_left -= 1 + agreed[start]
            if work_left < 0:
                return None
        agreements.append((version, agreed))
        explained |= {start + used for start, longest in agreed.items() for used in range(1, longest + 1)}
    labelled: list[tuple[int, int, int]] = []
    reaching = [end] if end in explained else []
    for version, agreed in reversed(agreements):
        earlier = set(reaching)
        for start, longest in sorted(agreed.items()):
            farthest = bisect_right(reaching, start + longest) - 1
            if farthest >= 0 and reaching[farthest] > start:
                earlier.add(start)
                labelled.append((start, reaching[farthest], version))
        reaching = sorted(earlier)
    return _oldest_of(labelled, end)


def _oldest_of(labelled: Iterable[tuple[int, int, int]], end: int) -> Alignment | None:
    """Return the oldest version of each of ``end`` tokens, or None if some token has no version.

    labelled: (first, last, version) for each range of tokens first..last-1 that may have this version. The result is
    exact if no token may have more than one version.
    """
    changes: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for first, last, version in labelled:
        changes[first][version] += 1
        changes[last][version] -= 1
    runs: Runs = []
    exact, present = True, Counter[int]()
    edges = sorted({0, end, *changes})
    for edge, following in pairwise(edges):
        present.update(changes[edge])
        versions = +present
        if not versions:
            return None
        exact = exact and len(versions) == 1
        _append(runs, min(versions), following - edge)
    return Alignment(runs, exact)


def _append(runs: Runs, version: int, count: int) -> None:
    if runs and runs[-1][0] == version:
        count += runs.pop()[1]
    if count:
        runs.append((version, count))


def _agreement(tokens: Sequence[int], sampled: Sequence[int], start: int) -> int:
    """Return the length of the common prefix of ``tokens`` and ``sampled[start:]``."""
    longest = min(len(tokens), len(sampled) - start)
    if tokens[:1] == sampled[start : start + 1] and tokens[:longest] == sampled[start : start + longest]:
        return longest
    return next((offset for offset in range(longest) if tokens[offset] != sampled[start + offset]), longest)


def _with_unsampled(labels: Iterable[tuple[int, int]], response_mask: Sequence[int]) -> Runs:
    """Return the versions of a response's tokens as run-length code. ``labels`` is the code of its sampled tokens.

    Tokens with ``response_mask`` 0 were not sampled and get `NOT_SAMPLED`.
    """
    found: Runs = []
    left = iter(labels)
    version = count = 0
    for is_sampled, wanted in run_lengths(map(bool, response_mask)):
        if not is_sampled:
            _append(found, NOT_SAMPLED, wanted)
            continue
        while wanted:
            if not count:
                version, count = next(left)
            used = min(count, wanted)
            _append(found, version, used)
            count, wanted = count - used, wanted - used
    return found


@dataclass(frozen=True, slots=True)
class Part:
    """What one request generated of a trajectory: ``tokens``, sampled by ``version`` after the tokens ``context``."""

    version: int
    context: Sequence[int]
    tokens: Sequence[int]


def place(
    parts: Sequence[Part], prompt: Sequence[int], response: Sequence[int], mask: Sequence[int]
) -> list[tuple[int, int]] | None:
    """Return where in the response each part begins, and how many of its tokens the response has.

    The log-probs of a part are valid only if the tokens before the part are still the same as when the part was
    sampled. Otherwise the part belongs to another output of its agent loop, or the agent loop has rewritten the text;
    then the result says that the response has 0 of the part's tokens. The first tokens of a part may be in the prompt,
    if another output trains them. Return None if a token marked as sampled (``mask`` 1) is in no part. Shown by
    tests/core/test_alignment.py.
    """
    sequence = [*prompt, *response]
    places, covered = [], bytearray(len(response))
    for part in parts:
        begin, known = len(part.context), [*part.context, *part.tokens][: len(sequence)]
        first = max(0, begin - len(prompt))
        used = len(known) - len(prompt) - first
        if used < 0 or begin > len(sequence) or sequence[: len(known)] != known:
            places.append((len(response), 0))
            continue
        places.append((first, used))
        covered[first : first + used] = b"\1" * used
    if len(mask) != len(response):
        raise ValueError(f"the mask has {len(mask)} tokens, the response {len(response)}")
    if any(map(gt, map(bool, mask), covered)):
        return None
    return places

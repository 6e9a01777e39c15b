# SPDX-License-Identifier: Apache-2.0
"""The staleness gate, which decides whether a group may start and whether a batch may be trained.

Contract. A training batch has `b` prompt groups, and after `k` batches there is a new policy version; `B = k * b`. `v`
is the current version, which the trainer *sealed* last: it made its weights this version, and trains on from them.
`a <= v` is the newest *announced* version: its weights have reached all rollout replicas, which generate with it.
`j` is the number of batches that the trainer has taken since version `v`, and `S` is the staleness bound. A group's
*start version* is the version of its oldest token. A group is *live* from its issue until it is taken, filtered or
failed. At all times and for every start version s,

    live groups with a start version <= s   <=   slots(s) = max(0, (s + S - v) * B + (k - j) * b)        (the invariant)

where slots(s) is how many groups can still be trained before those of start version s become too stale. It follows that
no group is trained more than S versions after its oldest token, that no group has to be dropped to ensure this, and
that a next batch can always form when the running groups have ended. Proofs: docs/staleness.md. Tests:
tests/core/test_gate*.py. The gate has no clock and no threads; its caller holds a lock.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from recipe.async_engine.core.errors import GateError, SettingError, StalenessViolation


def _require_int(setting: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise SettingError(setting, value, f"an integer >= {minimum}")


def _exact(setting: str, value: object) -> Fraction:
    """Return the exact value of a setting as it is written in decimal, so that 0.1 becomes 1/10."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Fraction)) or not math.isfinite(value):
        raise SettingError(setting, value, "a finite number >= 0")
    return value if isinstance(value, Fraction) else Fraction(str(value))


@dataclass(frozen=True, slots=True)
class GateSettings:
    """Settings of the staleness gate, fixed for a run.

    batch_groups: b, the number of prompt groups in a training batch.
    batches_per_version: k, the number of training batches between two weight syncs.
    max_staleness: S, the hard bound in versions, counted from a group's oldest token.
    pipeline_depth: how far generation may run ahead of training, in versions, 0 <= pipeline_depth <= S. Fractions are
    allowed and stored exactly as written.
    """

    batch_groups: int
    batches_per_version: int
    max_staleness: int
    pipeline_depth: Fraction | float

    def __post_init__(self) -> None:
        _require_int("batch_groups", self.batch_groups, 1)
        _require_int("batches_per_version", self.batches_per_version, 1)
        _require_int("max_staleness", self.max_staleness, 0)
        depth = _exact("pipeline_depth", self.pipeline_depth)
        if not 0 <= depth <= self.max_staleness:
            raise SettingError(
                "pipeline_depth",
                self.pipeline_depth,
                f"between 0 and max_staleness = {self.max_staleness}",
                "Lower pipeline_depth or raise max_staleness.",
            )
        object.__setattr__(self, "pipeline_depth", depth)

    @property
    def version_groups(self) -> int:
        """Return B, the number of groups that are trained between two versions."""
        return self.batches_per_version * self.batch_groups

    @property
    def groups_ahead(self) -> int:
        """Return the pipeline depth as a number of groups.

        So many groups may be live in addition to the groups that will be trained before the next version.
        """
        return math.floor(self.pipeline_depth * self.version_groups)


class StalenessGate:
    """Decides whether a group may start and whether a batch may be trained, so that no group gets too stale.

    version: the current policy version (v in the module's docstring). announced: the newest version that all rollout
    replicas have (a), at first equal to version. batches_taken: number of batches taken since version (j). live: number
    of live groups. For each live group, the gate stores only the start version (the version of its oldest token).
    Methods that change the state raise `StalenessViolation` if the module's invariant does not hold afterwards.
    """

    def __init__(
        self, settings: GateSettings, *, version: int = 0, batches_taken: int = 0, starts: Iterable[int] = ()
    ) -> None:
        _require_int("version", version, 0)
        _require_int("batches_taken", batches_taken, 0)
        if batches_taken > settings.batches_per_version:
            raise GateError(f"{batches_taken} batches are taken, but a version has only {settings.batches_per_version}")
        self.settings = settings
        self.version = self.announced = version
        self.batches_taken = batches_taken
        self._starts = Counter(starts)
        if any(start > version for start in self._starts):
            raise GateError(f"a live group has start version {max(self._starts)}, but the current version is {version}")
        self.live = self._starts.total()
        self._groups_ahead = settings.groups_ahead
        self.check()

    @property
    def batches_left(self) -> int:
        """Return how many batches are still to be taken before the next version (k - j in the module's docstring)."""
        return self.settings.batches_per_version - self.batches_taken

    @property
    def admission_limit(self) -> int:
        """Return how many groups may be live at most. Pipeline depth and staleness bound both limit this number."""
        versions_left = self.announced + self.settings.max_staleness - self.version
        ahead = min(self._groups_ahead, versions_left * self.settings.version_groups)
        return ahead + self.batches_left * self.settings.batch_groups

    def starts(self) -> dict[int, int]:
        """Return the number of live groups for each start version, in ascending order of versions."""
        return dict(sorted(self._starts.items()))

    def slots(self, start: int) -> int:
        """Return how many groups can still be trained before those of start version ``start`` become too stale."""
        return self._places(start, self.batches_left)

    def admits(self) -> bool:
        """Return whether one more group may start now, with the announced version's weights.

        The module's invariant then still holds: the new group counts only for versions s >= `announced`, and for these
        all live groups together are at most `admission_limit` <= slots(announced) <= slots(s).
        """
        return self.live + 1 <= self.admission_limit

    def add(self) -> int:
        """Record that one more group starts, and return its start version, which is the announced version."""
        if not self.admits():
            raise GateError(f"{self.live} groups are live and at most {self.admission_limit} may be live")
        self._starts[self.announced] += 1
        self.live += 1
        self.check()
        return self.announced

    def remove(self, start: int) -> None:
        """Remove one live group of start version ``start``, because it was filtered or failed."""
        self._discard(start)
        self.live -= 1
        self.check()

    def move(self, old_start: int, new_start: int) -> None:
        """Raise a live group's start version, because its oldest token is newer than assumed; refuse to lower it."""
        if not old_start <= new_start <= self.announced:
            raise GateError(
                f"a group's start version cannot change from {old_start} to {new_start}: it may only rise, at most to "
                f"version {self.announced}, the newest announced"
            )
        self._discard(old_start)
        self._starts[new_start] += 1
        self.check()

    def can_take(self, starts: Sequence[int] | Mapping[int, int]) -> bool:
        """Return whether live groups with the start versions ``starts`` may be the next batch.

        The other live groups must be able to be trained within the staleness bound afterwards. ``starts`` is the start
        version of each group of the batch, or the number of its groups by start version.
        """
        leaving = Counter(starts)
        if self.batches_left == 0 or leaving.total() != self.settings.batch_groups or not leaving <= self._starts:
            return False
        remaining = 0
        for start in sorted(self._starts):
            remaining += self._starts[start] - leaving[start]
            slots_after = self._places(start, self.batches_left - 1)
            if remaining > slots_after:
                return False
        return True

    def take(self, starts: Sequence[int]) -> None:
        """Record that the trainer takes a batch of live groups with these start versions."""
        if not self.can_take(starts):
            raise GateError(
                f"a batch with start versions {sorted(starts)} cannot be taken: live groups by start version are "
                f"{self.starts()}, and version {self.version} has {self.batches_left} batches left of "
                f"{self.settings.batch_groups} groups each"
            )
        for start in starts:
            self._discard(start)
        self.live -= len(starts)
        self.batches_taken += 1
        self.check()

    def give_back(self, starts: Sequence[int]) -> None:
        """Undo the last `take`, because its batch was not trained. ``starts`` are the groups' start versions."""
        self._starts.update(starts)
        self.live += len(starts)
        self.batches_taken -= 1
        self.check()

    def seal(self) -> int:
        """Advance to the next version, and return it. All batches of the current version must have been taken."""
        if self.batches_left != 0:
            raise GateError(
                f"version {self.version} still has {self.batches_left} batches that must be taken before the next "
                "version can be made"
            )
        self.version += 1
        self.batches_taken = 0
        self.check()
        return self.version

    def announce(self) -> int:
        """Record that all rollout replicas now generate with the version after `announced`, and return that version."""
        if self.announced == self.version:
            raise GateError(f"version {self.version} has been announced already, and the trainer has made no newer one")
        self.announced += 1
        self.check()
        return self.announced

    def check(self) -> None:
        """Raise `StalenessViolation` unless the module's invariant holds for the start version of each live group."""
        older = 0
        for start in sorted(self._starts):
            older += self._starts[start]
            if older > self.slots(start):
                raise StalenessViolation(
                    f"{older} live groups have start version {start} or older, but only {self.slots(start)} groups can "
                    f"be trained before these are too old (version {self.version}, {self.batches_taken} of "
                    f"{self.settings.batches_per_version} batches taken, max_staleness {self.settings.max_staleness})"
                )

    def _places(self, start: int, batches_left: int) -> int:
        """Return slots(start) for the case that ``batches_left`` batches are still to be taken before the next version.

        The result is never negative, so that 0 remaining groups always fit into it (`can_take`).
        """
        bound = self.settings
        versions_left = start + bound.max_staleness - self.version
        return max(0, versions_left * bound.version_groups + batches_left * bound.batch_groups)

    def _discard(self, start: int) -> None:
        if start not in self._starts:
            raise GateError(f"no live group has start version {start}; live groups by start version: {self.starts()}")
        self._starts[start] -= 1
        if self._starts[start] == 0:
            del self._starts[start]

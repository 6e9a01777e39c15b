# SPDX-License-Identifier: Apache-2.0
"""The admission policy: what may start, which trajectory generates next, and which batch is taken.

Contract. A policy chooses among what the staleness gate and the ledger allow: it can hold something back, and cannot
let anything through. The ledger checks each choice: a group starts only where the gate admits one more, and a batch is
leased only if it consists of `b` different ready groups that the gate lets go. Where the gate keeps the chosen ones,
since older groups are due, those are taken in their place, so no choice can bring a run to a stop; a policy that
chooses nothing holds it up until ``async_training.timeouts.batch_wait``. What a policy raises, or a choice that is
none, is a `PolicyError`: it ends the run, with the books closed.

A policy is asked under the ledger's lock, so it should answer at once. It keeps no state that a resumed run needs:
nothing of it is in a checkpoint. docs/extending.md has one of a user's own. Tests: tests/core/test_policy.py.
"""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, overload

from recipe.async_engine.core.errors import RecipeError, SettingError
from recipe.async_engine.core.groups import Group, GroupState, Prompt
from recipe.async_engine.core.live_groups import LiveGroups
from recipe.async_engine.core.plain import told

SETTING = "async_training.admission_policy"


class PolicyError(RecipeError):
    """An admission policy raised, or chose what it was not offered."""


class Batch(Sequence[Group]):
    """Groups to be trained together, which are looked up only when they are asked for.

    starts: number of the groups by start.
    """

    def __init__(self, starts: Mapping[int, int], groups: Callable[[], Sequence[Group]]) -> None:
        self.starts = starts
        self._groups = groups

    def __len__(self) -> int:
        return sum(self.starts.values())

    @overload
    def __getitem__(self, index: int) -> Group: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Group]: ...

    def __getitem__(self, index: int | slice) -> Group | Sequence[Group]:
        return self._groups()[index]

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups())


class ReadyGroups:
    """The ready groups, of which a policy chooses a batch; iterate over them in the order of issue.

    batch_groups: b, how many a batch has. version: the policy version that trains. next_batch: the number of the batch
    that is taken next, where batches are fixed at issue.
    """

    def __init__(self, live: LiveGroups, batch_groups: int, version: int, next_batch: int) -> None:
        self.batch_groups, self.version, self.next_batch = batch_groups, version, next_batch
        self._live = live

    def __iter__(self) -> Iterator[Group]:
        return iter(self._live.in_state(GroupState.READY))

    def __len__(self) -> int:
        return self._live.count(GroupState.READY)

    def find(self, group_id: int) -> Group | None:
        """The ready group of this id, None if it is not ready."""
        group = self._live.find(group_id)
        return group if group is not None and group.state is GroupState.READY else None

    def oldest(self) -> Batch:
        """The b oldest ready groups: by start, then by the order of issue."""
        ready, count = GroupState.READY, self.batch_groups
        return Batch(self._live.oldest_starts(ready, count), lambda: self._live.oldest(ready, count))

    def fixed(self) -> Batch | None:
        """The next batch of those that are fixed at issue; None until all of its groups are ready."""
        if self._live.ready_of_batch(self.next_batch) < self.batch_groups:
            return None
        groups = self._live.of_batch(self.next_batch)
        return Batch(Counter(group.start for group in groups), lambda: groups)


class AdmissionPolicy(Protocol):
    """What the engine asks a policy; a subclass of one of the three below has the rest of the answers.

    whole_groups: a group begins only when slots are free for all of its trajectories, so that a drain leaves none half
        begun; otherwise each free slot is filled, whichever group its trajectory belongs to.
    fixed_batches: a group's batch is fixed when it is issued; `next_batch` returns ``ready.fixed()`` then.
    at_hand: how many prompts are taken from the data ahead of time, for `next_prompt` to choose among.
    """

    whole_groups: bool
    fixed_batches: bool
    at_hand: int

    def next_prompt(self, prompts: Sequence[Prompt]) -> int | None:
        """The place in ``prompts``, which are in the order of the data, of the one to begin now; None: none yet."""

    def rank(self, group: Group, index: int) -> float:
        """How late the ``index``-th trajectory of a group gets a free slot: the lowest rank is the next one.

        Asked once, when it begins to wait; where groups begin whole, for the first trajectory alone. Among equals the
        group that was issued first goes first.
        """

    def next_batch(self, ready: ReadyGroups) -> Sequence[Group] | None:
        """The ``ready.batch_groups`` groups to train now; None: wait. At least so many are ready.

        While nothing changes, it is always the one or always the other.
        """


class OldestReady:
    """A stream: groups begin whole, in the order of the data, and the oldest ready groups are trained."""

    whole_groups = True
    fixed_batches = False
    at_hand = 16

    def next_prompt(self, prompts: Sequence[Prompt]) -> int | None:
        """The first one."""
        return 0

    def rank(self, group: Group, index: int) -> float:
        """The group's start: the oldest has the earliest deadline."""
        return group.start

    def next_batch(self, ready: ReadyGroups) -> Sequence[Group] | None:
        """The oldest ones."""
        return ready.oldest()


class WholeBatches(OldestReady):
    """Batches are those of synchronous training: fixed at issue, trained in that order, each only when complete.

    For k = 1 and S <= 1: the order of issue is the order of deadlines there (docs/staleness.md).
    """

    fixed_batches = True

    def next_batch(self, ready: ReadyGroups) -> Sequence[Group] | None:
        """The next one in the order of issue."""
        return ready.fixed()


class Turns(OldestReady):
    """As `OldestReady`, but a free slot goes to the next trajectory of whichever group: nothing drains in turns."""

    whole_groups = False


POLICIES: dict[str, type[AdmissionPolicy]] = {
    "oldest_ready": OldestReady,
    "whole_batches": WholeBatches,
    "turns": Turns,
}


def admission_policy(name: str) -> AdmissionPolicy:
    """The policy of a configuration: one of `POLICIES`, or a class by its dotted name, called without arguments.

    Raises:
        SettingError: it cannot be loaded, or has not what `AdmissionPolicy` has.
    """
    allowed = f"one of {', '.join(POLICIES)}, or the dotted name of a class, module.Class"
    if name in POLICIES:
        return POLICIES[name]()
    module, _, class_name = name.rpartition(".")
    if not module:
        raise SettingError(SETTING, name, allowed)
    try:
        policy = getattr(importlib.import_module(module), class_name)()
    except Exception as error:  # whatever a user's module raises
        raise SettingError(SETTING, name, allowed, f"It cannot be loaded: {told(error)}") from error
    has = ("whole_groups", "fixed_batches", "at_hand", "next_prompt", "rank", "next_batch")
    if lacking := [each for each in has if not hasattr(policy, each)]:
        raise SettingError(SETTING, name, allowed, f"It lacks {', '.join(lacking)}: derive it from OldestReady.")
    loaded: AdmissionPolicy = policy
    return loaded


def asked(policy: AdmissionPolicy, question: str, *arguments: Any) -> Any:
    """A policy's answer, which is not checked yet; PolicyError if it raised something."""
    try:
        return getattr(policy, question)(*arguments)
    except RecipeError:
        raise
    except Exception as error:  # whatever a user's policy raises
        raise PolicyError(f"{_name(policy)}.{question} raised {told(error)}") from error


def chosen_prompt(policy: AdmissionPolicy, prompts: Sequence[Prompt]) -> int | None:
    """The place of the prompt that the policy begins now, None if it begins none yet."""
    place = asked(policy, "next_prompt", prompts)
    if place is None or (isinstance(place, int) and 0 <= place < len(prompts)):
        return None if place is None else int(place)
    raise PolicyError(f"{_name(policy)}.next_prompt chose {place!r} of {len(prompts)} prompts: 0 is the first one")


def rank_of(policy: AdmissionPolicy, group: Group, index: int) -> float:
    """The rank that the policy gives a trajectory that waits."""
    rank = asked(policy, "rank", group, index)
    if isinstance(rank, int | float) and not math.isnan(rank):
        return rank
    raise PolicyError(f"{_name(policy)}.rank gave {rank!r}, which is no number")


def chosen_batch(policy: AdmissionPolicy, ready: ReadyGroups) -> Batch | None:
    """The groups that the policy would have trained now; those of a `Batch` are looked at by `checked` alone."""
    found = asked(policy, "next_batch", ready)
    if found is None or isinstance(found, Batch):
        return found
    groups = checked(policy, found, ready)
    return Batch(Counter(group.start for group in groups), lambda: groups)


def checked(policy: AdmissionPolicy, chosen: Any, ready: ReadyGroups) -> list[Group]:
    """The chosen groups as the ledger has them; PolicyError unless they are b different ready ones."""
    try:
        groups = [ready.find(group.id) for group in chosen]
    except (TypeError, AttributeError) as error:
        raise PolicyError(f"{_name(policy)}.next_batch gave {type(chosen).__name__}, and no list of groups") from error
    there = {group.id: group for group in groups if group is not None}
    if not len(groups) == len(there) == ready.batch_groups:
        raise PolicyError(
            f"{_name(policy)}.next_batch chose {len(groups)} groups, of which {len(there)} different ones are ready: "
            f"a batch has {ready.batch_groups}"
        )
    return list(there.values())


def _name(policy: AdmissionPolicy) -> str:
    return f"the admission policy {type(policy).__module__}.{type(policy).__qualname__}"

# SPDX-License-Identifier: Apache-2.0
"""The admission policy, an extension point that chooses which prompt starts, which trajectory generates next, and which
ready groups form the next training batch.

Contract. A policy can delay what the staleness gate and the ledger allow, but cannot admit what they refuse. If the
gate refuses a chosen batch because older groups must be trained first, the ledger takes the oldest groups instead. A
policy that never chooses a batch ends the run after ``async_training.timeouts.batch_wait`` seconds. An exception of a
policy, or an invalid choice, becomes a `PolicyError`, which ends the run cleanly.

A policy is called under the ledger's lock, so it should return at once. Checkpoints do not contain a policy's
attributes, so a policy must not depend on them after a resume. docs/extending.md shows how to write a policy. Tests:
tests/core/test_policy.py.
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
    """An admission policy raised an exception, or chose a prompt or a batch that it may not choose."""


class Batch(Sequence[Group]):
    """Groups to be trained together. The `Group` objects are looked up only when the sequence is read.

    starts: number of groups by start version (version of a group's oldest token).
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
    """The ready groups, in issue order, from which an admission policy chooses a batch.

    batch_groups: number of groups in a batch. version: the current policy version. next_batch: number of the batch to
    train next, if each group's batch is fixed when the group is issued.
    """

    def __init__(self, live: LiveGroups, batch_groups: int, version: int, next_batch: int) -> None:
        self.batch_groups, self.version, self.next_batch = batch_groups, version, next_batch
        self._live = live

    def __iter__(self) -> Iterator[Group]:
        return iter(self._live.in_state(GroupState.READY))

    def __len__(self) -> int:
        return self._live.count(GroupState.READY)

    def find(self, group_id: int) -> Group | None:
        """Return the group with this id, or None if it is not ready."""
        group = self._live.find(group_id)
        return group if group is not None and group.state is GroupState.READY else None

    def oldest(self) -> Batch:
        """Return a batch of the oldest ready groups, ordered by the version of their oldest token, then by id."""
        ready, count = GroupState.READY, self.batch_groups
        return Batch(self._live.oldest_starts(ready, count), lambda: self._live.oldest(ready, count))

    def fixed(self) -> Batch | None:
        """Return the groups whose batch number is `next_batch`, or None if a whole batch of them is not ready yet."""
        if self._live.ready_of_batch(self.next_batch) < self.batch_groups:
            return None
        groups = self._live.of_batch(self.next_batch)
        return Batch(Counter(group.start for group in groups), lambda: groups)


class AdmissionPolicy(Protocol):
    """The interface of an admission policy. To override only some methods, subclass one of the three classes below.

    whole_groups: whether a group starts only when generation slots are free for all of its trajectories; otherwise each
    free slot is filled with a trajectory of any group.
    fixed_batches: whether a group's batch is fixed when the group is issued; `next_batch` must then return
    ``ready.fixed()``.
    at_hand: number of prompts that are read ahead from the data for `next_prompt` to choose from.
    """

    whole_groups: bool
    fixed_batches: bool
    at_hand: int

    def next_prompt(self, prompts: Sequence[Prompt]) -> int | None:
        """Return the index in ``prompts`` (in data order) of the prompt to start now, or None to start none yet."""

    def rank(self, group: Group, index: int) -> float:
        """Return the priority of a group's ``index``-th trajectory for a generation slot; the lowest value goes first.

        The method is called when the trajectory begins to wait for a slot; with ``whole_groups``, ``index`` is always
        0. Among equal priorities, the group that was issued first goes first.
        """

    def next_batch(self, ready: ReadyGroups) -> Sequence[Group] | None:
        """Return ``ready.batch_groups`` of the ready groups, to be trained now, or None to wait.

        The method is called only when at least that many groups are ready. As long as the ready groups and the version
        stay the same, either every call must return None, or every call must return a batch.
        """


class OldestReady:
    """Trains the oldest ready groups; groups start in the order of the data, each with all of its trajectories."""

    whole_groups = True
    fixed_batches = False
    at_hand = 16

    def next_prompt(self, prompts: Sequence[Prompt]) -> int | None:
        return 0

    def rank(self, group: Group, index: int) -> float:
        """Return the version of the group's oldest token, because groups with older tokens must be trained earlier."""
        return group.start

    def next_batch(self, ready: ReadyGroups) -> Sequence[Group] | None:
        return ready.oldest()


class WholeBatches(OldestReady):
    """Trains the same batches as synchronous training: consecutive prompts of the data, in the order of the data.

    This requires one batch per version and a staleness bound of 0 or 1 (docs/staleness.md).
    """

    fixed_batches = True

    def next_batch(self, ready: ReadyGroups) -> Sequence[Group] | None:
        return ready.fixed()


class Turns(OldestReady):
    """Like `OldestReady`, but fills each free slot with a trajectory of any group.

    This is the default policy if replicas use the trainer's accelerators, except with ``at_swap=drain``.
    """

    whole_groups = False


POLICIES: dict[str, type[AdmissionPolicy]] = {
    "oldest_ready": OldestReady,
    "whole_batches": WholeBatches,
    "turns": Turns,
}


def admission_policy(name: str) -> AdmissionPolicy:
    """Return a new admission policy, given the value of the setting: a key of `POLICIES`, or a class's dotted name.

    Raises:
        SettingError: the class cannot be loaded, or lacks a member of `AdmissionPolicy`.
    """
    allowed = f"one of {', '.join(POLICIES)}, or the dotted name of a class, module.Class"
    if name in POLICIES:
        return POLICIES[name]()
    module, _, class_name = name.rpartition(".")
    if not module:
        raise SettingError(SETTING, name, allowed)
    try:
        policy = getattr(importlib.import_module(module), class_name)()
    except Exception as error:  # a user's module may raise anything
        raise SettingError(SETTING, name, allowed, f"This policy cannot be loaded: {told(error)}") from error
    has = ("whole_groups", "fixed_batches", "at_hand", "next_prompt", "rank", "next_batch")
    if lacking := [each for each in has if not hasattr(policy, each)]:
        raise SettingError(
            SETTING, name, allowed, f"The policy lacks {', '.join(lacking)}: derive it from OldestReady."
        )
    loaded: AdmissionPolicy = policy
    return loaded


def asked(policy: AdmissionPolicy, question: str, *arguments: Any) -> Any:
    """Call the method ``question`` of an admission policy; raise PolicyError if the method raises an exception."""
    try:
        return getattr(policy, question)(*arguments)
    except RecipeError:
        raise
    except Exception as error:  # a user's policy may raise anything
        raise PolicyError(f"{_name(policy)}.{question} raised {told(error)}") from error


def chosen_prompt(policy: AdmissionPolicy, prompts: Sequence[Prompt]) -> int | None:
    """Return the index of the prompt that the policy starts now, or None; raise PolicyError if the index is wrong."""
    place = asked(policy, "next_prompt", prompts)
    if place is None or (isinstance(place, int) and 0 <= place < len(prompts)):
        return None if place is None else int(place)
    raise PolicyError(f"{_name(policy)}.next_prompt returned {place!r}, not an index of {len(prompts)} prompts")


def rank_of(policy: AdmissionPolicy, group: Group, index: int) -> float:
    """Return the policy's priority for a trajectory that waits for a slot. It must be a number, else PolicyError."""
    rank = asked(policy, "rank", group, index)
    if isinstance(rank, int | float) and not math.isnan(rank):
        return rank
    raise PolicyError(f"{_name(policy)}.rank returned {rank!r}, which is not a number")


def chosen_batch(policy: AdmissionPolicy, ready: ReadyGroups) -> Batch | None:
    """Return the batch that the policy chooses, or None. Call `checked` before using the groups of the batch."""
    found = asked(policy, "next_batch", ready)
    if found is None or isinstance(found, Batch):
        return found
    groups = checked(policy, found, ready)
    return Batch(Counter(group.start for group in groups), lambda: groups)


def checked(policy: AdmissionPolicy, chosen: Any, ready: ReadyGroups) -> list[Group]:
    """Return the ledger's `Group` objects for ``chosen``; raise PolicyError unless they are ready and fill a batch."""
    try:
        groups = [ready.find(group.id) for group in chosen]
    except (TypeError, AttributeError) as error:
        raise PolicyError(
            f"{_name(policy)}.next_batch returned {type(chosen).__name__}, instead of a list of groups"
        ) from error
    there = {group.id: group for group in groups if group is not None}
    if not len(groups) == len(there) == ready.batch_groups:
        raise PolicyError(
            f"{_name(policy)}.next_batch must return {ready.batch_groups} different ready groups, but returned "
            f"{len(groups)} groups, of which {len(there)} are different and ready"
        )
    return list(there.values())


def _name(policy: AdmissionPolicy) -> str:
    return f"the admission policy {type(policy).__module__}.{type(policy).__qualname__}"

# SPDX-License-Identifier: Apache-2.0
"""The sample ledger, which knows the state of every prompt group of a run.

Contract. A group is RUNNING (being generated), READY (complete and rewarded), TAKEN (leased by the trainer for the
present step), TRAINED, FILTERED or FAILED. At all times

    issued = trained + filtered + failed + live,        live = running + ready + taken,

and no prompt is issued or trained twice in an epoch, also after a restart from a checkpoint. The staleness gate
(`core/gate.py`) decides whether a group may start and whether a batch may be trained; the admission policy
(`core/policy.py`) chooses the batch. The ledger has no clock and no threads; its caller holds a lock. When a group has
ended, the ledger counts it, and keeps nothing of it but its prompt's index, in a compact set. Proofs:
docs/staleness.md. Tests: tests/core/test_ledger.py, tests/core/test_gate_properties.py, tests/core/test_policy.py.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any, Self

from recipe.async_engine.core.errors import (
    GateError,
    LedgerError,
    LedgerIdentityError,
    SnapshotError,
    StalenessViolation,
)
from recipe.async_engine.core.gate import GateSettings, StalenessGate
from recipe.async_engine.core.groups import Group, GroupState, LedgerCounts, PromptRef, PromptSet, StalenessStats
from recipe.async_engine.core.live_groups import LiveGroups
from recipe.async_engine.core.policy import (
    AdmissionPolicy,
    Batch,
    OldestReady,
    ReadyGroups,
    checked,
    chosen_batch,
)


class SampleLedger:
    """The states of all prompt groups of a run, and the staleness gate that limits them.

    target_groups: number of groups that the run will train, a multiple of the batch size; None means no limit. The
    ledger never issues more groups than the run can still train.
    issue_limit: largest number of groups that may be issued; None means no limit.
    policy: the admission policy, which chooses the next batch among those that the gate allows. If the policy has
    ``fixed_batches``, each group gets a batch number when it is issued: that of the first batch that is not full. A
    group that is filtered or fails leaves a free place in its batch.
    """

    def __init__(
        self,
        settings: GateSettings,
        *,
        target_groups: int | None = None,
        issue_limit: int | None = None,
        policy: AdmissionPolicy | None = None,
    ) -> None:
        self.settings = settings
        self.policy = policy or OldestReady()
        self.target_groups = target_groups
        self.issue_limit = issue_limit
        self.staleness = StalenessStats()
        self._gate = StalenessGate(settings)
        self._issued = 0
        self._trained = 0
        self._filtered: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._live = LiveGroups()
        self._leased: list[int] = []
        self._issued_prompts = PromptSet()
        self._trained_prompts = PromptSet()

    @property
    def version(self) -> int:
        """Return the current policy version: the number of times that `seal` has been called since the run began."""
        return self._gate.version

    @property
    def announced(self) -> int:
        """Return the version with which replicas generate: the current one, or an older one during a weight sync."""
        return self._gate.announced

    @property
    def batches_left(self) -> int:
        """Return how many batches the trainer has yet to take before the next version. If this is 0, call `seal`."""
        return self._gate.batches_left

    def find(self, group_id: int) -> Group | None:
        """Return the live group with this id; None if the group was trained, filtered, failed or never issued."""
        return self._live.find(group_id)

    def in_state(self, state: GroupState) -> list[Group]:
        """Return the live groups in this state, in issue order."""
        return self._live.in_state(state)

    def count(self, state: GroupState) -> int:
        return self._live.count(state)

    def leased(self) -> list[Group]:
        """Return the groups of the batch that the trainer has taken and not yet trained; [] if there is none."""
        return [self._live[group_id] for group_id in self._leased]

    def trained_prompts(self) -> list[list[int]]:
        """Return all trained prompts as sorted rows [epoch, first, end], one for each range of indices first..end-1."""
        return self._trained_prompts.to_rows()

    def can_issue(self) -> bool:
        return not self.all_issued and self._gate.admits()

    @property
    def most_live(self) -> int:
        """Return how many groups the staleness gate allows to be running or ready now."""
        return self._gate.admission_limit

    @property
    def all_issued(self) -> bool:
        """Return whether no further group has to be issued, provided that every live group will be trained."""
        if self.issue_limit is not None and self._issued >= self.issue_limit:
            return True
        return self.target_groups is not None and self._trained + len(self._live) >= self.target_groups

    def batch_possible(self, prompts_left: int) -> bool:
        """Return whether the live groups and ``prompts_left`` further prompts are enough for one more batch.

        When no batch is ready, the trainer waits if this is True, and ends the run if it is False. Groups that are
        filtered or fail can turn True into False.
        """
        if self.issue_limit is not None:
            prompts_left = min(prompts_left, self.issue_limit - self._issued)
        if self.target_groups is not None:
            prompts_left = min(prompts_left, self.target_groups - self._trained - len(self._live))
        # With fixed batches, count only the next batch's groups: live groups of later batches cannot move into it.
        in_batch = self._live.places_taken(self._first_untaken()) if self.policy.fixed_batches else 0
        candidates = in_batch if self.policy.fixed_batches else len(self._live) - len(self._leased)
        return candidates + max(0, prompts_left) >= self.settings.batch_groups

    def issue(self, prompt: PromptRef) -> Group:
        """Add a running group for this prompt. Its generation starts with the weights of the version `announced`."""
        if prompt.key in self._issued_prompts:
            raise LedgerError(f"prompt {prompt.index} of epoch {prompt.epoch} has already been issued")
        if not self.can_issue():
            raise LedgerError(
                f"no group may be issued now: {len(self._live)} of {self._gate.admission_limit} groups are live, "
                f"version {self.version}, newest announced version {self.announced}, "
                f"{self._trained} of {self.target_groups} groups trained, {self._issued} of {self.issue_limit} issued"
            )
        start = self._gate.add()
        batch = self._batch_with_a_place() if self.policy.fixed_batches else None
        group = Group(self._issued, prompt, start, batch=batch)
        self._live.put(group)
        self._issued_prompts.add(prompt.key)
        self._issued += 1
        return group

    def mark_ready(self, group_id: int, oldest_version: int) -> Group:
        """Mark a complete, rewarded group as ready; ``oldest_version`` is the version that sampled its oldest token."""
        group = self._live_group(group_id, "ready", GroupState.RUNNING)
        if not group.start <= oldest_version <= self.announced:
            raise LedgerError(
                f"the oldest token of group {group_id} is of version {oldest_version}, expected "
                f"{group.start}..{self.announced}"
            )
        self._gate.move(group.start, oldest_version)
        return self._update(replace(group, state=GroupState.READY, start=oldest_version))

    def restart(self, group_id: int) -> Group:
        """Set a running or ready group back to running, because its attempt failed or its answers were lost."""
        group = self._live_group(group_id, "restart", GroupState.RUNNING, GroupState.READY)
        self._gate.move(group.start, self.announced)
        return self._update(replace(group, state=GroupState.RUNNING, start=self.announced, attempts=group.attempts + 1))

    def filter(self, group_id: int, reason: str) -> Group:
        """Remove a group that is left out of training on purpose. Filtered groups are counted by ``reason``."""
        return self._give_up(group_id, "filter", GroupState.FILTERED, self._filtered, reason)

    def fail(self, group_id: int, reason: str) -> Group:
        """Remove a group that cannot be generated. Failed groups are counted by ``reason``."""
        return self._give_up(group_id, "fail", GroupState.FAILED, self._failed, reason)

    def may_take(self) -> bool:
        """Return whether a batch can be taken now. The call's duration does not grow with the number of live groups."""
        return self._choice() is not None

    def next_batch(self) -> list[Group] | None:
        """Return the groups of the batch that `take` would lease now, or None if no batch may be taken."""
        batch = self._choice()
        return None if batch is None else checked(self.policy, batch, self._ready())

    def take(self) -> list[Group]:
        """Lease the next batch to the trainer, until `mark_trained` or `return_batch` is called. Return its groups."""
        if self._leased:
            raise LedgerError(f"the trainer still holds groups {self._leased}: mark them as trained or return them")
        batch = self.next_batch()
        if batch is None:
            raise LedgerError(f"no batch of version {self.version} can be taken now; the groups are {self.counts()}")
        stale = [group for group in batch if self.version - group.start > self.settings.max_staleness]
        if stale:
            raise StalenessViolation(
                f"at version {self.version} these groups exceed max_staleness={self.settings.max_staleness}: {stale}"
            )
        self._gate.take([group.start for group in batch])
        self._leased = [group.id for group in batch]
        return [self._update(replace(group, state=GroupState.TAKEN)) for group in batch]

    def return_batch(self) -> None:
        """Make the groups of the leased batch ready again, because the trainer has not trained them."""
        if not self._leased:
            raise LedgerError("no batch is leased, so none can be returned")
        groups, self._leased = self.leased(), []
        self._gate.give_back([group.start for group in groups])
        for group in groups:
            self._update(replace(group, state=GroupState.READY))

    def mark_trained(self) -> StalenessStats:
        """Record that the weights now include the leased batch; return the staleness of its groups.

        Call this before a checkpoint of these weights is written, so that ledger and weights agree.
        """
        if not self._leased:
            raise LedgerError("no batch is leased, so none can be marked as trained")
        batch_staleness = StalenessStats()
        for group in self.leased():
            if not self._trained_prompts.add(group.prompt.key):
                raise LedgerIdentityError(f"prompt {group.prompt} is trained twice, the second time by {group}")
            self._live.remove(group.id)
            self._trained += 1
            for stats in (self.staleness, batch_staleness):
                stats[self.version - group.start] += 1
        self._leased = []
        self._check_books()
        return batch_staleness

    def seal(self) -> int:
        """Record that the trainer's present weights are the next version, and return that version's number."""
        if self._leased:
            raise LedgerError(f"version {self.version + 1} cannot be made yet: the trainer holds groups {self._leased}")
        return self._gate.seal()

    def announce(self) -> int:
        """Record that all rollout replicas now generate with the version after `announced`, and return that version."""
        return self._gate.announce()

    def counts(self) -> LedgerCounts:
        return LedgerCounts(
            issued=self._issued,
            trained=self._trained,
            filtered=self._filtered.total(),
            failed=self._failed.total(),
            live=len(self._live),
            running=self._live.count(GroupState.RUNNING),
            ready=self._live.count(GroupState.READY),
            taken=self._live.count(GroupState.TAKEN),
            filtered_by_reason=dict(self._filtered),
            failed_by_reason=dict(self._failed),
        )

    def check_identity(self) -> None:
        """Raise `LedgerIdentityError` if the ledger's counts do not fit together, or do not fit the live groups or the
        gate's counts.
        """
        recount = Counter((group.state, group.start) for group in self._live.all())
        counted = {(state, start): n for state in GroupState for start, n in self._live.starts(state).items()}
        if counted != recount:
            raise LedgerIdentityError(f"the ledger counts live groups as {counted}, but they are {dict(recount)}")
        self._check_books()

    def _check_books(self) -> None:
        """Make those checks of `check_identity` that are fast enough for every step: they do not read each group."""
        counts = self.counts()
        by_start = {state: self._live.starts(state) for state in GroupState}
        open_starts = Counter(by_start[GroupState.RUNNING]) + Counter(by_start[GroupState.READY])
        agree = {
            "issued = trained + filtered + failed + live": counts.issued
            == counts.trained + counts.filtered + counts.failed + counts.live,
            "live = running + ready + taken": counts.live == counts.running + counts.ready + counts.taken,
            "each live group is counted in its state": all(
                self.count(state) == sum(starts.values()) for state, starts in by_start.items()
            ),
            "every issued prompt is recorded": len(self._issued_prompts) == counts.issued,
            "every trained prompt is recorded": len(self._trained_prompts) == counts.trained,
            "every trained group's staleness is recorded": self.staleness.total() == counts.trained,
            "the leased groups are the taken ones": len(self._leased) == counts.taken,
            "the gate knows the running and ready groups": self._gate.starts() == dict(sorted(open_starts.items())),
        }
        broken = [identity for identity, holds in agree.items() if not holds]
        if broken:
            raise LedgerIdentityError(
                f"the ledger violates {broken}: its counts are {counts}; the gate's counts of running and ready groups "
                f"by start version are {self._gate.starts()}"
            )

    def snapshot(self) -> dict[str, Any]:
        """Return the ledger's state as JSON-compatible values, for a checkpoint of the present weights.

        If a batch is leased, these weights are not trained on it yet. So its groups are saved as ready, and a resumed
        run takes them again.
        """
        self.check_identity()
        return {
            "max_staleness": self.settings.max_staleness,
            "version": self.version,
            "batches_taken": self._gate.batches_taken - (1 if self._leased else 0),
            "issued": self._issued,
            "trained": self._trained,
            "filtered": dict(self._filtered),
            "failed": dict(self._failed),
            "staleness": [list(row) for row in sorted(self.staleness.items())],
            "issued_prompts": self._issued_prompts.to_rows(),
            "trained_prompts": self._trained_prompts.to_rows(),
            "live": [group.to_row() for group in self._live.all()],
        }

    @classmethod
    def restore(cls, snapshot: Mapping[str, Any], settings: GateSettings, **rules: Any) -> Self:
        """Return a ledger with the state in ``snapshot``; call `core.snapshots.changes` first to compare the settings.

        ``rules`` are the constructor's keyword arguments. The limits among them (``target_groups``,
        ``issue_limit``) also count the groups from before the checkpoint. Running groups keep their start versions,
        because generation continues from their saved tokens.
        Raise SnapshotError if the groups in the snapshot break the staleness bound in ``settings``.
        """
        ledger = cls(settings, **rules)
        groups = [Group.from_row(row) for row in snapshot["live"]]
        for group in groups:
            ledger._live.put(group)
        try:
            ledger._gate = StalenessGate(
                settings,
                version=snapshot["version"],
                batches_taken=snapshot["batches_taken"],
                starts=[group.start for group in groups],
            )
        except (GateError, StalenessViolation) as error:
            raise SnapshotError(
                f"the groups of the checkpoint do not fit max_staleness = {settings.max_staleness} (it was "
                f"{snapshot['max_staleness']}): {error}. Resume with the value of the checkpoint or a larger one."
            ) from error
        ledger._issued = snapshot["issued"]
        ledger._trained = snapshot["trained"]
        ledger._filtered = Counter(snapshot["filtered"])
        ledger._failed = Counter(snapshot["failed"])
        ledger.staleness = StalenessStats(dict(snapshot["staleness"]))
        ledger._issued_prompts = PromptSet(snapshot["issued_prompts"])
        ledger._trained_prompts = PromptSet(snapshot["trained_prompts"])
        ledger.check_identity()
        return ledger

    def _choice(self) -> Batch | None:
        """Return the batch to take now, or None if no batch can be taken.

        The policy chooses the batch. If the gate refuses it and batches are not fixed, the batch is the oldest ready
        groups, unless the gate refuses these too.
        """
        if self._live.count(GroupState.READY) < self.settings.batch_groups:
            return None
        ready = self._ready()
        chosen = chosen_batch(self.policy, ready)
        if chosen is None or self._gate.can_take(chosen.starts):
            return chosen
        oldest = ready.oldest()
        return oldest if not self.policy.fixed_batches and self._gate.can_take(oldest.starts) else None

    def _ready(self) -> ReadyGroups:
        return ReadyGroups(self._live, self.settings.batch_groups, self.version, self._first_untaken())

    def _first_untaken(self) -> int:
        """Return the number of the next batch to take, counted from 0 over the run."""
        return (self._trained + len(self._leased)) // self.settings.batch_groups

    def _batch_with_a_place(self) -> int:
        size = self.settings.batch_groups
        return next(batch for batch in count(self._first_untaken()) if self._live.places_taken(batch) < size)

    def _live_group(self, group_id: int, transition: str, *states: GroupState) -> Group:
        group = self._live.find(group_id)
        if group is not None and group.state in states:
            return group
        if group is not None:
            present = f"{group.state}, not {' or '.join(states)}"
        else:
            present = "trained, filtered or failed" if 0 <= group_id < self._issued else "never issued"
        raise LedgerError(f"group {group_id} is {present}: it cannot make the transition '{transition}'")

    def _update(self, group: Group) -> Group:
        self._live.put(group)
        return group

    def _give_up(self, group_id: int, transition: str, state: GroupState, reasons: Counter[str], reason: str) -> Group:
        group = self._live_group(group_id, transition, GroupState.RUNNING, GroupState.READY)
        reasons[reason] += 1
        self._gate.remove(group.start)
        self._live.remove(group.id)
        return replace(group, state=state, reason=reason)

# SPDX-License-Identifier: Apache-2.0
"""The sample ledger: every prompt group ever issued is in exactly one state.

Contract. A group is RUNNING (being generated), READY (complete and rewarded), TAKEN (leased by the trainer for the
present step), TRAINED, FILTERED or FAILED. At all times

    issued = trained + filtered + failed + live,        live = running + ready + taken,

no prompt of an epoch is issued or trained twice, and a restored snapshot preserves both properties. The staleness gate
decides whether a group may start and a batch may be trained; the admission policy chooses the batch. The ledger is
plain state without clock, threads or events. Its caller holds the lock. Proofs: docs/staleness.md. Tests:
tests/core/test_ledger.py, tests/core/test_gate_properties.py, tests/core/test_policy.py.

Of groups that have ended only counts and runs of prompt indices are kept, so memory and snapshots are bounded by the
live groups and the number of runs.
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
    """All prompt groups of a run and their states, on top of one `StalenessGate`.

    target_groups: number of groups that the run will train, a multiple of b (groups in a batch). The ledger issues no
    more groups than can still be trained.
    issue_limit: largest number of groups that may be issued; None means no limit.
    policy: the admission policy, which chooses the next batch among those that the gate allows. If it fixes batches at
    issue, batches are numbered from 0, and a group joins the first batch with a free slot. The slot of a group that is
    filtered or fails goes to the next group that is issued.
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
        """Return v, the current policy version, from which training continues."""
        return self._gate.version

    @property
    def announced(self) -> int:
        """Return a, the newest version that generates: v, or an earlier one while later ones are being published."""
        return self._gate.announced

    @property
    def batches_left(self) -> int:
        """Return how many batches of the current version have not been taken. At 0 the version must be sealed."""
        return self._gate.batches_left

    def find(self, group_id: int) -> Group | None:
        """Return the live group with this id, or None if the group has ended or was never issued."""
        return self._live.find(group_id)

    def in_state(self, state: GroupState) -> list[Group]:
        """Return the live groups in this state, in issue order."""
        return self._live.in_state(state)

    def count(self, state: GroupState) -> int:
        """Return the number of live groups in this state."""
        return self._live.count(state)

    def leased(self) -> list[Group]:
        """Return the groups of the batch that the trainer holds, oldest first; [] if it holds no batch."""
        return [self._live[group_id] for group_id in self._leased]

    def trained_prompts(self) -> list[list[int]]:
        """Return [epoch, first, end] for every run of trained prompt indices first..end-1, sorted."""
        return self._trained_prompts.to_rows()

    def can_issue(self) -> bool:
        """Return whether one more group may be issued now."""
        return not self.all_issued and self._gate.admits()

    @property
    def most_live(self) -> int:
        """How many groups the staleness gate lets be live now."""
        return self._gate.admission_limit

    @property
    def all_issued(self) -> bool:
        """Return whether the run needs no further group unless a live group is filtered or fails."""
        if self.issue_limit is not None and self._issued >= self.issue_limit:
            return True
        return self.target_groups is not None and self._trained + len(self._live) >= self.target_groups

    def batch_possible(self, prompts_left: int) -> bool:
        """Return whether one more batch can form from the groups not yet trained and ``prompts_left`` further prompts.

        If no batch is ready, the trainer waits if the result is True and ends the run if it is False. Groups that are
        filtered or fail later can make it False.
        """
        if self.issue_limit is not None:
            prompts_left = min(prompts_left, self.issue_limit - self._issued)
        if self.target_groups is not None:
            prompts_left = min(prompts_left, self.target_groups - self._trained - len(self._live))
        # With batches fixed at issue, only a new group can fill a free slot of a batch.
        in_batch = self._live.places_taken(self._first_untaken()) if self.policy.fixed_batches else 0
        candidates = in_batch if self.policy.fixed_batches else len(self._live) - len(self._leased)
        return candidates + max(0, prompts_left) >= self.settings.batch_groups

    def issue(self, prompt: PromptRef) -> Group:
        """Issue a group for this prompt; its generation starts at the announced version."""
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
        """Mark a running group as complete; its oldest token has a version from its start version to `announced`."""
        group = self._live_group(group_id, "ready", GroupState.RUNNING)
        if not group.start <= oldest_version <= self.announced:
            raise LedgerError(
                f"the oldest token of group {group_id} is of version {oldest_version}, expected "
                f"{group.start}..{self.announced}"
            )
        self._gate.move(group.start, oldest_version)
        return self._update(replace(group, state=GroupState.READY, start=oldest_version))

    def restart(self, group_id: int) -> Group:
        """Generate a group from scratch again, because its attempt failed or the payload of a ready group was lost."""
        group = self._live_group(group_id, "restart", GroupState.RUNNING, GroupState.READY)
        self._gate.move(group.start, self.announced)
        return self._update(replace(group, state=GroupState.RUNNING, start=self.announced, attempts=group.attempts + 1))

    def filter(self, group_id: int, reason: str) -> Group:
        """Leave a group out of training on purpose and free its batch slot; ``reason`` is a key for the counts."""
        return self._give_up(group_id, "filter", GroupState.FILTERED, self._filtered, reason)

    def fail(self, group_id: int, reason: str) -> Group:
        """Give up a group that cannot be generated and free its batch slot; ``reason`` is a key for the counts."""
        return self._give_up(group_id, "fail", GroupState.FAILED, self._failed, reason)

    def may_take(self) -> bool:
        """Return whether `next_batch` would return a batch. The cost does not depend on the number of live groups."""
        return self._choice() is not None

    def next_batch(self) -> list[Group] | None:
        """Return the batch that `take` would lease now, after verifying it, or None."""
        batch = self._choice()
        return None if batch is None else checked(self.policy, batch, self._ready())

    def take(self) -> list[Group]:
        """Lease the next batch to the trainer until `mark_trained` or `return_batch` is called."""
        if self._leased:
            raise LedgerError(f"the trainer still holds groups {self._leased}")
        batch = self.next_batch()
        if batch is None:
            raise LedgerError(f"no batch may be taken now at version {self.version}: {self.counts()}")
        stale = [group for group in batch if self.version - group.start > self.settings.max_staleness]
        if stale:
            raise StalenessViolation(
                f"groups past max_staleness {self.settings.max_staleness} at {self.version}: {stale}"
            )
        self._gate.take([group.start for group in batch])
        self._leased = [group.id for group in batch]
        return [self._update(replace(group, state=GroupState.TAKEN)) for group in batch]

    def return_batch(self) -> None:
        """Take back the leased batch without training it: its groups become ready again."""
        if not self._leased:
            raise LedgerError("no batch is leased, so none can be returned")
        groups, self._leased = self.leased(), []
        self._gate.give_back([group.start for group in groups])
        for group in groups:
            self._update(replace(group, state=GroupState.READY))

    def mark_trained(self) -> StalenessStats:
        """Record that the leased batch is trained into the weights; return the staleness of its groups.

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
        """Seal the next version, whose weights the trainer now has, and return the version."""
        if self._leased:
            raise LedgerError(f"version {self.version + 1} cannot be sealed: the trainer holds groups {self._leased}")
        return self._gate.seal()

    def announce(self) -> int:
        """Announce the oldest sealed version, whose weights every live replica now uses, and return the version."""
        return self._gate.announce()

    def counts(self) -> LedgerCounts:
        """Return the number of groups by state."""
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
        """Raise `LedgerIdentityError` unless all counts of the ledger agree with each other and with the gate.

        This reads every live group; each training step runs only the cheaper `_check_books`.
        """
        recount = Counter((group.state, group.start) for group in self._live.all())
        counted = {(state, start): n for state in GroupState for start, n in self._live.starts(state).items()}
        if counted != recount:
            raise LedgerIdentityError(f"live groups by state and start version: {dict(recount)}, index: {counted}")
        self._check_books()

    def _check_books(self) -> None:
        """Run the checks of `check_identity` whose cost does not grow with the number of live groups."""
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
            "the lease is what is taken": len(self._leased) == counts.taken,
            "the gate knows the running and ready groups": self._gate.starts() == dict(sorted(open_starts.items())),
        }
        broken = [identity for identity, holds in agree.items() if not holds]
        if broken:
            raise LedgerIdentityError(f"broken identities: {broken}; {counts}; gate: {self._gate.starts()}")

    def snapshot(self) -> dict[str, Any]:
        """Return a JSON-compatible snapshot of the ledger, for a checkpoint whose weights include all trained batches.

        A leased batch is not in those weights, so its groups are saved as ready and will be taken again.
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
        """Rebuild a ledger from a snapshot whose settings `core.snapshots.changes` has accepted.

        ``rules`` are the constructor's keyword arguments; their limits count from the beginning of the run, not from
        the resume. Ready groups stay ready. Running groups stay running with their start versions, because their tokens
        are continued. A batch that was leased is ready again, so the restored weights are trained on it once.
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
        """Return the batch to take now: the admission policy's, or the oldest groups if the gate requires those."""
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
        """Return the number of the next batch to take, for batches that are fixed at issue."""
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

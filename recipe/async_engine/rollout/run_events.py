# SPDX-License-Identifier: Apache-2.0
"""What the record of events says of a trajectory's attempt and of a group's end; docs/run-record.md has the meaning."""

from __future__ import annotations

import time
from collections.abc import Iterator

from recipe.async_engine.core.groups import Group, GroupState
from recipe.async_engine.record.events import GROUPS, TRAJECTORIES, Event
from recipe.async_engine.rollout.group_run import GroupRun


def of_group(run: GroupRun, group: Group, version: int, reason: str | None = None) -> Iterator[Event]:
    """A group was trained at ``version``, or was filtered or failed for a ``reason``; now."""
    now = time.monotonic()
    what = "trained" if group.state is GroupState.TAKEN else group.state.value
    if run.ready_at:
        yield Event(GROUPS, "ready", run.ready_at, now, version=version, group=group.id)
    tokens, start = run.sampled_tokens, run.group.start
    yield Event(GROUPS, what, run.issued_at, now, version=start, group=group.id, tokens=tokens, text=reason)


def of_attempt(run: GroupRun, n: int, began: float, sampled: float | None) -> Iterator[Event]:
    """An attempt at a trajectory is over now; ``sampled``: when its last token was, if it came so far."""
    now, trajectory = time.monotonic(), run.trajectories[n]
    scored = trajectory.scored
    attempt = Event(TRAJECTORIES, "generating", began, sampled or now, 1.0, run.group.start, run.group.id, n)
    tokens = None if scored is None else scored.sampled_tokens
    ended = "" if scored is not None else ", without a reward"
    yield attempt._replace(tokens=tokens, text=f"attempt {len(trajectory.errors) + 1}{ended}")
    if sampled is not None:
        yield attempt._replace(what="reward", start=sampled, end=now)
    if scored is not None and scored.tool_s and sampled is not None:
        yield attempt._replace(what="tools", start=sampled - scored.tool_s, end=sampled, tokens=None)
    if scored is not None and scored.interruptions:
        yield attempt._replace(what="interrupted", tokens=scored.reprefilled_tokens)

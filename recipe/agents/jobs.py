# SPDX-License-Identifier: Apache-2.0
"""Keeps the agents that are to run on hosts of the user, and decides for `recipe.agents.desk` which host runs which.

Contract: a job is one trajectory's agent. A host that takes it has to report within `BEGIN_S` that it has begun, and
then at least every `SILENT_S`. A job whose host has not begun in time goes to another host, with a higher turn number,
so that the first host's reports are refused if it begins after all. A job whose host has begun and falls silent fails.
A job for which the run does not ask any more is forgotten, and its host has to end it. In a desk's first `OPENS_S` it
gives out no jobs and takes over those that hosts report, because an earlier desk may have given these out. Shown by
tests/core/test_agent_jobs.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

POLL_S, BEAT_S = 20.0, 5.0
BEGIN_S, SILENT_S = 15.0, 60.0
OPENS_S = 2 * BEAT_S
UNASKED_S = POLL_S + 15.0
NO_HOST_S = 120.0


@dataclass
class Job:
    """``until`` is the time by which its host has to report, or None if no host has it.

    ``result`` is a mapping with ``returned`` or ``failed``.
    """

    work: Mapping[str, Any]
    made: float
    asked: float
    turn: int = 0
    until: float | None = None
    has_begun: bool = False
    result: Mapping[str, Any] | None = None


@dataclass
class Jobs:
    """The jobs whose result the run does not have yet. ``now`` is the current time, ``heard`` that of the last message
    from any host.
    """

    began: float
    heard: float = float("-inf")
    jobs: dict[str, Job] = field(default_factory=dict)

    def ask(self, name: str, work: Mapping[str, Any], now: float) -> Job:
        """Return the job called ``name`` for the run, and make it if there is none."""
        job = self.jobs.setdefault(name, Job(work, now, now))
        job.work, job.asked = work, now
        return job

    def take(self, now: float) -> tuple[str, Job] | None:
        """Give the oldest waiting job to a host."""
        self.heard = now
        for name, job in self.jobs.items():
            if now >= self.began + OPENS_S and job.until is None and job.result is None:
                job.turn, job.until = job.turn + 1, now + BEGIN_S
                return name, job
        return None

    def report(self, name: str, turn: int, result: Mapping[str, Any] | None, now: float) -> bool:
        """Note that a host runs a job, or how it ended there; return whether the host may go on."""
        self.heard = now
        if now < self.began + OPENS_S:  # a host that an earlier desk gave this job
            earlier = self.jobs.setdefault(name, Job({}, now, now))
            earlier.turn = max(earlier.turn, turn)
        job = self.jobs.get(name)
        if job is None or job.turn != turn or job.result is not None:
            return False
        job.has_begun, job.until, job.result = True, now + SILENT_S, result
        return True

    def expire(self, now: float) -> None:
        """Forget jobs for which the run no longer asks. Let a job that its host has not begun in time wait for another
        host. Fail a job if its host has fallen silent, or if it waits and no host has been connected for long.
        """
        for name, job in list(self.jobs.items()):
            if now > job.asked + UNASKED_S:
                del self.jobs[name]
            elif job.result is None and job.until is None and now > max(job.made, self.heard) + NO_HOST_S:
                job.result = {"failed": f"no host has been connected for {NO_HOST_S:g} s"}
            elif job.result is None and job.until is not None and now > job.until:
                job.until = None
                if job.has_begun:
                    job.result = {"failed": f"the agent's host has not been heard of for {SILENT_S:g} s"}

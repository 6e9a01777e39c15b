# SPDX-License-Identifier: Apache-2.0
"""Which host runs which job: the decisions of `recipe.agents.desk`, with the time passed in.

Contract: a job is one trajectory's agent. A host's poll states everything that it knows: how many more agents it can
run, which jobs it runs, and how those ended that it has not reported before. So a lost answer loses nothing: a job that
was given to a host, and that its next poll does not mention, goes to another host. A job that a host has begun runs
nowhere else: if the host is silent for `SILENT_S`, or no longer runs it, the job fails. A job for which nobody asks any
more is forgotten, and its host is told to end it. In the first `OPENS_S` nothing is given out and nothing ended,
because hosts may already run jobs of an earlier desk. Shown by tests/core/test_agent_jobs.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

POLL_S = 20.0
SILENT_S = 60.0
OPENS_S = 5.0
UNASKED_S = 15.0
NO_HOST_S = 120.0


@dataclass
class Job:
    """``work`` is what a host gets. ``result`` has the key ``returned`` or ``failed``. ``asked`` is the time at which
    the run last asked for the result, or None while it waits for it.
    """

    work: Mapping[str, Any]
    made: float
    host: str | None = None
    has_begun: bool = False
    result: Mapping[str, Any] | None = None
    asked: float | None = None


@dataclass
class Jobs:
    """The jobs that are not done, by their name, and the time at which each host was last heard of."""

    began: float
    jobs: dict[str, Job] = field(default_factory=dict)
    heard: dict[str, float] = field(default_factory=dict)

    def ask(self, name: str, work: Mapping[str, Any], now: float) -> Job:
        """Return the job called ``name``, which is made if there is none."""
        job = self.jobs.setdefault(name, Job(work, now))
        job.asked = None
        return job

    def poll(
        self, host: str, free: int, running: Collection[str], done: Mapping[str, Mapping[str, Any]], now: float
    ) -> tuple[dict[str, Mapping[str, Any]], list[str]]:
        """Return the jobs that ``host`` has to start, and the names of those that it has to end."""
        self.heard[host] = now
        for name, job in self.jobs.items():
            if job.result is not None or (job.host not in (host, None)):
                continue
            if name in done:
                job.host, job.result = host, done[name]
            elif name in running:
                job.host, job.has_begun = host, True
            elif job.host == host and job.has_begun:
                job.result = {"failed": f"the host {host} has ended, or lost this agent"}
            else:
                job.host = None
        if now < self.began + OPENS_S:
            return {}, []
        waiting = [name for name, job in self.jobs.items() if job.host is None and job.result is None]
        started = waiting[: max(free, 0)]
        for name in started:
            self.jobs[name].host = host
        ended = [name for name in running if name not in self.jobs or self.jobs[name].host != host]
        return {name: self.jobs[name].work for name in started}, ended

    def expire(self, now: float) -> None:
        """Forget silent hosts and jobs for which nobody asks; fail the jobs that no host can finish."""
        for host in [host for host, heard in self.heard.items() if now > heard + SILENT_S]:
            del self.heard[host]
            for job in self.jobs.values():
                if job.host == host and job.result is None:
                    if job.has_begun:
                        job.result = {"failed": f"the host {host} has not been heard of for {SILENT_S:g} s"}
                    else:
                        job.host = None
        for name, job in list(self.jobs.items()):
            if job.asked is not None and now > job.asked + UNASKED_S:
                del self.jobs[name]
            elif job.host is None and job.result is None and not self.heard and now > job.made + NO_HOST_S:
                job.result = {"failed": f"no host has been connected for {NO_HOST_S:g} s"}

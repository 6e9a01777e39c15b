# SPDX-License-Identifier: Apache-2.0
"""Which host runs which agent, under lost answers, hosts that die, and a run that gives up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from recipe.agents.jobs import BEGIN_S, NO_HOST_S, OPENS_S, SILENT_S, UNASKED_S, Jobs

DONE = {"returned": 1.0}


def opened(*names: str) -> Jobs:
    jobs = Jobs(began=-OPENS_S)
    for name in names:
        jobs.ask(name, {"of": name}, 0.0)
    return jobs


def taken(jobs: Jobs, now: float) -> tuple[str, int] | None:
    found = jobs.take(now)
    return None if found is None else (found[0], found[1].turn)


def test_jobs_are_taken_in_their_order() -> None:
    jobs = opened("x", "y")
    assert [taken(jobs, 1.0) for _ in range(3)] == [("x", 1), ("y", 1), None]
    assert jobs.report("x", 1, DONE, 2.0)
    assert jobs.jobs["x"].result == DONE


def test_a_job_that_does_not_begin_goes_to_another_host() -> None:
    jobs = opened("x")
    assert taken(jobs, 1.0) == ("x", 1)
    jobs.expire(1.0 + BEGIN_S)
    assert taken(jobs, 1.0 + BEGIN_S) is None
    jobs.expire(2.0 + BEGIN_S)
    assert taken(jobs, 2.0 + BEGIN_S) == ("x", 2)
    assert not jobs.report("x", 1, None, 20.0)
    assert jobs.report("x", 2, DONE, 20.0)


def test_a_silent_host_costs_the_job_that_it_has_begun() -> None:
    jobs = opened("x")
    jobs.take(1.0)
    jobs.report("x", 1, None, 2.0)
    for now in (20.0, 40.0, 2.0 + SILENT_S):
        jobs.ask("x", {}, now)
        jobs.expire(now)
        assert jobs.jobs["x"].result is None
    jobs.expire(3.0 + SILENT_S)
    assert jobs.jobs["x"].result == {"failed": f"the agent's host has not been heard of for {SILENT_S:g} s"}
    assert not jobs.report("x", 1, DONE, 70.0)


def test_a_job_that_nobody_asks_for_ends_at_its_host() -> None:
    jobs = opened("x")
    jobs.take(1.0)
    jobs.expire(UNASKED_S)
    assert jobs.report("x", 1, None, UNASKED_S)
    jobs.expire(UNASKED_S + 1)
    assert not jobs.report("x", 1, None, UNASKED_S + 1)


def test_without_a_host_a_job_fails_at_a_deadline() -> None:
    jobs = opened("x")
    for seconds in range(0, int(NO_HOST_S) + 1, 20):
        jobs.ask("x", {}, seconds)
        jobs.expire(seconds)
    assert jobs.jobs["x"].result is None
    jobs.expire(NO_HOST_S + 1)
    assert jobs.jobs["x"].result == {"failed": f"no host has been connected for {NO_HOST_S:g} s"}


def test_a_desk_that_takes_over_learns_first_what_runs_where() -> None:
    jobs = Jobs(began=0.0)
    jobs.ask("x", {}, 1.0)
    assert taken(jobs, 2.0) is None
    assert jobs.report("x", 1, None, 3.0) and jobs.report("y", 4, None, 3.0)
    jobs.ask("y", {"of": "y"}, 4.0)
    assert taken(jobs, OPENS_S) is None
    assert jobs.report("y", 4, DONE, OPENS_S) and not jobs.report("z", 1, None, OPENS_S)


class Running(RuleBasedStateMachine):
    """Hosts with one place each, over answers that get lost. A result names its host."""

    HOSTS = ("a", "b", "c")

    def __init__(self) -> None:
        super().__init__()
        self.now, self.made = 0.0, 0
        self.jobs = Jobs(began=0.0)
        self.held: dict[str, tuple[str, int]] = {}
        self.begun: dict[str, str] = {}

    @rule()
    def ask(self) -> None:
        self.jobs.ask(f"job{self.made}", {}, self.now)
        self.made += 1

    @rule(host=st.sampled_from(HOSTS), arrives=st.booleans())
    def take(self, host: str, arrives: bool) -> None:
        if host not in self.held and (found := taken(self.jobs, self.now)) is not None:
            assert found[0] not in self.begun, "a job that has begun is given out again"
            if arrives:
                self.held[host] = found

    @precondition(lambda self: self.held)
    @rule(choose=st.data(), ends=st.booleans())
    def report(self, choose: Any, ends: bool) -> None:
        host = choose.draw(st.sampled_from(sorted(self.held)))
        name, turn = self.held[host]
        goes_on = self.jobs.report(name, turn, {"returned": host} if ends else None, self.now)
        if goes_on:
            assert self.begun.setdefault(name, host) == host, "two hosts run the same job"
        if ends or not goes_on:
            del self.held[host]

    @rule(host=st.sampled_from(HOSTS))
    def die(self, host: str) -> None:
        self.held.pop(host, None)

    @rule(seconds=st.sampled_from([1.0, BEGIN_S, 30.0, SILENT_S + 1]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for name, job in self.jobs.jobs.items():
            self.jobs.ask(name, job.work, self.now)
        self.jobs.expire(self.now)

    @invariant()
    def a_result_comes_from_the_host_that_ran_the_job(self) -> None:
        for name, job in self.jobs.jobs.items():
            if job.result is not None and "returned" in job.result:
                assert job.result["returned"] == self.begun[name]

    def teardown(self) -> None:
        """Every job ends, whatever happened, if one host lives and works."""
        self.held.clear()
        self.wait(30.0)
        self.wait(SILENT_S + 1)
        while (found := taken(self.jobs, self.now)) is not None:
            assert self.jobs.report(*found, DONE, self.now)
        assert all(job.result is not None for job in self.jobs.jobs.values())


TestRunning: Callable[..., Any] = Running.TestCase

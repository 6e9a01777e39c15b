# SPDX-License-Identifier: Apache-2.0
"""Which host runs which agent, under lost answers, hosts that die, and a run that gives up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from recipe.agents.jobs import NO_HOST_S, OPENS_S, SILENT_S, UNASKED_S, Jobs

HOSTS = ("a", "b", "c")


def opened(*names: str) -> Jobs:
    jobs = Jobs(began=-OPENS_S)
    for name in names:
        jobs.ask(name, {"of": name}, 0.0)
    return jobs


def test_a_host_gets_as_many_jobs_as_it_has_room_for_in_their_order() -> None:
    jobs = opened("x", "y", "z")
    assert jobs.poll("a", 2, [], {}, 1.0) == ({"x": {"of": "x"}, "y": {"of": "y"}}, [])
    assert jobs.poll("b", 2, [], {}, 1.0) == ({"z": {"of": "z"}}, [])
    assert jobs.poll("a", 2, ["x", "y"], {}, 2.0) == ({}, [])


def test_a_job_whose_answer_was_lost_goes_to_another_host() -> None:
    jobs = opened("x")
    assert list(jobs.poll("a", 1, [], {}, 1.0)[0]) == ["x"]
    jobs.poll("a", 0, [], {}, 2.0)
    assert list(jobs.poll("b", 1, [], {}, 3.0)[0]) == ["x"]
    # The answer arrives late all the same, and the host has begun: it has to end the agent.
    assert jobs.poll("a", 0, ["x"], {}, 4.0) == ({}, ["x"])


def test_a_silent_host_fails_what_it_has_begun_and_gives_back_what_it_has_not() -> None:
    jobs = opened("x")
    jobs.poll("a", 1, [], {}, 1.0)
    jobs.poll("a", 1, ["x"], {}, 2.0)
    jobs.ask("y", {}, 2.0)
    jobs.poll("a", 1, ["x"], {}, 3.0)
    jobs.expire(3.0 + SILENT_S)
    assert jobs.jobs["x"].result is None
    jobs.expire(4.0 + SILENT_S)
    assert jobs.jobs["x"].result == {"failed": f"the host a has not been heard of for {SILENT_S:g} s"}
    assert list(jobs.poll("b", 5, [], {}, 80.0)[0]) == ["y"]


def test_a_host_that_ends_in_order_fails_its_agents_at_once() -> None:
    jobs = opened("x", "y")
    jobs.poll("a", 2, [], {}, 1.0)
    jobs.poll("a", 0, ["x", "y"], {}, 2.0)
    jobs.poll("a", 0, [], {"x": {"returned": 1.0}}, 3.0)
    assert jobs.jobs["x"].result == {"returned": 1.0}
    assert "has ended, or lost" in jobs.jobs["y"].result["failed"]


def test_a_job_that_nobody_asks_for_ends_at_its_host() -> None:
    jobs = opened("x")
    jobs.poll("a", 1, [], {}, 1.0)
    jobs.jobs["x"].asked = 2.0
    jobs.expire(2.0 + UNASKED_S)
    assert jobs.poll("a", 0, ["x"], {}, 18.0) == ({}, [])
    jobs.expire(3.0 + UNASKED_S)
    assert jobs.poll("a", 0, ["x"], {}, 19.0) == ({}, ["x"])


def test_without_a_host_a_job_fails_at_a_deadline() -> None:
    jobs = opened("x")
    jobs.expire(NO_HOST_S)
    assert jobs.jobs["x"].result is None
    jobs.expire(NO_HOST_S + 1)
    assert jobs.jobs["x"].result == {"failed": f"no host has been connected for {NO_HOST_S:g} s"}


def test_a_desk_that_takes_over_learns_first_what_runs_where() -> None:
    jobs = Jobs(began=0.0)
    jobs.ask("x", {}, 1.0)
    assert jobs.poll("b", 1, [], {}, 2.0) == ({}, [])
    assert jobs.poll("a", 0, ["x", "gone"], {}, 3.0) == ({}, [])
    assert jobs.poll("b", 1, [], {}, OPENS_S) == ({}, [])
    assert jobs.poll("a", 0, ["x", "gone"], {}, OPENS_S) == ({}, ["gone"])


class Running(RuleBasedStateMachine):
    """Hosts that start what they are told, over answers that get lost. A result names its host."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.made = 0.0, 0
        self.jobs = Jobs(began=0.0)
        self.running: dict[str, set[str]] = {host: set() for host in HOSTS}
        self.done: dict[str, dict[str, Any]] = {host: {} for host in HOSTS}
        self.ran: dict[str, list[str]] = {}

    @rule()
    def ask(self) -> None:
        self.jobs.ask(f"job{self.made}", {}, self.now)
        self.made += 1

    @rule(host=st.sampled_from(HOSTS), free=st.integers(0, 3), arrives=st.booleans())
    def poll(self, host: str, free: int, arrives: bool) -> None:
        told = dict(self.done[host])
        begun = {name for name, job in self.jobs.jobs.items() if job.has_begun}
        start, end = self.jobs.poll(host, free, sorted(self.running[host]), told, self.now)
        assert len(start) <= free and not set(start) & (begun | self.running[host])
        if not arrives:
            return
        self.running[host] |= set(start)
        self.running[host] -= set(end)
        self.done[host] = {name: result for name, result in self.done[host].items() if name not in told}
        for name in start:
            self.ran.setdefault(name, []).append(host)

    @precondition(lambda self: any(self.running.values()))
    @rule(choose=st.data())
    def finish(self, choose: Any) -> None:
        host, name = choose.draw(
            st.sampled_from(sorted((host, name) for host, names in self.running.items() for name in names))
        )
        self.running[host].discard(name)
        self.done[host][name] = {"returned": host}

    @rule(host=st.sampled_from(HOSTS))
    def die(self, host: str) -> None:
        self.running[host], self.done[host] = set(), {}

    @rule(seconds=st.sampled_from([1.0, 30.0, SILENT_S + 1]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.jobs.expire(self.now)

    @invariant()
    def a_result_comes_from_a_host_that_ran_the_job(self) -> None:
        for name, job in self.jobs.jobs.items():
            if job.result is not None and "returned" in job.result:
                assert job.result["returned"] in self.ran[name]

    def teardown(self) -> None:
        """Every job ends, whatever happened, if one host lives and works."""
        for seconds in (0.0, 30.0, 30.0, 30.0, 1.0, 1.0):
            self.wait(seconds)
            self.poll("a", 100, True)
            self.done["a"] |= {name: {"returned": "a"} for name in self.running["a"]}
            self.running["a"] = set()
        self.poll("a", 100, True)
        assert all(job.result is not None for job in self.jobs.jobs.values())


TestRunning: Callable[..., Any] = Running.TestCase

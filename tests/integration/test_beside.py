# SPDX-License-Identifier: Apache-2.0
"""Work beside the trainer, a version on its way for example: when it is over, what reaches whom, and its deadline."""

from __future__ import annotations

import threading

import pytest

from recipe.async_engine.trainer.beside import Beside

SOON = 20.0


class Late(Exception):
    """Of a version."""


def late(version: int) -> Late:
    return Late(f"version {version} is late")


class Work:
    """Ends when it is told to."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.error = error

    def __call__(self) -> dict[str, float]:
        self.begun.set()
        assert self.may_end.wait(SOON)
        if self.error is not None:
            raise self.error
        return {"seconds": 1.0}


def new_publication(timeout_s: float = SOON) -> tuple[Beside[dict[str, float]], list[BaseException], threading.Event]:
    alarms: list[BaseException] = []
    alarmed = threading.Event()

    def alarm(error: BaseException) -> None:
        alarms.append(error)
        alarmed.set()

    return Beside("publication", timeout_s, late, alarm), alarms, alarmed


def test_the_caller_goes_on_while_a_version_is_on_its_way_and_has_its_metrics_when_it_waits() -> None:
    publication, alarms, _ = new_publication()
    assert publication.wait() is None, "nothing is on its way"
    work = Work()
    publication.begin(1, work)
    assert work.begun.wait(SOON) and not publication.is_over
    work.may_end.set()
    assert publication.wait() == {"seconds": 1.0}
    assert not publication.is_over and publication.wait() is None
    again = Work()
    again.may_end.set()
    publication.begin(2, again)
    assert publication.wait() == {"seconds": 1.0}
    assert alarms == []


@pytest.mark.parametrize("error", [ValueError("no replica"), TimeoutError("no answer within 5 s")])
def test_an_error_is_told_at_once_and_raised_where_the_version_is_waited_for(error: Exception) -> None:
    publication, alarms, alarmed = new_publication()
    work = Work(error)
    publication.begin(1, work)
    work.may_end.set()
    assert alarmed.wait(SOON) and alarms == [error]
    assert publication.is_over
    with pytest.raises(type(error), match=str(error)):
        publication.wait()


def test_a_publication_that_never_ends_ends_the_wait_at_its_deadline() -> None:
    publication, _, _ = new_publication(timeout_s=0.2)
    work = Work()
    publication.begin(7, work)
    with pytest.raises(Late, match="version 7 is late"):
        publication.wait()
    work.may_end.set()


def test_one_version_is_on_its_way_at_a_time() -> None:
    publication, _, _ = new_publication()
    work = Work()
    publication.begin(1, work)
    with pytest.raises(AssertionError, match="publication 1 is under way"):
        publication.begin(2, work)
    work.may_end.set()
    publication.wait()

# SPDX-License-Identifier: Apache-2.0
"""The parts of an engine's steps come back from the record of a simulated one, whatever they are."""

from __future__ import annotations

import random

import pytest

from recipe.async_engine.core.events import ROLLOUT, Class, Event
from recipe.plan.clock import Clock
from recipe.plan.engine import Engine, Request
from recipe.plan.engine_steps import EngineSteps, fit_steps

PLACES = 8


def recorded(steps: EngineSteps, seed: int) -> list[Event]:
    """Of an engine that is full at times and decodes a few answers at others, asked every second."""
    clock, draw = Clock(), random.Random(seed)
    engine = Engine(clock, PLACES, steps.step_s, lambda tokens: steps.read_s, lambda request: None)
    events: list[Event] = []

    def ask() -> None:
        for request in engine.running.values():
            if tokens := engine.tokens_of(request):
                engine.activity.output(request.name, tokens - request.tokens)
        events.extend(
            Event(f"{ROLLOUT} 0", what, start, end, share, tokens=tokens)
            for what, start, end, share, tokens in engine.activity.take()
        )
        clock.after(1.0, ask)

    for number in range(400):
        at = 8.0 * (number // 40) + 4.0 * draw.random()
        request = Request(f"{number}", number, 0, draw.choice((2, 3, 20, 60)))
        clock.after(at, lambda request=request: engine.submit(request))  # type: ignore[misc]
    clock.after(0.0, ask)
    clock.run(lambda: clock.now > 200)
    return events


@pytest.mark.parametrize("base", [0.01, 0.03, 0.1])
@pytest.mark.parametrize("request_s", [0.0, 0.001, 0.005])
@pytest.mark.parametrize("read", [0.0, 0.004, 0.02])
def test_the_parts_come_back(base: float, request_s: float, read: float) -> None:
    steps = EngineSteps(base, request_s, read)
    found = fit_steps(recorded(steps, seed=3), PLACES)
    assert found is not None
    for batch in (1, 4, PLACES):
        assert found.step_s(batch, 0) == pytest.approx(steps.step_s(batch, 0), rel=0.15)
    # What joins is hardest to tell: there is more of it where more requests are.
    assert found.step_s(4, 0) + found.read_s / 4 == pytest.approx(steps.step_s(4, 0) + read / 4, rel=0.08)


def test_nothing_is_negative_and_validation_is_left_out() -> None:
    def stretch(start: float, **tokens: int) -> list[Event]:
        return [Event(f"{ROLLOUT} 0", what, start, start + 1, 0.5, tokens=count) for what, count in tokens.items()]

    # More requests make it faster here.
    slow, quick = stretch(0, decoding=40), stretch(1, decoding=90, prefill=9)
    found = fit_steps([*slow, *quick], PLACES)
    assert found is not None
    assert min(found.base_s, found.request_s, found.read_s) >= 0
    validated = [*stretch(2, decoding=900), *stretch(2, validating=5)]
    assert fit_steps([*slow, *quick, *validated], PLACES) == found
    assert fit_steps(validated, PLACES) is None
    assert fit_steps([Event(f"{ROLLOUT} 0", Class.WAIT_WEIGHTS, 0, 1)], PLACES) is None

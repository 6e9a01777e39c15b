# SPDX-License-Identifier: Apache-2.0
"""Whatever the parts of a simulated engine's steps are, they are found again in its record."""

from __future__ import annotations

import random
from dataclasses import astuple

import pytest

from recipe.async_engine.record.activity import Work
from recipe.async_engine.record.events import ROLLOUT, Class, Event
from recipe.plan.engine import Clock, Engine, Request
from recipe.plan.engine_steps import EngineSteps, fit_steps

PLACES = 8


def recorded(steps: EngineSteps, seed: int, prompt: int) -> tuple[list[Event], list[tuple[int, float]]]:
    """Return the events of an engine that is sometimes full and sometimes nearly empty, and its answers."""
    clock, draw = Clock(), random.Random(seed)
    every_s = max(8.0, 300 * steps.base_s)
    events: list[Event] = []
    answers: list[tuple[int, float]] = []

    def ended(request: Request) -> None:
        answers.append((request.tokens, clock.now))

    engine = Engine(clock, PLACES, steps.step_s, steps.read_s, ended)

    def pause() -> None:
        """Pause the engine, so that everything under way is read again."""
        clock.after(engine.rest_s, engine.reopen)
        for request in engine.cut():
            request.work = Work.AGAIN if request.tokens else request.work
            engine.submit(request)

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
        at = every_s * (number // 40) + 4.0 * draw.random()
        request = Request(f"{number}", number, 0, draw.choice((2, 3, 20, 60)), prompt)
        clock.after(at, lambda request=request: engine.submit(request))  # type: ignore[misc]
    for at in (30.2, 110.4, 150.1):
        clock.after(at, pause)
    clock.after(0.0, ask)
    clock.run(lambda: clock.now > 10 * every_s + 60)
    return events, answers


@pytest.mark.parametrize("base", [0.01, 0.03, 0.1])
@pytest.mark.parametrize("of_a_request", [0.0, 0.05])
@pytest.mark.parametrize("of_a_token", [0.0, 0.002])
@pytest.mark.parametrize("read", [0.0, 0.1])
@pytest.mark.parametrize("prompt", [0, 20])
def test_the_parts_come_back(base: float, of_a_request: float, of_a_token: float, read: float, prompt: int) -> None:
    """The arguments are fractions of the first part; ``read`` is the reading of a prompt."""
    reading = {"read_token_s": base * read / prompt} if prompt else {"join_s": base * read}
    steps = EngineSteps(base, base * of_a_request, base * of_a_token, **reading)
    found = fit_steps(*recorded(steps, 3, prompt), PLACES, replicas=1, prompt=prompt)
    assert found is not None
    for batch, answered in ((1, 50), (4, 20), (4, 120), (PLACES, 50), (PLACES, 160)):
        context = answered + batch * prompt
        assert found.step_s(batch, context) == pytest.approx(steps.step_s(batch, context), rel=0.3), (batch, context)
    for tokens in (prompt, prompt + 20):
        assert found.read_s(tokens) == pytest.approx(steps.read_s(tokens), abs=0.3 * base)


def test_nothing_is_negative_and_validation_is_left_out() -> None:
    def stretch(start: float, **tokens: int) -> list[Event]:
        return [Event(f"{ROLLOUT} 0", what, start, start + 1, 0.5, tokens=count) for what, count in tokens.items()]

    # Here more requests make a step faster.
    slow, quick = stretch(0, decoding=40), stretch(1, decoding=90, prefill=9)
    answers = [(40, 1.0), (90, 2.0)]
    found = fit_steps([*slow, *quick], answers, PLACES, replicas=1)
    assert found is not None
    assert min(astuple(found)) >= 0
    validated = [*stretch(2, decoding=900), *stretch(2, validating=5)]
    assert fit_steps([*slow, *quick, *validated], answers, PLACES, replicas=1) == found
    assert fit_steps(validated, answers, PLACES, replicas=1) is None
    assert fit_steps([Event(f"{ROLLOUT} 0", Class.WAIT_WEIGHTS, 0, 1)], answers, PLACES, replicas=1) is None

# SPDX-License-Identifier: Apache-2.0
"""When two computations of log-probs agree, and what is shown of a rehearsal."""

from __future__ import annotations

import math
import random

import pytest

from recipe.async_engine.core.rehearsed import (
    FELL_BACK,
    PASSED,
    Check,
    Rehearsed,
    agreement,
    table,
)


def spread_out(noise: float, tokens: int = 64) -> list[tuple[float, float]]:
    """Log-probs of some nats, computed twice with so much between them."""
    draws = random.Random(0)
    second = [-abs(draws.gauss(3, 2)) for _ in range(tokens)]
    return [(value + draws.choice((-1, 1)) * noise, value) for value in second]


@pytest.mark.parametrize(
    ("dtype", "noise", "holds"),
    [
        ("float32", 1e-4, True),
        ("float32", 0.1, False),
        ("bfloat16", 0.1, True),
        ("bfloat16", 1.0, False),
        ("torch.float16", 0.05, True),
        ("fp8", 0.1, True),
    ],
)
def test_what_differs_by_rounding_agrees_and_what_other_weights_say_does_not(
    dtype: str, noise: float, holds: bool
) -> None:
    found = agreement(spread_out(noise), dtype)
    assert found.holds is holds, str(found)
    assert found.difference == pytest.approx(noise)
    assert found.tokens == 64


def test_log_probs_that_are_nearly_alike_are_not_judged_by_their_spread() -> None:
    """A model that has learned nothing gives every token about the same one."""
    alike = [(-4.0 + 0.001 * (number % 2), -4.0) for number in range(32)]
    assert agreement(alike, "float32").holds
    assert not agreement([(first + 0.1, second) for first, second in alike], "float32").holds


def test_nan_agrees_with_nothing_and_no_tokens_with_each_other() -> None:
    assert not agreement([(math.nan, -1.0), (-1.0, -1.0)], "bfloat16").holds
    assert not agreement([(-1.0, math.nan)], "bfloat16").holds
    assert agreement([], "float32").holds


def test_table_names_each_check_and_the_setting_that_the_run_goes_on_with() -> None:
    found = Rehearsed(seconds=2.0)
    found.checks = [Check("weights arrive", FELL_BACK, "no answer", 1.5), Check("log-probs agree", PASSED)]
    assert "set it" not in table(found.summary())[0]
    found.fallbacks = ["async_training.weights.publish=inline"]
    head, first, second = table(found.summary())
    assert "async_training.weights.publish=inline" in head
    assert first.split() == ["weights", "arrive", "fell", "back", "1.5", "s", "no", "answer"]
    assert "passed" in second
    assert found.metrics()["rehearsal/fallbacks"] == 1

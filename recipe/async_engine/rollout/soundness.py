# SPDX-License-Identifier: Apache-2.0
"""What a finished trajectory must be before it may be trained; nothing else of it is looked at.

Contract: an answer that cannot be trained fails here, by name, and never reaches a batch, where it would end the run
or, worse, be trained in silence. Answers without a sampled token, or longer than the settings say, or whose log-probs
do not match their tokens come from a faulty engine or agent loop: another attempt may help. A number that is none (NaN,
an infinity, or nothing at all) in a log-prob or a reward is what ``async_training.on_non_finite`` speaks of. An answer
of special tokens only is an answer: the policy sampled it, and the reward judges it.

Shown by tests/integration/test_trajectory_worker.py and tests/e2e/test_non_finite.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from recipe.async_engine.core.errors import RecipeError

FLOAT32_MAX = 3.4028235e38


class RewardError(RecipeError):
    """The reward of a complete answer could not be computed."""


class UnusableAnswer(RecipeError):
    """An answer that no batch can hold."""


class NonFinite(RecipeError):
    """A number of a trajectory is none."""


class NonFiniteLogProb(NonFinite):
    """Of the engine that sampled."""


class NonFiniteReward(NonFinite, RewardError):
    """Of the reward function; another call is taken to give the same."""


def is_number(value: Any) -> bool:
    """Whether a batch can hold the value: tensors of rewards and log-probs are float32."""
    if isinstance(value, str | bytes):
        return False
    try:
        return abs(float(value)) <= FLOAT32_MAX
    except (TypeError, ValueError, OverflowError):
        return False


def check_answer(output: Any, prompt_length: int, response_length: int, log_probs: bool) -> None:
    """Raise `UnusableAnswer` or `NonFiniteLogProb` unless an agent loop's output, not padded yet, can be trained.

    A batch has room for so many tokens (``data.max_prompt_length``, ``data.max_response_length``). ``log_probs``:
    whether the engine was asked for them.
    """
    tokens = len(output.response_ids)
    if not any(output.response_mask):
        raise UnusableAnswer(f"the answer has {tokens} tokens and the policy sampled none of them")
    given = {"mask": output.response_mask, "log-probs": output.response_logprobs if log_probs else output.response_mask}
    for what, values in given.items():
        if values is None or len(values) != tokens:
            number = "no" if values is None else len(values)
            raise UnusableAnswer(f"the answer has {tokens} tokens and {number} {what}: each token needs one")
    for what, length, room in (
        ("prompt", len(output.prompt_ids), prompt_length),
        ("response", tokens, response_length),
    ):
        if length > room:
            raise UnusableAnswer(f"a {what} of {length} tokens, where data.max_{what}_length={room}")
    if log_probs and not _are_numbers(output.response_logprobs):
        first = next(place for place, value in enumerate(output.response_logprobs) if not is_number(value))
        raise NonFiniteLogProb(f"the log-prob of token {first} of {tokens} is {output.response_logprobs[first]}")


def _are_numbers(values: Sequence[Any]) -> bool:
    """Whether each is one, see `is_number`; an answer may have tens of thousands."""
    try:
        return bool((np.abs(np.asarray(values, dtype=np.float64)) <= FLOAT32_MAX).all())
    except (TypeError, ValueError, OverflowError):
        return all(map(is_number, values))


def check_reward(reward: Any, fields: Mapping[str, Any], trained: Iterable[str]) -> None:
    """Raise `NonFiniteReward` unless the reward, and the fields of its result that are trained, are numbers."""
    for name, value in (("reward", reward), *((name, fields.get(name)) for name in trained)):
        if not is_number(value):
            raise NonFiniteReward(f"the reward function gave {name}={value!r}, which is no finite number")

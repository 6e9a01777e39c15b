# SPDX-License-Identifier: Apache-2.0
"""Checks the output of an agent loop, and converts it to plain Python values.

Contract: whatever a user's agent loop returns, `plain_outputs` either returns ``AgentLoopOutput``s of plain values that
any process can unpickle, or raises an error that names the faulty field. Token ids, masks and log-probs become
lists of Python numbers. A value in ``extra_fields`` is accepted if it can be pickled. An extra field that has the name
of one of verl's columns is renamed.

An answer that cannot be trained is refused here, because in a batch it would end the run or be trained unnoticed. This
concerns answers without a sampled token, answers longer than the settings allow, and answers whose number of log-probs
differs from their number of tokens. A faulty engine or agent loop causes such answers, so another attempt may help.
``async_training.on_non_finite`` decides what happens if a log-prob or reward is NaN, infinite or missing. An answer
that consists only of special tokens is valid, because the policy sampled it. Shown by
tests/integration/test_users_loops.py, test_trajectory_worker.py and tests/e2e/test_non_finite.py.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from ray import cloudpickle
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from recipe.async_engine.core.columns import OTHER_NAME, REPORTED, TAKEN
from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.core.plain import told

LEAVES = frozenset({NoneType, bool, int, float, complex, str, bytes})
LISTS = frozenset({list, tuple, set, frozenset})
SIZED = frozenset({str, bytes, dict, np.ndarray, torch.Tensor, *LISTS})
DEEPEST = 100
"""Limit on the nesting of lists and dicts in a field. Recursion into a deeper field could overflow the stack."""
LARGEST = 256 << 20
"""Largest size in bytes of one text, array or container in an output. A batch may have thousands of such values."""
INT32 = 2**31


def plain_outputs(returned: Any, rollout: Any, vocabulary: int) -> list[AgentLoopOutput]:
    """Check what an agent loop returned, and return copies of its outputs that contain only plain Python values.

    An agent loop returns one output, or a list of outputs if its context was rewritten or split among sub-agents.
    ``rollout`` has verl's rollout settings, and ``vocabulary`` is the size of the model's vocabulary.

    Raises:
        UnusableAnswer: the answer cannot be trained. The message names the field.
        NonFinite: a log-prob is NaN, infinite or missing (`check_answer`).
    """
    outputs = returned if isinstance(returned, list) else [returned]
    if not outputs:
        raise UnusableAnswer("the agent loop returned an empty list, but has to return at least one AgentLoopOutput")
    return [plain_output(output, rollout, vocabulary) for output in outputs]


def plain_output(output: Any, rollout: Any, vocabulary: int) -> AgentLoopOutput:
    """Check one output of an agent loop, and return a copy of it that contains only plain Python values.

    `plain_outputs` explains the arguments and the errors.
    """
    if not isinstance(output, AgentLoopOutput):
        raise UnusableAnswer(
            f"the agent loop returned a {type(output).__name__}, but has to return an AgentLoopOutput or a list of them"
        )
    log_probs, routed = output.response_logprobs, output.routed_experts
    replayed = getattr(rollout, "enable_rollout_routing_replay", False)
    if replayed and routed is None:
        raise UnusableAnswer(
            "the agent loop's AgentLoopOutput has no routed_experts, which enable_rollout_routing_replay needs"
        )
    plain = AgentLoopOutput.model_construct(
        prompt_ids=_whole_numbers("prompt_ids", output.prompt_ids, vocabulary),
        response_ids=_whole_numbers("response_ids", output.response_ids, vocabulary),
        response_mask=_whole_numbers("response_mask", output.response_mask, 2),
        response_logprobs=_numbers(log_probs) if rollout.calculate_log_probs and log_probs is not None else None,
        routed_experts=routed if replayed else None,
        multi_modal_data=_mapping("multi_modal_data", output.multi_modal_data),
        reward_score=_reward(output.reward_score),
        num_turns=_whole_numbers("num_turns", [output.num_turns], INT32)[0],
        metrics=_metrics(output.metrics),
        extra_fields={},
        mm_processor_kwargs=_mapping("mm_processor_kwargs", output.mm_processor_kwargs),
        mm_processor_output=output.mm_processor_output,
    )
    check_answer(plain, rollout.prompt_length, rollout.response_length, rollout.calculate_log_probs)
    if replayed:
        check_experts(plain)
    for name, value in (_mapping("extra_fields", output.extra_fields) or {}).items():
        if not isinstance(name, str):
            raise UnusableAnswer(
                f"extra_fields of the agent loop's AgentLoopOutput has the name {shown(name)}, which is not a string"
            )
        carried = check_carried(f"extra_fields[{name!r}] of the agent loop's AgentLoopOutput", value)
        plain.extra_fields[f"{OTHER_NAME}{name}" if name in TAKEN else name] = carried
    check_report(plain.extra_fields.get(REPORTED))
    return plain


def shown(value: Any) -> str:
    """Return a short text that describes ``value`` in an error message. No method of a user's class is called."""
    if type(value) in LEAVES:
        return f"{value!r:.100}"
    return f"a {type(value).__name__}"


def _listed(name: str, values: Any) -> list[Any]:
    if isinstance(values, np.ndarray | torch.Tensor):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise UnusableAnswer(f"{name} of the agent loop's AgentLoopOutput is {shown(values)}, not a list")
    return list(values)


def _whole_numbers(name: str, values: Any, below: int) -> list[int]:
    numbers = _listed(name, values)
    if not {int, bool}.issuperset(map(type, numbers)):
        for place, value in enumerate(numbers):
            try:
                numbers[place] = operator.index(value)
            except Exception:  # a user's class may raise anything
                what = f"{name} of the agent loop's AgentLoopOutput has {shown(value)} at {place}, not a whole number"
                raise UnusableAnswer(what) from None
    if numbers and not 0 <= min(numbers) <= max(numbers) < below:
        worst = min(numbers) if min(numbers) < 0 else max(numbers)
        raise UnusableAnswer(
            f"{name} of the agent loop's AgentLoopOutput has {shown(worst)}, which is not from 0 to {below - 1}"
        )
    return numbers


def _numbers(values: Any) -> list[Any]:
    """Return the log-probs as floats, with None for each value that is not a number. `check_answer` refuses None."""
    numbers = _listed("response_logprobs", values)
    if not {float}.issuperset(map(type, numbers)):
        numbers = [_number(value) for value in numbers]
    return numbers


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, str | bytes) else float(value)
    except Exception:  # a user's class may raise anything
        return None


def _reward(value: Any) -> float | None:
    number = _number(value)
    if value is not None and number is None:
        raise UnusableAnswer(
            f"reward_score of the agent loop's AgentLoopOutput is {shown(value)}, which is not a number"
        )
    return number


def _mapping(name: str, value: Any) -> dict[Any, Any] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise UnusableAnswer(f"{name} of the agent loop's AgentLoopOutput is {shown(value)}, not a dict")
    return dict(value)


def _metrics(value: Any) -> AgentLoopMetrics:
    try:
        return AgentLoopMetrics.model_validate(vars(value) if isinstance(value, AgentLoopMetrics) else value)
    except ValidationError as error:
        raise UnusableAnswer(f"metrics of the agent loop's AgentLoopOutput: {told(error)}") from None


def check_report(report: Any) -> None:
    """Check the values that a reward function returned besides the score; raise `UnusableAnswer` if they are unusable.

    ``report`` has to be None, or a dict with values that other processes can unpickle.
    """
    if not isinstance(report, dict | NoneType):
        raise UnusableAnswer(f"{REPORTED} is {shown(report)}, not a dict")
    for name, value in (report or {}).items():
        check_carried(f"{REPORTED}[{shown(name)}]", value)


def check_carried(what: str, value: Any) -> Any:
    """Check that other processes can unpickle ``value``, and return it. A tensor is moved to the CPU.

    Raises:
        UnusableAnswer: another process could not unpickle the value. The message begins with ``what``.
    """
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
    try:
        if not _is_plain(what, value, set(), set()):
            pickle.loads(cloudpickle.dumps(value))
    except UnusableAnswer:
        raise
    except BaseException as error:  # a user's class may raise anything
        raise UnusableAnswer(f"{what} cannot be sent to another process: {told(error)}") from None
    return value


def _is_plain(what: str, value: Any, above: set[int], seen: set[int]) -> bool:
    """Return whether ``value`` consists only of Python's built-in types, arrays and tensors.

    Args:
        what: the name of the value in an error message.
        above: the ids of the containers that contain the value.
        seen: the ids of the containers that have been checked.

    Raises:
        UnusableAnswer: the value is too large, contains itself or is nested too deeply.
    """
    kind = type(value)
    if kind in SIZED and (size := _size(value)) > LARGEST:
        raise UnusableAnswer(f"{what} has {size} bytes, but may have at most {LARGEST}")
    if kind in LEAVES or isinstance(value, np.generic) or (id(value) in seen and id(value) not in above):
        return True
    if kind is torch.Tensor or (kind is np.ndarray and not value.dtype.hasobject):
        return True
    if kind is dict:
        inside = [*value.keys(), *value.values()]
    elif kind in LISTS or kind is np.ndarray:
        inside = list(value.flat) if kind is np.ndarray else list(value)
    else:
        return False
    if id(value) in above or len(above) >= DEEPEST:
        raise UnusableAnswer(f"{what} contains itself, or is more than {DEEPEST} levels deep")
    seen.add(id(value))
    if {bool, int, float, NoneType}.issuperset(map(type, inside)):
        return True
    above = above | {id(value)}
    # Build a list, so that `all` does not stop at the first False, and the limits are checked for every item.
    return all([_is_plain(what, each, above, seen) for each in inside])


def _size(value: Any) -> int:
    if isinstance(value, np.ndarray | torch.Tensor):
        return int(value.nbytes)
    return len(value) if isinstance(value, str | bytes) else 8 * len(value)


FLOAT32_MAX = 3.4028235e38


class RewardError(RecipeError):
    """The reward of a complete answer could not be computed."""


class UnusableAnswer(RecipeError):
    """An agent loop returned an answer that cannot be trained."""


class NonFinite(RecipeError):
    """A log-prob or reward of a trajectory is NaN, infinite or missing."""


class NonFiniteReward(NonFinite, RewardError):
    """The reward is not a finite number. It is not computed again, since that would give the same value."""


def is_number(value: Any) -> bool:
    """Return whether ``value`` is a finite number in float32, the dtype of rewards and log-probs in a batch."""
    if isinstance(value, str | bytes):
        return False
    try:
        return abs(float(value)) <= FLOAT32_MAX
    except (TypeError, ValueError, OverflowError):
        return False


def check_answer(output: Any, prompt_length: int, response_length: int, log_probs: bool) -> None:
    """Raise `UnusableAnswer` or `NonFinite` if an agent loop's output cannot be trained.

    Args:
        prompt_length, response_length: ``data.max_prompt_length`` and ``data.max_response_length`` in tokens.
        log_probs: whether the settings ask for the engine's log-probs, so that each token needs one.
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
            raise UnusableAnswer(f"a {what} of {length} tokens is longer than data.max_{what}_length={room}")
    if log_probs and not _are_numbers(output.response_logprobs):
        first = next(place for place, value in enumerate(output.response_logprobs) if not is_number(value))
        raise NonFinite(f"the log-prob of token {first} of {tokens} is {output.response_logprobs[first]}")


def check_experts(output: AgentLoopOutput) -> None:
    """Raise `UnusableAnswer` if ``routed_experts`` has no row for one of the tokens before the last sampled token.

    verl would fill missing rows with expert 0, and the trainer would replay this expert.
    """
    routed, tokens = output.routed_experts, len(output.prompt_ids) + len(output.response_ids)
    sampled = len(output.response_mask) - list(reversed(output.response_mask)).index(1)
    needed = len(output.prompt_ids) + sampled - 1
    shape = tuple(routed.shape) if isinstance(routed, np.ndarray | torch.Tensor) else ()
    if len(shape) != 3 or not needed <= shape[0] <= tokens:
        given = f"the shape {shape}" if shape else shown(routed)
        raise UnusableAnswer(
            f"routed_experts of the agent loop's AgentLoopOutput is {given}, but needs {needed} to {tokens} rows "
            "of shape (layers, experts per token): one row for each token of prompt and response. Only the rows of the "
            "last sampled token and of the tokens after it may be missing"
        )


def _are_numbers(values: Sequence[Any]) -> bool:
    """Return whether `is_number` is true for all values. One fast NumPy call checks the usual case."""
    try:
        return bool((np.abs(np.asarray(values, dtype=np.float64)) <= FLOAT32_MAX).all())
    except (TypeError, ValueError, OverflowError):
        return all(map(is_number, values))


def check_reward(reward: Any, fields: Mapping[str, Any], trained: Iterable[str]) -> None:
    """Raise `NonFiniteReward` if ``reward``, or one of the ``fields`` named in ``trained``, is not a finite number."""
    for name, value in (("reward", reward), *((name, fields.get(name)) for name in trained)):
        if not is_number(value):
            raise NonFiniteReward(f"the reward function gave {name}={value!r}, which is not a finite number")

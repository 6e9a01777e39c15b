# SPDX-License-Identifier: Apache-2.0
"""Actions of users' agent loops and tools: raising in every way, and returning what nobody expects.

Each row of `RAISING` is called in place of a normal action; its words must appear in the run's log. Each row of
`RETURNED` is a change to an agent loop's valid output, and the field that the message must name; None if the output is
accepted as the plain value that it stands for.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import odd_errors
import torch
from odd_errors import WORDS, NotPickled
from ray.exceptions import ActorDiedError, RayTaskError
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from recipe.async_engine.actors.worker_set import WorkerDied, WorkerRestarted
from recipe.async_engine.core.errors import SettingError
from recipe.async_engine.rollout.group_run import TrajectoryCancelled, TrajectoryDisturbed


class Holding(Exception):
    def __init__(self, value: Any) -> None:
        super().__init__(WORDS)
        self.value = value


RAISING: dict[str, tuple[Callable[[], Any], str]] = {
    **odd_errors.RAISING,
    "a tensor": (lambda: odd_errors.throw(Holding(torch.zeros(1_000_000))), WORDS),
    "torch's own": (lambda: torch.zeros(2) + torch.zeros(3), "RuntimeError: The size of tensor"),
    "numpy's own": (lambda: np.linalg.inv(np.zeros((2, 2))), "LinAlgError: Singular matrix"),
    "an error of Ray's": (lambda: odd_errors.throw(ActorDiedError()), "ActorDiedError"),
    "a task's error of Ray's": (lambda: odd_errors.throw(RayTaskError("tool", WORDS, ValueError(WORDS))), WORDS),
    "a setting's error": (lambda: odd_errors.throw(SettingError("a", 1, WORDS)), WORDS),
    "what says that a worker died": (lambda: odd_errors.throw(WorkerDied(WORDS)), WORDS),
    "what says that a worker is new": (lambda: odd_errors.throw(WorkerRestarted(WORDS)), WORDS),
    "what says that it was cancelled": (lambda: odd_errors.throw(TrajectoryCancelled(WORDS)), WORDS),
    "what says that it was disturbed": (lambda: odd_errors.throw(TrajectoryDisturbed(WORDS)), WORDS),
}

Pair = namedtuple("Pair", "left right")


class Opaque:
    """An object that can be pickled but not unpickled."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return Opaque, ()


def _nested(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def _in_itself() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["again"] = [value]
    return value


def _doubling() -> Any:
    value: Any = [0]
    for _ in range(60):
        value = [value, value]
    return value


def _part(output: AgentLoopOutput, begin: int, end: int | None) -> AgentLoopOutput:
    """Some of the response's tokens, with those before them as the prompt."""
    kept = {name: getattr(output, name)[begin:end] for name in ("response_ids", "response_mask", "response_logprobs")}
    return output.model_copy(update={"prompt_ids": [*output.prompt_ids, *output.response_ids[:begin]], **kept})


NAN = float("nan")
RETURNED: dict[str, tuple[dict[str, Any], str | None]] = {
    "arrays": ({"prompt_ids": np.array([1, 2]), "response_ids": np.array([10, 11])}, None),
    "tensors": ({"response_ids": torch.tensor([10, 11]), "response_mask": torch.ones(2, dtype=torch.bool)}, None),
    "numbers of numpy": ({"response_ids": [np.int64(10), np.int32(11)]}, None),
    "tensors of one number": ({"response_ids": [torch.tensor(10), torch.tensor(11)]}, None),
    "a tuple": ({"response_ids": (10, 11)}, None),
    "log-probs of numpy": ({"response_logprobs": np.array([-1.0, -2.0], np.float32)}, None),
    "log-probs that are decimals": ({"response_logprobs": [Decimal("-1"), Fraction(-1, 2)]}, None),
    "no tokens": ({"response_ids": [], "response_mask": [], "response_logprobs": []}, "sampled none"),
    "no list": ({"response_ids": None}, "response_ids .* None"),
    "text": ({"response_ids": "10 11"}, "response_ids .* '10 11'"),
    "an iterator": ({"response_ids": iter([10, 11])}, "response_ids"),
    "a number": ({"response_ids": 10}, "response_ids"),
    "an array without sides": ({"response_ids": np.array(10)}, "response_ids"),
    "an array of two sides": ({"response_ids": np.array([[10, 11]])}, "response_ids"),
    "tokens that are fractions": ({"response_ids": [10.0, 11.5]}, "response_ids .* 10.0"),
    "tokens that are text": ({"response_ids": ["10", "11"]}, "response_ids .* '10'"),
    "no token": ({"response_ids": [10, None]}, "response_ids .* None at 1"),
    "a negative token": ({"response_ids": [10, -1]}, "response_ids .* -1"),
    "an unknown token": ({"response_ids": [10, 1_000]}, "response_ids .* 1000, which is not from 0 to"),
    "a large token": ({"response_ids": [10, 2**70]}, "response_ids"),
    "an unknown token in the prompt": ({"prompt_ids": [1, 10**6]}, "prompt_ids .* 1000000"),
    "no prompt": ({"prompt_ids": None}, "prompt_ids"),
    "a long prompt": ({"prompt_ids": [1] * 500}, "prompt of 500 tokens is longer than data.max_prompt_length="),
    "a long answer": (
        {"response_ids": [10] * 500, "response_mask": [1] * 500, "response_logprobs": [-1.0] * 500},
        "response of 500 tokens",
    ),
    "a short mask": ({"response_mask": [1]}, "2 tokens and 1 mask"),
    "a mask of nothing": ({"response_mask": [0, 0]}, "sampled none"),
    "a mask of others": ({"response_mask": [1, 2]}, "response_mask .* 2"),
    "a mask of fractions": ({"response_mask": [1.0, 0.5]}, "response_mask"),
    "no mask": ({"response_mask": None}, "response_mask"),
    "a short list of log-probs": ({"response_logprobs": [-1.0]}, "2 tokens and 1 log-probs"),
    "no log-probs": ({"response_logprobs": None}, "no log-probs"),
    "log-probs that are none": ({"response_logprobs": [-1.0, NAN]}, "log-prob of token 1 of 2 is nan"),
    "log-probs that are text": ({"response_logprobs": ["-1", "-2"]}, "log-prob of token 0 of 2"),
    "log-probs that are nothing": ({"response_logprobs": [None, -1.0]}, "log-prob of token 0 of 2"),
    "a reward of numpy": ({"reward_score": np.float32(0.5)}, None),
    "a reward that is a tensor": ({"reward_score": torch.tensor(0.5)}, None),
    "a reward that is true": ({"reward_score": True}, None),
    "a reward that is text": ({"reward_score": "0.5"}, "reward_score .* '0.5'"),
    "a reward that is a list": ({"reward_score": [0.5, 0.5]}, "reward_score .* list"),
    "a reward that is none": ({"reward_score": NAN}, "reward=nan"),
    "a reward without end": ({"reward_score": float("inf")}, "reward=inf"),
    "a complex reward": ({"reward_score": 1j}, "reward_score"),
    "no turns": ({"num_turns": None}, "num_turns"),
    "turns of text": ({"num_turns": "two"}, "num_turns .* 'two'"),
    "turns of a fraction": ({"num_turns": 2.5}, "num_turns"),
    "turns without end": ({"num_turns": 2**40}, "num_turns"),
    "no metrics": ({"metrics": None}, "metrics"),
    "metrics of a dict": ({"metrics": {"tool_calls": 1.5}}, None),
    "metrics of text": ({"metrics": AgentLoopMetrics.model_construct(tool_calls="much")}, "metrics"),
    "experts that nobody asked for": ({"routed_experts": "all"}, None),
    "images of no processor": ({"multi_modal_data": {"images": [object()]}}, None),
    "images in a list": ({"multi_modal_data": [1]}, "multi_modal_data"),
    "arguments in a list": ({"mm_processor_kwargs": [1]}, "mm_processor_kwargs"),
    "no fields": ({"extra_fields": None}, None),
    "fields in a list": ({"extra_fields": [1]}, "extra_fields"),
    "a mapping of fields": ({"extra_fields": UserDict(note="kept")}, None),
    "a field without a name": ({"extra_fields": {7: 1}}, "extra_fields .* 7"),
    "plain fields": ({"extra_fields": {"a": [1, {"b": (2, None)}], "c": np.zeros(3), "d": torch.zeros(2)}}, None),
    "a tuple with names": ({"extra_fields": {"pair": OrderedDict(a=1)}}, None),
    "a field of a tensor with a gradient": ({"extra_fields": {"t": torch.zeros(2, requires_grad=True) * 2}}, None),
    "a field of a lambda": ({"extra_fields": {"f": lambda: 7}}, None),
    "a field of a lock": ({"extra_fields": {"mine": threading.Lock()}}, "extra_fields.'mine'"),
    "a field of a lock below": ({"extra_fields": {"mine": {"a": [threading.Lock()]}}}, "extra_fields.'mine'"),
    "a field of a generator": ({"extra_fields": {"mine": (n for n in range(3))}}, "extra_fields.'mine'"),
    "a field that does not unpickle": ({"extra_fields": {"mine": Opaque(7)}}, "extra_fields.'mine'"),
    "a field in an array": ({"extra_fields": {"mine": np.array([Opaque(7)], object)}}, "extra_fields.'mine'"),
    "a field that raises": ({"extra_fields": {"mine": NotPickled()}}, "extra_fields.'mine'.*does not pickle"),
    "a field in itself": ({"extra_fields": {"mine": _in_itself()}}, "extra_fields.'mine'. .* contains itself"),
    "a deep field": ({"extra_fields": {"mine": _nested(5_000)}}, "extra_fields.'mine'"),
    "a field of many paths": ({"extra_fields": {"mine": _doubling()}}, None),
    "a huge field": (
        {"extra_fields": {"mine": b"x" * (2 << 20)}},
        "extra_fields.'mine'. of the agent loop's .* has",
    ),
    "a huge array": (
        {"extra_fields": {"mine": np.zeros(1 << 20)}},
        "extra_fields.'mine'. of the agent loop's .* has",
    ),
    "verl's names": ({"extra_fields": {"uid": "mine", "advantages": 7, "prompts": [1], "data_source": 3}}, None),
    "this package's names": ({"extra_fields": {"version_runs": 7, "proximal_scores": 1, "exact_versions": 0}}, None),
    "a report in a list": ({"extra_fields": {"reward_extra_info": [1]}}, "reward_extra_info"),
    "a report of a lock": ({"extra_fields": {"reward_extra_info": {"a": threading.Lock()}}}, "reward_extra_info"),
}

INSTEAD: dict[str, tuple[Callable[[AgentLoopOutput], Any], str | None]] = {
    "a list of one": (lambda output: [output], None),
    "a list of two": (lambda output: [_part(output, 0, 1), _part(output, 1, None)], None),
    "an empty list": (lambda output: [], "an empty list"),
    "a list of others": (lambda output: [7], "a int"),
    "nothing": (lambda output: None, "a NoneType"),
    "a dict": (lambda output: output.model_dump(), "a dict"),
    "its class": (lambda output: AgentLoopOutput, "AgentLoopOutput"),
    "text": (lambda output: "the answer", "a str"),
    "a tuple": (lambda output: (output, 1.0), "a tuple"),
    "the same twice": (lambda output: output, None),
    "an exception": (lambda output: ValueError(WORDS), "a ValueError"),
}

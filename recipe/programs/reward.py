# SPDX-License-Identifier: Apache-2.0
"""The reward for programming tasks: a verl reward function that runs the program in an answer on test cases.

    reward.custom_reward_function.path=pkg://recipe.programs.reward

``ground_truth`` is JSON in the format of the APPS and verl data sets: ``{"inputs": [...], "outputs": [...]}``, and
``fn_name`` for tests that call a function. Without ``fn_name``, an input is the program's standard input, and an output
is its expected standard output, compared word by word. With ``fn_name``, an input is a list of arguments, and an output
is the expected result, compared by value. The expected outputs never enter the sandbox. Each test case runs in a
sandbox of its own, with limits of its own (`sandbox`); all cases of an answer together have ``answer_s`` seconds. A
program can affect only the score of its own answer. Shown by tests/integration/test_programs.py and test_sandbox.py.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from recipe.async_engine.core.errors import RecipeError
from recipe.programs import sandbox
from recipe.programs.sandbox import Ending, Limits, Outcome

ANSWER_S = 60.0
"""Seconds that all test cases of one answer may take together."""
FENCED = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


class TestCaseError(RecipeError):
    """A row of the data has no usable test cases."""

    __test__ = False


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    partial: bool = False,
    max_tests: int | None = None,
    answer_s: float = ANSWER_S,
    limits: dict[str, Any] | None = None,
    run: Callable[..., Outcome] = sandbox.run,
    **kwargs: Any,
) -> dict[str, float]:
    """Return the score of one answer.

    Args:
        data_source: name of the data set that the row comes from, for error messages.
        solution_str: the decoded answer; its program is the last fenced code block, or the whole answer without one.
        ground_truth: the test cases, in the format that the module's docstring describes.
        partial: whether the score is the share of test cases that passed, for which all test cases are run; otherwise
            it is 1.0 if all test cases pass, else 0.0.
        max_tests: largest number of test cases to use, counted from the row's first one; None for all.
        answer_s: seconds for all test cases together; test cases for which no time is left count as not passed.
        limits: limits of each test case, by the field names of `Limits`.
        run: function that runs a program, with the arguments and result of `sandbox.run`.

    Returns:
        ``score``, the reward; ``acc``, 1.0 if all test cases passed, else 0.0; ``passed``, the share of test cases that
        passed; ``cut_off``, the number of test cases that were ended by a limit or for which no time was left.

    Raises:
        TestCaseError: the row of the data has no usable test cases.
        SandboxUnavailable: this machine cannot isolate programs.
    """
    tests, name = _tests(ground_truth, data_source)
    tests = tests[:max_tests]
    source = program_of(solution_str)
    deadline, of_each = time.monotonic() + answer_s, Limits(**(limits or {}))
    passed = cut_off = 0
    for number, (given, expected) in enumerate(tests):
        left = deadline - time.monotonic()
        if left <= 0:
            cut_off += len(tests) - number
            break
        within = replace(of_each, wall_s=min(of_each.wall_s, left))
        stdin, call = (given, None) if name is None else ("", (name, given))
        outcome = run(source, stdin=stdin, limits=within, call=call)
        cut_off += outcome.ending is not Ending.EXIT
        if _is_right(outcome, expected, name is not None):
            passed += 1
        elif not partial:
            break
    share = passed / len(tests)
    return {
        "score": share if partial else float(share == 1.0),
        "acc": float(share == 1.0),
        "passed": share,
        "cut_off": float(cut_off),
    }


def fault(partial: object = False, max_tests: object = None, answer_s: object = None, limits: Any = None) -> str | None:
    """Return why the reward cannot run with these ``reward_kwargs`` on this machine; None if it can.

    A call with another argument raises TypeError, and so does a name in ``limits`` that is no field of `Limits`.
    """
    if not isinstance(limits or {}, Mapping):
        return "limits must be a section with field names of Limits."
    of_each = Limits(**(limits or {}))
    wrong = [name for name, value in vars(of_each).items() if not isinstance(value, int | float) or value < 0]
    if wrong or of_each.wall_s == 0:
        return f"limits.{wrong[0] if wrong else 'wall_s'} must be a number of at least 0, and wall_s above 0."
    if not isinstance(partial, bool) or not (max_tests is None or (isinstance(max_tests, int) and max_tests > 0)):
        return "partial must be true or false, and max_tests null or an integer above 0."
    return sandbox.fault()


def program_of(answer: str) -> str:
    """Return the last fenced code block of an answer, or the whole answer if it has no such block."""
    blocks = FENCED.findall(answer)
    return blocks[-1] if blocks else answer


def _is_right(outcome: Outcome, expected: Any, is_result: bool) -> bool:
    if not outcome.ok:
        return False
    written = outcome.stdout.decode(errors="replace")
    if not is_result:
        return [line.split() for line in written.rstrip().splitlines()] == [
            line.split() for line in str(expected).rstrip().splitlines()
        ]
    try:
        return bool(json.loads(written) == expected)
    except (ValueError, RecursionError):  # The output is not JSON, or is nested too deeply.
        return False


def _tests(ground_truth: str, data_source: str) -> tuple[list[tuple[Any, Any]], str | None]:
    """Return (input, expected output) of each test case, and the name of the function to call (None without one)."""
    try:
        cases = json.loads(ground_truth)
        inputs, outputs, name = cases["inputs"], cases["outputs"], cases.get("fn_name")
        tests = list(zip(inputs, outputs, strict=True))
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise TestCaseError(
            f"a row of {data_source} has no usable test cases in reward_model.ground_truth ({error!r}): it must be JSON"
            ' {"inputs": [...], "outputs": [...]} with as many outputs as inputs'
        ) from error
    wrong = [given for given, _ in tests if not isinstance(given, str if name is None else list)]
    if not tests or wrong:
        kind = "a string, the standard input of the program" if name is None else "a list, the arguments of fn_name"
        raise TestCaseError(f"a row of {data_source} has test cases in a wrong format: each input must be {kind}")
    return tests, name

# SPDX-License-Identifier: Apache-2.0
"""Right and wrong programs are scored; whatever else one does costs its own score. Hostile ones: test_sandbox.py."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pyarrow.parquet
import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.reward import get_custom_reward_fn

from examples.program_task import TEMPLATES, make_problems, write
from recipe.programs import reward as programs
from recipe.programs import sandbox
from recipe.programs.reward import TestCaseError, compute_score, program_of
from recipe.programs.sandbox import SandboxUnavailable

ADDS = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})
CALLS = json.dumps({"inputs": [[1, 2], [3, 4]], "outputs": [3, 7], "fn_name": "add"})
RIGHT = "Here it is:\n```python\nprint(sum(map(int, input().split())))\n```\nIt adds."
QUICK = {"wall_s": 20.0, "cpu_s": 1, "memory_bytes": 256 << 20, "output_bytes": 100_000}


def score(answer: str, truth: str = ADDS, **settings: object) -> dict[str, float]:
    return compute_score("test", answer, truth, {}, limits=QUICK, **settings)


def test_right_program_scores_one_and_wrong_ones_zero() -> None:
    assert score(RIGHT) == {"score": 1.0, "acc": 1.0, "passed": 1.0, "cut_off": 0.0}
    assert score("print(sum(map(int, input().split())))")["score"] == 1.0
    assert score("print(3)") == {"score": 0.0, "acc": 0.0, "passed": 0.5, "cut_off": 0.0}
    assert score("print(3)", partial=True)["score"] == 0.5
    assert score("print(3)", max_tests=1)["score"] == 1.0
    for wrong in ("", "no program", "print(", "print(sum(map(int, input().split())))\nraise SystemExit(1)"):
        assert score(wrong)["score"] == 0.0


def test_function_is_judged_by_its_value() -> None:
    assert score("def add(a, b):\n    return a + b", CALLS)["score"] == 1.0
    assert score("class Solution:\n    def add(self, a, b):\n        return a + b", CALLS)["score"] == 1.0
    for wrong in ("def add(a, b):\n    return str(a + b)", "def sub(a, b):\n    return a + b", "add = 3"):
        assert score(wrong, CALLS)["score"] == 0.0


@pytest.mark.parametrize(
    ("written", "expected", "right"),
    [
        ("1 2\n3", "1 2\n3\n", True),
        ("1  2 \n3\n\n", "1 2\n3\n", True),
        ("1 2 3", "1 2\n3\n", False),
        ("3\n1 2", "1 2\n3\n", False),
        ("", "1", False),
    ],
)
def test_output_is_compared_by_words_and_lines(written: str, expected: str, right: bool) -> None:
    truth = json.dumps({"inputs": [""], "outputs": [expected]})
    assert score(f"import sys; sys.stdout.write({written!r})", truth)["acc"] == float(right)


def test_last_block_of_an_answer_is_its_program() -> None:
    assert program_of("```python\na = 1\n```\nBetter:\n```py\na = 2\n```") == "a = 2\n"
    assert program_of("a = 3") == "a = 3"


@pytest.mark.parametrize(
    "written",
    ["[" * 100_000, "[" * 100_000 + "]" * 100_000, "NaN", "Infinity", "1" * 5000, '"\\\\ud800"', "{}", "", "[3", "3 4"],
    ids=lambda text: text[:10],
)
def test_result_that_is_no_answer_scores_zero(written: str) -> None:
    """Also on the result's own descriptor, where a program may write what it likes."""
    source = f"import os\ndef add(a, b):\n    for f in range(3, 64):\n        try: os.write(f, {written!r}.encode())\n"
    assert score(f"{source}        except OSError: pass\n    os._exit(0)", CALLS)["score"] == 0.0


def test_result_that_cannot_be_written_scores_zero() -> None:
    for result in ("add", "{1, 2}", "float('nan')", "10 ** 10000", "b''"):
        assert score(f"def add(a, b):\n    return {result}", CALLS)["score"] == 0.0


def test_output_that_is_no_text_scores_zero() -> None:
    assert score("import sys; sys.stdout.buffer.write(bytes(range(256)))")["score"] == 0.0


def test_expected_output_never_enters_the_sandbox() -> None:
    secret = "what-is-expected-1234567"
    truth = json.dumps({"inputs": ["x"], "outputs": [secret]})
    looking = (
        "import gc, sys\n"
        "seen = [sys.stdin.read(), repr(sys.argv), repr(globals())]\n"
        "frame = sys._getframe()\n"
        "while frame: seen.append(repr(frame.f_locals)); frame = frame.f_back\n"
        "print(' '.join(seen))"
    )
    seen = sandbox.run(looking, stdin="x").stdout.decode()
    assert "seen" in seen and secret not in seen
    assert score(looking, truth)["score"] == 0.0


def test_all_test_cases_of_an_answer_have_one_deadline() -> None:
    """Each case is within its own limit; in all they would take 60 s."""
    truth = json.dumps({"inputs": [""] * 30, "outputs": ["3"] * 30})
    began = time.monotonic()
    result = score("import time; time.sleep(2); print(3)", truth, answer_s=5.0, partial=True)
    assert time.monotonic() - began < 60
    assert result["score"] == result["passed"] < 0.5
    assert result["cut_off"] == pytest.approx(30 * (1 - result["passed"]))


def test_machine_that_cannot_isolate_programs_is_no_answers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_bubblewrap", lambda: "/nonexistent/bwrap")
    with pytest.raises(SandboxUnavailable):
        score(RIGHT)


@pytest.mark.parametrize(
    "truth", ["", "3", "{}", '{"inputs": ["1"], "outputs": []}', '{"inputs": [], "outputs": []}', "[1]",
              '{"inputs": [[1]], "outputs": ["1"]}', '{"inputs": ["1"], "outputs": ["1"], "fn_name": "f"}']
)  # fmt: skip
def test_row_without_usable_test_cases_is_named(truth: str) -> None:
    with pytest.raises(TestCaseError, match="a row of apps"):
        compute_score("apps", RIGHT, truth)


def test_verl_loads_it_by_its_path_with_its_settings() -> None:
    settings = {"path": programs.__file__, "name": "compute_score", "reward_kwargs": {"partial": True}}
    function = get_custom_reward_fn(OmegaConf.create({"reward": {"custom_reward_function": settings}}))
    assert function is not None
    result = function(data_source="test", solution_str="print(3)", ground_truth=ADDS, extra_info={})
    assert result["score"] == 0.5


def test_example_problems_are_solved_by_their_solutions_and_not_by_another_ones(tmp_path: Path) -> None:
    problems = make_problems(2 * len(TEMPLATES), seed=0, split="train")
    for problem, other in zip(problems, [*problems[1:], problems[0]], strict=True):
        truth = problem["reward_model"]["ground_truth"]
        assert score(f"```python\n{problem['extra_info']['solution']}\n```", truth)["score"] == 1.0
        assert score(other["extra_info"]["solution"], truth)["score"] == 0.0
    assert make_problems(10, 0, "train") == problems[:10] != make_problems(10, 1, "train")
    train, val = write(tmp_path, 7, 3, seed=0)
    assert (pyarrow.parquet.read_table(train).num_rows, pyarrow.parquet.read_table(val).num_rows) == (7, 3)

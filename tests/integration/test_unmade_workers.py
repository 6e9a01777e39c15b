# SPDX-License-Identifier: Apache-2.0
"""What a worker that cannot be made says: its constructor's error, and what to do. Whole runs: tests/e2e."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError
from test_reward_pool import reward_config

from recipe.async_engine.actors.control import Restartable, sign_of_life
from recipe.async_engine.core.plain import postponed
from recipe.async_engine.rewards.scoring_worker import RewardFailed, ScoringWorker
from recipe.async_engine.trainer.stages import TrainingFailed
from recipe.async_engine.trainer.startup import side_by_side
from recipe.laptop.task.tokenizer import build_tokenizer

FUNCTION = "\ndef compute_score(**arguments):\n    return 1.0\n"
POSTPONED = (
    "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass Own:\n    x: int\n"
)


def reward_worker(file: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the constructor of a reward worker of such a file raises, as Ray would carry it."""
    file.write_text(text + FUNCTION)
    stock = "verl.experimental.reward_loop.reward_loop"
    monkeypatch.setattr(f"{stock}.copy_to_local", lambda path: path)
    monkeypatch.setattr(f"{stock}.hf_tokenizer", lambda path, **_: build_tokenizer())
    with pytest.raises(RewardFailed) as raised:
        ScoringWorker(reward_config(str(file), 1))
    return pickle.loads(pickle.dumps(raised.value))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import not_installed_here\n", "caused by ModuleNotFoundError: No module named 'not_installed_here'"),
        ("import sys\nsys.exit('set JUDGE_KEY first')\n", "SystemExit: set JUDGE_KEY first"),
        ("raise KeyboardInterrupt('at import')\n", "KeyboardInterrupt: at import"),
        ("1 / 0\n", "ZeroDivisionError"),
        ("class Own(Exception):\n    pass\nraise Own('own words')\n", "Own: own words"),
        (POSTPONED, "'NoneType' object has no attribute '__dict__'"),
    ],
)
async def test_reward_worker_says_why_its_file_cannot_be_loaded(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = reward_worker(tmp_path / "reward.py", text, monkeypatch)
    assert words in str(error)
    trace = error.__notes__[0]
    assert f'File "{tmp_path / "reward.py"}", line ' in trace
    assert ("leave out `from __future__ import annotations`" in postponed(f"{error}{trace}")) == (text == POSTPONED)


def test_worker_that_cannot_be_made_is_named_with_its_error(cluster: None) -> None:
    class Unmade:  # made here, so that Ray sends it by value
        def __init__(self) -> None:
            try:
                import not_installed_here  # noqa: F401
            except ModuleNotFoundError as error:
                raise RuntimeError("Error loading module") from error

        async def work(self) -> None:
            """A coroutine, as workers have."""

    def are_made() -> None:
        worker = Restartable(Unmade, 1).options(num_cpus=0).remote()
        ray.get(sign_of_life(worker).remote(), timeout=120)

    with pytest.raises(TrainingFailed) as raised:
        side_by_side({"the workers": are_made}, 150.0)
    first, _, rest = str(raised.value).partition("\n")
    assert first == "the workers could not be made: ModuleNotFoundError: No module named 'not_installed_here'"
    assert "RuntimeError: Error loading module" in rest
    assert __file__ in rest
    assert isinstance(raised.value.__cause__, RayActorError)

# SPDX-License-Identifier: Apache-2.0
"""Each token is labelled with the version that sampled it, whatever becomes of running answers at a swap.

Two real engines under load, or one of SGLang, or one with two data-parallel cores, dozens of swaps each way
(swap_scenario.py). The tokens themselves say which weights sampled them; labels come from the counts that the engine
gives at a swap.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from main_process import last_words
from surroundings import ray_folder, shared_forks, usual_environment
from swap_scenario import WAYS, token_of

from benchmarks.emulation.devices import Emulation
from recipe.laptop.task import TaskPaths

pytestmark = pytest.mark.vllm("its cases name their engines, SGLang too")

SECONDS = 5.0
STAGED = [way for way, weights in WAYS.items() if weights.staging == "device"]
HELD = [way for way, weights in WAYS.items() if weights.at_swap == "keep"]


def played(task: TaskPaths, folder: Path, seconds: float, engine: str = "vllm", cores: int = 1) -> dict[str, Any]:
    environment = {**usual_environment(), **Emulation(decode_step_s=0.01).environment()}
    forks, result = str(shared_forks(usual_environment())), folder / "seen.json"
    with ray_folder() as ray_dir:
        arguments = [str(task.model), str(ray_dir), forks, str(result), str(seconds), engine, str(cores)]
        finished = subprocess.run(
            [forks, "-m", "forked_main", forks, "swap_scenario", *arguments],
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240 + 8 * seconds,
            check=False,
        )
    assert finished.returncode == 0, last_words(finished)
    return json.loads(result.read_text())


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((SECONDS,), id="two engines"),
        pytest.param((SECONDS, "sglang"), id="an engine of SGLang"),
        pytest.param((120.0,), id="two engines for long", marks=pytest.mark.slow),
        pytest.param((SECONDS, "vllm", 2), id="two cores of an engine", marks=pytest.mark.slow),
    ],
)
def seen(request: pytest.FixtureRequest, task: TaskPaths, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return played(task, tmp_path_factory.mktemp("swaps"), *request.param)


@pytest.mark.e2e
@pytest.mark.parametrize("way", WAYS)
def test_every_token_has_the_version_that_sampled_it_and_none_is_missing(seen: dict[str, Any], way: str) -> None:
    answers = seen[way]["answers"]
    assert answers
    for answer in answers:
        assert len(answer["tokens"]) == answer["asked"] == sum(count for _, count in answer["runs"])
        labels = [version for version, count in answer["runs"] for _ in range(count)]
        assert answer["tokens"] == [token_of(version) for version in labels]
        assert answer["log_probs"] > -1e-3, "each token was certain"
    # Otherwise the labels would say nothing.
    assert any(len(answer["runs"]) > 1 for answer in answers)


@pytest.mark.e2e
@pytest.mark.parametrize("way", HELD)
def test_what_is_held_is_cut_nowhere_and_what_is_computed_again_is_counted(seen: dict[str, Any], way: str) -> None:
    for answer in seen[way]["answers"]:
        counts = [count for _, count in answer["runs"]]
        had = [answer["prompt"] + sum(counts[:end]) for end in range(1, len(counts))]
        assert answer["interruptions"] == 0
        assert answer["computed_again"] >= sum(had)
        assert bool(answer["computed_again"]) == bool(had)


@pytest.mark.e2e
def test_generation_pauses_for_the_swap_and_not_for_the_transfer(seen: dict[str, Any]) -> None:
    for way in WAYS:
        for sync in seen[way]["syncs"]:
            names = ("fully_async/weight_sync/generation_paused_seconds", "fully_async/weight_sync/seconds")
            paused, whole = (sync[name] for name in names)
            assert sync["weight_sync/seconds"] <= (whole - paused if way in STAGED else paused)

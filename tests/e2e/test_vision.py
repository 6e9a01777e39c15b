# SPDX-License-Identifier: Apache-2.0
"""A tiny Qwen3-VL with several pictures a prompt: each mode, interrupted and kept answers, a tool, and what it learns.

With a learning rate of zero every version has the same weights, so each token's probability, also after a cut or a
resume, has to be the trainer's: it is not if a request goes on with other pictures, or with none.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from main_runs import FULLY_ASYNC, ONE_STEP_OFF, FinishedRun, long_answers, run_main, small
from surroundings import CHECKOUT, usual_environment
from test_experts import PARTIAL_ROLLOUT, check_exact
from test_fully_async import DECOUPLED, check_books
from test_kept_tokens import unfinished

from recipe.laptop.task import TaskPaths

# torchvision has a folder of its own (Makefile).
FOLDERS = (CHECKOUT / "tests/vision", Path(sys.prefix) / "vision")
STEPS, RESUMED_STEPS = 4, 6
WARM_START = 400
ON_POLICY = [DECOUPLED, "async_training.staleness_threshold=0", "async_training.max_staleness=0"]
NO_LEARNING = "actor_rollout_ref.actor.optim.lr=0"
LEARNING_STEPS = 60


@pytest.fixture(scope="module", autouse=True)
def readable_pictures() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, FOLDERS)))
        yield


def made(folder: Path, warm_start: int, reward: Path) -> TaskPaths:
    command = [sys.executable, FOLDERS[0] / "vision_task.py", folder, str(warm_start)]
    subprocess.run(command, env=usual_environment(), check=True)
    return TaskPaths(folder / "model", folder / "train.parquet", folder / "val.parquet", reward)


@pytest.fixture(scope="module")
def untrained(untrained_task: TaskPaths, tmp_path_factory: pytest.TempPathFactory) -> TaskPaths:
    return made(tmp_path_factory.mktemp("untrained"), 0, untrained_task.reward_file)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> TaskPaths:
    return made(tmp_path_factory.mktemp("warm"), WARM_START, FOLDERS[0] / "picture_reward.py")


def few_steps(task: TaskPaths, folder: Path, ray_dir: Path) -> list[str]:
    return [
        *small(task, folder, ray_dir),
        "data.max_prompt_length=64",
        f"trainer.total_training_steps={STEPS}",
    ]


def varied_answers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return overrides for slow answers of 6 to 24 tokens by versions that all have the same weights."""
    return [*long_answers(folder, monkeypatch, "picture_loop.VariedAnswers"), DECOUPLED, NO_LEARNING]


def check_same_probabilities(run: FinishedRun) -> None:
    differences = run.column("training/rollout_probs_diff_max")
    assert all(0 < difference < 1e-6 for difference in differences), differences


@pytest.mark.e2e
def test_pictures_that_come_again_are_seen_by_the_new_weights(
    untrained: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    """Each step has the same prompts. An engine that kept what older weights saw would give other probabilities."""
    overrides = [
        *few_steps(untrained, tmp_path, ray_dir),
        *ON_POLICY,
        f"data.train_files={untrained.train.with_name('four.parquet')}",
        f"trainer.total_epochs={STEPS}",
        "actor_rollout_ref.actor.optim.lr=0.003",
    ]
    check_exact(run_main(FULLY_ASYNC, overrides, tmp_path), STEPS, bound=0)


@pytest.mark.e2e
@pytest.mark.slow
def test_tokens_of_pictures_count_before_the_start(untrained: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    short = ["data.max_prompt_length=28", f"data.train_files={untrained.train.with_name('tools.parquet')}"]
    run = run_main(FULLY_ASYNC, [*few_steps(untrained, tmp_path, ray_dir), *short], tmp_path)
    assert run.returncode != 0
    assert "prompts of at most data.max_prompt_length=28 tokens" in run.output


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("main", [FULLY_ASYNC, PARTIAL_ROLLOUT])
def test_two_trainer_ranks_see_what_the_engine_sees(
    main: str, untrained: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    own = ["trainer.n_gpus_per_node=2", "trainer.balance_batch=true"]
    run = run_main(main, [*few_steps(untrained, tmp_path, ray_dir), *ON_POLICY, *own], tmp_path)
    check_exact(run, STEPS, bound=0)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("main", [ONE_STEP_OFF, FULLY_ASYNC])
def test_the_trainer_computes_what_log_prob_servers_cannot(
    main: str, untrained: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    own = ["async_training.staleness_threshold=1", "async_training.max_staleness=1"] if main == FULLY_ASYNC else []
    own += ["model_engine_server=fsdp2", NO_LEARNING]
    run = run_main(main, [*few_steps(untrained, tmp_path, ray_dir), *own], tmp_path)
    check_books(run, STEPS, bound=1)
    assert run.column("model_engine_server/fallback_rows") == [16] * STEPS
    check_same_probabilities(run)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(
    ("main", "own"),
    [(FULLY_ASYNC, []), (FULLY_ASYNC, ["async_training.weights.at_swap=keep"]), (PARTIAL_ROLLOUT, [])],
)
def test_interrupted_answers_go_on_with_their_pictures(
    main: str, own: list[str], untrained: TaskPaths, tmp_path: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [*few_steps(untrained, tmp_path, ray_dir), *varied_answers(tmp_path, monkeypatch), *own]
    run = run_main(main, overrides, tmp_path)
    assert run.returncode == 0, run.output[-8000:]
    assert max(run.column("fully_async/staleness/oldest_token_max")) > 0
    if not own:
        assert run.summary["interrupted"] > 0
    check_same_probabilities(run)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fully_async", "one_step_off"])
def test_kept_answers_go_on_with_their_pictures_after_a_kill(
    mode: str, untrained: TaskPaths, tmp_path: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECORD_FOLDER", str(tmp_path / "answers"))
    monkeypatch.setenv("MIDWAY_ANSWERS", "0")
    monkeypatch.setenv("CRASH_AFTER_STEP", "2")
    overrides = [
        *few_steps(untrained, tmp_path / "run", ray_dir),
        *varied_answers(tmp_path, monkeypatch),
        "trainer.save_freq=1",
        f"trainer.total_training_steps={RESUMED_STEPS}",
    ]
    main = f"{mode}:recording_trainer.MidwayApart"
    first = run_main(main, overrides, tmp_path / "run")
    assert first.returncode == 1, first.output[-8000:]
    kept = sum(len(answer.answer.token_ids) for _, answers in unfinished(first.rollout_state()) for answer in answers)
    assert kept > 0

    monkeypatch.setenv("CRASH_AFTER_STEP", "0")
    second = run_main(main, overrides, tmp_path / "run")
    assert second.returncode == 0, second.output[-8000:]
    assert second.column("fully_async/partial/restored_tokens")[-1] == kept
    assert second.summary["ledger"]["trained"] == 4 * RESUMED_STEPS
    check_same_probabilities(second)


@pytest.mark.e2e
@pytest.mark.slow
def test_an_agent_shows_pictures_in_each_of_its_turns(untrained: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    loops = tmp_path / "agent_loops.yaml"
    loops.write_text("- {name: agent, _target_: recipe.agents.loop.OpenAIAgentLoop, agent: picture_agent.run}\n")
    agent = "actor_rollout_ref.rollout.agent"
    overrides = [
        *few_steps(untrained, tmp_path, ray_dir),
        *ON_POLICY,
        f"{agent}.agent_loop_config_path={loops}",
        f"{agent}.default_agent_loop=agent",
        "data.max_response_length=64",
    ]
    run = run_main(FULLY_ASYNC, overrides, tmp_path)
    check_books(run, STEPS, bound=0)
    assert run.column("num_turns/mean") == [4] * STEPS
    assert set(run.column("agents/unmatched_share")) == {0.0}
    check_same_probabilities(run)


@pytest.mark.e2e
@pytest.mark.slow
def test_a_tool_returns_a_picture(warm: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    rollout = "actor_rollout_ref.rollout"
    overrides = [
        *few_steps(warm, tmp_path, ray_dir),
        *ON_POLICY,
        NO_LEARNING,
        f"data.train_files={warm.train.with_name('tools.parquet')}",
        f"{rollout}.multi_turn.tool_config_path={FOLDERS[0] / 'tools.yaml'}",
        "data.max_response_length=64",
    ]
    run = run_main(FULLY_ASYNC, overrides, tmp_path)
    check_books(run, STEPS, bound=0)
    assert run.column("num_turns/mean") == [4] * STEPS
    # The warm-started model's probabilities are close to 1, where fp32's rounding is coarser.
    assert max(run.column("training/rollout_probs_diff_max")) < 1e-5
    assert 0 < run.column("critic/score/mean")[0] < 1


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("main", [FULLY_ASYNC, ONE_STEP_OFF, PARTIAL_ROLLOUT])
def test_the_score_rises_by_what_is_seen(main: str, warm: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    """The control trains on the pictures of other questions, and is validated on those of its own."""

    def validation(folder: Path, *own: str) -> dict[str, float]:
        overrides = [
            *small(warm, folder, ray_dir),
            "data.max_prompt_length=64",
            "data.max_response_length=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=16",
            "actor_rollout_ref.rollout.n=8",
            "trainer.val_before_train=true",
            f"trainer.test_freq={LEARNING_STEPS}",
            f"trainer.total_training_steps={LEARNING_STEPS}",
            *own,
        ]
        run = run_main(main, overrides, folder, timeout_s=1200)
        assert run.returncode == 0, run.output[-8000:]
        return run.summary["validation"]

    score = validation(tmp_path / "pictures")
    control = validation(tmp_path / "control", f"data.train_files={warm.train.with_name('permuted.parquet')}")
    assert score["first"] < 0.4
    assert score["last"] > 0.6
    assert control["last"] < 0.45

# SPDX-License-Identifier: Apache-2.0
"""Learning from a teacher: a vLLM engine on accelerators of its own, with a model that knows the built-in task."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from losing import LOST_AT
from main_runs import FULLY_ASYNC, ONE_STEP_OFF, FinishedRun, run_main, small
from teaching import make_teacher, taught_by
from test_fully_async import check_books

from recipe.laptop.task import TaskPaths

PARTIAL_ROLLOUT = "recipe.partial_rollout.main"
SHORT, STEPS, GROUPS, LONG_S = 4, 80, 16, 1500
TOPK = {"loss_mode": "forward_kl_topk", "topk": 8}


@pytest.fixture(scope="session")
def knowing(shared_folder: Path) -> TaskPaths:
    return make_teacher(shared_folder / "knowing" / "task")


@pytest.fixture
def teacher(knowing: TaskPaths) -> Path:
    return knowing.model


def gain(run: FinishedRun) -> float:
    validation = run.summary["validation"]
    return float(validation["last"] - validation["first"])


@pytest.mark.e2e
@pytest.mark.slow
def test_run_learns_from_its_teacher_alone_and_nothing_without_one(
    knowing: TaskPaths, task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    """The rewards are the same constant on both sides, so that only the teacher knows what is right."""
    constant = tmp_path / "constant.py"
    constant.write_text(
        "from recipe.laptop.task.reward import compute_score as right\n\n\n"
        "def compute_score(*given, extra_info, **named):\n"
        "    score = right(*given, extra_info=extra_info, **named)\n"
        "    return score if extra_info['split'] == 'val' else 0.5\n"
    )
    given = [
        f"trainer.total_training_steps={STEPS}",
        f"trainer.test_freq={STEPS}",
        "trainer.val_before_train=true",
        f"reward.custom_reward_function.path={constant}",
        f"data.train_files={knowing.train}",
        f"data.val_files={knowing.val}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={GROUPS}",
        "actor_rollout_ref.actor.optim.lr=1e-3",
    ]
    runs = {}
    for name, more in (("taught", taught_by(knowing.model, use_task_rewards=False, **TOPK)), ("alone", [])):
        folder = tmp_path / name
        runs[name] = run_main(FULLY_ASYNC, [*small(task, folder, ray_dir), *given, *more], folder, LONG_S)
        check_books(runs[name], STEPS, bound=4, groups=GROUPS)
    taught = runs["taught"]
    assert gain(taught) >= 0.2 and taught.summary["validation"]["last"] >= 0.65, taught.summary["validation"]
    assert abs(gain(runs["alone"])) <= 0.15, runs["alone"].summary["validation"]
    losses = taught.column("actor/distillation/loss")
    assert sum(losses[-5:]) < sum(losses[:5]) / 4, losses
    # Most of the teacher's probability is in the tokens that it names, so no others are compared.
    assert min(taught.column("actor/distillation/teacher_mass")) > 0.99


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(
    ("main", "bound", "loss"),
    [
        (ONE_STEP_OFF, 1, {"loss_mode": "k1", "use_policy_gradient": True}),
        (PARTIAL_ROLLOUT, 4, {"loss_mode": "k3"}),
        (FULLY_ASYNC, 4, TOPK),
    ],
)
def test_teacher_in_each_mode(
    main: str, bound: int, loss: dict[str, object], teacher: Path, task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    """With a rehearsal, a checkpoint, and a resume from it by which finished answers keep the teacher's columns."""
    given = [*small(task, tmp_path, ray_dir), *taught_by(teacher, **loss), "trainer.save_freq=1"]
    for until in (SHORT // 2, SHORT):
        more = [f"trainer.total_training_steps={until}", "async_training.rehearsal=true"]
        run = run_main(main, [*given, *more], tmp_path)
        assert run.returncode == 0, run.output[-8000:]
    assert run.summary["resumed"]["step"] == SHORT // 2
    check_books(run, SHORT, bound)
    assert all(step["actor/distillation/loss"] != 0 for step in run.metrics)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_run_whose_teacher_dies_or_hangs_ends_by_its_name(
    how: signal.Signals,
    teacher: Path,
    task: TaskPaths,
    tmp_path: Path,
    ray_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOSING_TEACHER", str(how.value))
    limits = ["async_training.timeouts.reward=5", "async_training.max_group_retries=1"]
    given = [*small(task, tmp_path, ray_dir), *taught_by(teacher, **TOPK), *limits]
    run = run_main("fully_async:losing_teacher.Losing", [*given, "trainer.total_training_steps=100000"], tmp_path)
    assert run.returncode == 1, run.output[-8000:]
    assert LOST_AT - 1 <= run.summary["steps"] <= LOST_AT + 4
    said = run.summary["error"]["message"]
    assert "the teacher failed 2 times, last with" in said, run.summary["error"]
    # Each failed answer was asked for as often as a reward, and not generated again.
    ledger = run.summary["ledger"]
    assert ledger["issued"] == sum(ledger[key] for key in ("trained", "filtered", "failed", "live"))
    assert ledger["failed"] >= 4

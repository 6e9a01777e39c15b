# SPDX-License-Identifier: Apache-2.0
"""Learning from a teacher: a vLLM engine on accelerators of its own, with a model that knows the built-in task."""

from __future__ import annotations

import signal
from pathlib import Path

import pyarrow
import pytest
import torch
from losing import LOST_AT
from main_runs import FULLY_ASYNC, ONE_STEP_OFF, FinishedRun, run_main, small, trained_answers
from pyarrow import parquet
from teaching import make_teacher, taught_by, taught_by_several
from test_fully_async import check_books
from transformers import AutoModelForCausalLM

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
    ("main", "placement", "bound", "loss"),
    [
        (ONE_STEP_OFF, "separate", 1, {"loss_mode": "k1", "use_policy_gradient": True}),
        (PARTIAL_ROLLOUT, "shared", 4, {"loss_mode": "k3"}),
        (FULLY_ASYNC, "separate", 4, TOPK),
        (FULLY_ASYNC, "elastic", 4, TOPK),
    ],
)
def test_teacher_in_each_mode(
    main: str,
    placement: str,
    bound: int,
    loss: dict[str, object],
    teacher: Path,
    task: TaskPaths,
    tmp_path: Path,
    ray_dir: Path,
) -> None:
    """With a rehearsal, a checkpoint, and a resume from it by which finished answers keep the teacher's columns."""
    given = [*small(task, tmp_path, ray_dir), *taught_by(teacher, **loss), "trainer.save_freq=1"]
    given.append(f"async_training.placement={placement}")
    for until in (SHORT // 2, SHORT):
        more = [f"trainer.total_training_steps={until}", "async_training.rehearsal=true"]
        run = run_main(main, [*given, *more], tmp_path)
        assert run.returncode == 0, run.output[-8000:]
    assert run.summary["resumed"]["step"] == SHORT // 2
    check_books(run, SHORT, bound)
    assert all(step["actor/distillation/loss"] != 0 for step in run.metrics)


def with_sources(data: Path, folder: Path, sources: list[str]) -> Path:
    """Write a copy of a data file whose rows have these values of `data_source`, in turn."""
    table = parquet.read_table(data)
    column = [sources[row % len(sources)] for row in range(len(table))]
    place = table.column_names.index("data_source")
    parquet.write_table(table.set_column(place, "data_source", pyarrow.array(column)), folder / "train.parquet")
    return folder / "train.parquet"


@pytest.mark.e2e
@pytest.mark.slow
def test_each_row_has_the_log_probs_of_its_own_teacher(
    teacher: Path,
    untrained_task: TaskPaths,
    task: TaskPaths,
    tmp_path: Path,
    ray_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of two teachers has two servers. Answers that a checkpoint kept over a kill -9 keep their log-probs."""
    monkeypatch.setenv("RECORD_FOLDER", str(tmp_path / "record"))
    models = {"knowing": teacher, "random": untrained_task.model}
    given = [
        *small(task, tmp_path, ray_dir),
        *taught_by_several({"knowing": (teacher, 2), "random": (untrained_task.model, 1)}, **TOPK),
        f"data.train_files={with_sources(task.train, tmp_path, [*models])}",
        "async_training.staleness_threshold=2",
        "trainer.save_freq=1",
        f"trainer.total_training_steps={SHORT}",
    ]
    monkeypatch.setenv("CRASH_AFTER_STEP", str(SHORT // 2))
    assert run_main("fully_async:recording_teachers.RecordingTeachers", given, tmp_path).returncode == 1
    monkeypatch.delenv("CRASH_AFTER_STEP")
    run = run_main("fully_async:recording_teachers.RecordingTeachers", given, tmp_path)
    assert run.returncode == 0, run.output[-8000:]
    assert run.summary["ledger"]["trained"] == run.summary["ledger"]["issued"] == 4 * SHORT
    assert run.summary["resumed"]["step"] == SHORT // 2 and run.summary["resumed"]["groups_kept"] > 0
    answers = trained_answers(tmp_path / "record" / "teachers")
    assert {answer["source"] for answer in answers} == {*models}
    loaded = {name: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for name, path in models.items()}
    for answer in answers:
        tokens, ids = torch.tensor([answer["input_ids"]]), torch.tensor(answer["teacher_ids"][:-1])
        said = torch.tensor(answer["teacher_logprobs"][:-1])
        with torch.no_grad():
            own, other = (
                loaded[name](tokens).logits[0, :-1].log_softmax(-1).gather(1, ids).sub(said).abs().max()
                for name in sorted(models, key=lambda name: name != answer["source"])
            )
        assert own < 1e-3 < 0.1 < other, (answer["source"], own, other)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_teacher_that_dies_or_hangs_is_replaced_and_no_answer_is_lost(
    how: signal.Signals,
    teacher: Path,
    task: TaskPaths,
    tmp_path: Path,
    ray_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOSING_TEACHER", str(how.value))
    steps = LOST_AT + 4
    given = [*small(task, tmp_path, ray_dir), *taught_by(teacher, **TOPK), f"trainer.total_training_steps={steps}"]
    run = run_main("fully_async:losing_teacher.Losing", given, tmp_path)
    check_books(run, steps, bound=4)
    assert run.summary["ledger"]["failed"] == 0
    assert run.column("fully_async/count/restarts")[-1] == 1
    assert all(step["actor/distillation/loss"] != 0 for step in run.metrics)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_run_whose_teacher_cannot_be_replaced_ends_by_its_name(
    how: signal.Signals,
    teacher: Path,
    task: TaskPaths,
    tmp_path: Path,
    ray_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOSING_TEACHER", str(how.value))
    limits = ["async_training.max_replica_restarts=0", "trainer.total_training_steps=100000"]
    given = [*small(task, tmp_path, ray_dir), *taught_by(teacher, **TOPK), *limits]
    run = run_main("fully_async:losing_teacher.Losing", given, tmp_path)
    assert run.returncode == 1, run.output[-8000:]
    assert LOST_AT - 1 <= run.summary["steps"] <= LOST_AT + 4
    assert run.summary["error"]["name"] == "CannotGoOn"
    assert "teacher default has no server left" in run.summary["error"]["message"], run.summary["error"]

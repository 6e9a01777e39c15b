# SPDX-License-Identifier: Apache-2.0
"""`plan_only=true` prints what a run would be and starts nothing, by this package's mains and by flags."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pyarrow.parquet
import pytest
from documented import Command, composed, for_accelerators
from surroundings import user_environment

from recipe.mains.arguments import PREFIX
from recipe.mains.before_run import BeforeRun
from recipe.mains.plan_only import show

CHECKOUT = Path(__file__).parents[2]
RUN_S = 300
TEACHER = "distillation.teacher_models.teacher_model"
TAUGHT = ["distillation.enabled=true", f"{TEACHER}.model_path='${{actor_rollout_ref.model.path}}'"]
DEVICE = "async_training.device_memory_gib=80"
CONFIG = '{"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, '
CONFIG += '"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": true}'


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments for a model and data that are there: a model's config.json is all that a plan reads of it."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "config.json").write_text(CONFIG)
    prompt = [{"role": "user", "content": "sort 1"}]
    row = {"data_source": "s", "prompt": prompt, "reward_model": {"ground_truth": "1"}}
    data = folder / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * 512), data)
    return [f"actor_rollout_ref.model.path={folder}", f"data.train_files={data}", f"data.val_files={data}"]


def run_main(main: str, arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A main in an empty folder, as a user runs it; fails if it leaves a file or a process."""
    here, temporary = folder / "here", folder / "temporary"
    here.mkdir()
    temporary.mkdir()
    environment = user_environment() | {"TMPDIR": str(temporary), "RAY_TMPDIR": str(temporary), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CHECKOUT), environment.get("PYTHONPATH")]))
    command = [sys.executable, "-m", main, *arguments]
    finished = subprocess.run(
        command, cwd=here, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert list(here.iterdir()) == []
    # torch makes its cache's folder when it is imported.
    assert [path for path in temporary.iterdir() if not path.name.startswith("torchinductor")] == []
    mine = [process for process in psutil.process_iter() if _environment(process).get("TMPDIR") == str(temporary)]
    left = [process.pid for process in mine]
    assert left == []
    return finished


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return dict(process.environ())
    except psutil.Error:
        return {}


def test_a_plan_is_printed_and_nothing_is_started_or_left(paths: list[str], tmp_path: Path) -> None:
    readme = for_accelerators()
    finished = run_main(readme.main, [*readme.arguments, *paths, DEVICE, "plan_only=true"], tmp_path)
    assert finished.returncode == 0, finished.stderr
    lines = {" ".join(line.split()) for line in finished.stdout.splitlines()}
    assert {
        "plan of fully_async; nothing is started",
        "training ranks 4 fsdp2",
        "rollout replicas 2 of 2 accelerators each",
        "in all 8",
        "prompts of a step (b) 32 256 samples",
        "prompts of a version (B = k b) 128 1024 samples",
        "staleness bound in versions (S) 4 pipeline depth 0.5",
        "versions of an answer 4 may pass while it is generated; training waits for a slower one",
        "longest answer in these versions 16.0 times the mean, with all slots in use: 512 tokens where the mean is 32",
        "prompts live at most 192 by the pipeline's depth, (1 + depth) B",
        "slots of the gate 640 at a version's begin, (1 + S) B",
        "trajectories at the engines 256 at most, 256 of them generated at once",
        "steps in all 480 at most",
        "trainer rank (4)",
        "optimizer 0.9 GiB",
        "copy of the weights that is sent, at rank 0 0.9 GiB once",
    } <= lines, finished.stdout


def test_a_flag_that_cannot_run_is_refused_before_stock_verl_starts_ray(paths: list[str], tmp_path: Path) -> None:
    arguments = [*paths, "+recipe=fully_async", "actor_rollout_ref.rollout.name=vllm", "trainer.n_gpus_per_node=4"]
    finished = run_main("verl.trainer.main_ppo", arguments, tmp_path)
    assert finished.returncode == 1
    assert "ConfigError" in finished.stderr
    assert "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null" in finished.stderr


@pytest.mark.parametrize(
    ("name", "extra", "said"),
    [
        ("one_step_off", ["data.train_batch_size=128"], "staleness bound in versions (S)"),
        ("partial_rollout", ["data.train_batch_size=128"], "handing weights over"),
        ("fully_async", ["preset=tiny_cpu"], "not estimated where trainer.device=cpu"),
        (f"{PREFIX}partial_rollout", ["data.train_batch_size=128"], "accelerator in turns (4)"),
        (
            f"{PREFIX}fully_async",
            ["data.train_batch_size=128", "distillation.nnodes=2", "distillation.n_gpus_per_node=2", *TAUGHT],
            f"{'teachers':<34} {4:>12}  2 x 2 (nodes x accelerators of a node)",
        ),
        (f"{PREFIX}colocate_async", ["data.train_batch_size=128"], "max_off_policy_threshold - 1"),
    ],
)
def test_every_way_to_start_a_run_shows_its_plan(
    name: str, extra: list[str], said: str, paths: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    mode = name.removeprefix(PREFIX)
    shared = ["actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.actor.use_dynamic_bsz=true"]
    shared += ["actor_rollout_ref.actor.ppo_mini_batch_size=32", "actor_rollout_ref.rollout.name=vllm"]
    shared += ["actor_rollout_ref.rollout.n=8", "trainer.n_gpus_per_node=4", *paths, DEVICE]
    stock = name.startswith(PREFIX)
    arguments = [*(shared if "preset=tiny_cpu" not in extra else []), *extra]
    if stock:
        arguments += [f"+recipe={mode}", "algorithm.adv_estimator=grpo"]
    main = "verl.trainer.main_ppo" if stock else f"recipe.{name}.main"
    status = show(composed(Command(name, main, tuple(arguments))), name if stock else "sync")
    printed = capsys.readouterr()
    assert status == 0, printed.out + printed.err
    assert f"plan of {mode}; nothing is started" in printed.out
    assert said in printed.out


def test_problems_are_printed_with_the_plan_and_fail(paths: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    readme = for_accelerators().and_also(*paths, "async_training.device_memory_gib=20")
    assert show(composed(readme.and_also("actor_rollout_ref.rollout.gpu_memory_utilization=0.9")), "sync") == 1
    printed = capsys.readouterr().out
    assert "prompts of a version (B = k b)" in printed
    assert "- actor_rollout_ref.rollout.gpu_memory_utilization=0.9: allowed is what fits into 20.0 GiB." in printed
    assert "rollout replica, generation and a weight sync: 25.5 GiB of 20.0 GiB" in printed


def test_a_flags_faulty_argument_ends_the_main_with_its_name(
    paths: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (*paths, "+recipe=fully_async", "data.train_batch_size=100", "plan_only=true")
    config = composed(Command("flag", "verl.trainer.main_ppo", arguments))
    with pytest.raises(SystemExit) as ended:
        BeforeRun().on_run_start(config)
    assert ended.value.code == 1
    assert "data.train_batch_size=100: allowed is a multiple of" in capsys.readouterr().err

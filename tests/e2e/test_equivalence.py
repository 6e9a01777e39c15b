# SPDX-License-Identifier: Apache-2.0
"""With bound 0 the asynchronous engine is verl's synchronous trainer, bit for bit, also after a rehearsal.

Setting: fp32, one request at a time, a seed for each request from an agent loop that both sides use, batches of two
mini-batches, shuffled data whose size is no multiple of the batch, two epochs. Lists of outputs are compared with
verl's v1 trainer, the only one that takes them.
"""

from __future__ import annotations

import itertools
import json
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from main_process import last_words
from main_runs import ONE_STEP_OFF, run_main, small
from safetensors.torch import load_file
from stock_overrides import forked_main, stock_environment
from surroundings import ray_folder
from teaching import taught_by

from recipe.laptop.task import TaskPaths

pytestmark = pytest.mark.vllm("stock verl's weight sync to SGLang fails on a CPU")

CHECKOUT = Path(__file__).parents[2]
SYNC_MAIN = "verl.trainer.main_ppo"
ROWS, BATCH, STEPS = 14, 4, 6
ANSWERS = 4
INFERENCE = "distillation.teacher_models.teacher_model.inference"


V0 = "trainer.use_v1=false"


@dataclass(frozen=True)
class Record:
    """What a run left: by step, the answers in the order of the batch, the metrics and the weights after it."""

    samples: list[list[dict[str, object]]]
    metrics: list[dict[str, float]]
    folder: Path

    def weights(self, step: int) -> dict[str, torch.Tensor]:
        files = sorted((self.folder / f"global_step_{step}" / "actor" / "huggingface").glob("*.safetensors"))
        return {name: tensor for file in files for name, tensor in load_file(file).items()}


def setting(task: TaskPaths, folder: Path, ray_dir: Path) -> list[str]:
    """Overrides of ``preset=tiny_cpu`` for both sides."""
    loops = folder / "agent_loops.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    loops.write_text("- name: seeded\n  _target_: seeded_agent_loop.SeededAgentLoop\n")
    return [
        *small(task, folder, ray_dir)[1:],
        f"data.train_max_samples={ROWS}",
        f"data.train_batch_size={BATCH}",
        "data.shuffle=true",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        f"actor_rollout_ref.rollout.n={ANSWERS}",
        "actor_rollout_ref.rollout.max_num_seqs=1",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=seeded",
        "algorithm.rollout_correction.bypass_mode=false",
        "algorithm.adv_estimator=grpo",
        "trainer.total_training_steps=null",
        "trainer.total_epochs=2",
        "trainer.save_freq=1",
        f"trainer.rollout_data_dir={folder}/samples",
    ]


def with_lists(overrides: list[str], folder: Path) -> list[str]:
    """The same setting with an agent loop that returns lists, of one output or three."""
    (folder / "agent_loops.yaml").write_text("- name: seeded\n  _target_: splitting_loop.OneOrThree\n")
    return overrides


def read(folder: Path, metrics: list[dict[str, float]]) -> Record:
    samples = []
    for step in range(1, STEPS + 1):
        lines = (folder / "samples" / f"{step}.jsonl").read_text().splitlines()
        samples.append([{key: json.loads(line)[key] for key in ("input", "output", "score")} for line in lines])
    return Record(samples, metrics, folder)


@pytest.fixture(scope="module")
def short_dir() -> Iterator[Path]:
    with ray_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def baseline(task: TaskPaths, tmp_path_factory: pytest.TempPathFactory, short_dir: Path) -> Record:
    """Stock verl's synchronous trainer: one process generates and trains in turns."""
    folder = tmp_path_factory.mktemp("sync")
    return run_stock([*setting(task, folder, short_dir), V0], folder)


RAY_WORKER_CRASHED = "Worker unexpectedly exits with a connection error"


def run_stock(overrides: list[str], folder: Path) -> Record:
    """Run stock verl's synchronous trainer; repeat the run once if Ray lost one of its workers to a crash.

    Stock's run is only the measure of the comparison, and Ray says of such a crash no more than that it happened.
    """
    overrides = [
        "+preset=tiny_cpu",
        *(override for override in overrides if not override.startswith("async_training.")),
        "trainer.logger=[console,file]",
        "actor_rollout_ref.hybrid_engine=true",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=naive",
    ]
    metrics = folder / "stock_metrics.jsonl"
    environment = stock_environment(CHECKOUT) | {"VERL_FILE_LOGGER_PATH": str(metrics)}
    finished = forked_main(SYNC_MAIN, overrides, folder, environment)
    if finished.returncode and RAY_WORKER_CRASHED in finished.stdout:
        warnings.warn(f"stock's run is repeated after a crash:\n{last_words(finished)}", stacklevel=2)
        for left in folder.iterdir():
            if left.is_dir():
                shutil.rmtree(left)
            elif left.suffix != ".yaml":
                left.unlink()
        finished = forked_main(SYNC_MAIN, overrides, folder, environment)
    assert finished.returncode == 0, last_words(finished)
    steps = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    return read(folder, [step for step in steps if "actor/grad_norm" in step])


def run_ours(main: str, task: TaskPaths, folder: Path, ray_dir: Path, *more: str, lists: bool = False) -> Record:
    overrides = setting(task, folder, ray_dir)
    run = run_main(
        main,
        [
            "preset=tiny_cpu",
            *(with_lists(overrides, folder) if lists else overrides),
            "async_training.staleness_threshold=0",
            "async_training.rehearsal=true",
            "async_training.alarms.exit_status=false",
            *more,
        ],
        folder,
    )
    assert run.returncode == 0, run.output[-8000:]
    assert run.summary["staleness"] == {"bound": 0, "max": 0, "mean": 0.0}
    assert {check["outcome"] for check in run.summary["rehearsal"]["checks"]} <= {"passed", "left out"}
    return read(folder, run.metrics)


def compare(ours: Record, stock: Record) -> None:
    """Same prompts, answers and rewards in the same places, and the same weights after every step, bit for bit."""
    assert len(ours.metrics) == len(stock.metrics) == STEPS
    for step in range(1, STEPS + 1):
        assert ours.samples[step - 1] == stock.samples[step - 1], f"step {step} trained other samples"
        left, right = ours.weights(step), stock.weights(step)
        assert left.keys() == right.keys()
        different = [name for name in left if not torch.equal(left[name], right[name])]
        assert not different, f"after step {step} the weights differ in {different}"


@pytest.mark.e2e
def test_the_baseline_learns_at_every_step(baseline: Record) -> None:
    """What makes the comparison worth something."""
    prompts = [[row["input"] for row in step] for step in baseline.samples]
    assert all(len(set(step)) == BATCH and len(step) == BATCH * ANSWERS for step in prompts)
    # Two epochs, each without repetition and in an order of its own; 2 of the 14 prompts are left out of each.
    half = STEPS // 2
    first, second = ([row for step in prompts[start : start + half] for row in step] for start in (0, half))
    assert len(set(first)) == len(set(second)) == half * BATCH
    assert first != second
    for step, metrics in enumerate(baseline.metrics, start=1):
        assert metrics["critic/advantages/max"] > 0 > metrics["critic/advantages/min"], f"step {step}"
        assert metrics["actor/grad_norm"] > 0
    weights = [baseline.weights(step) for step in range(1, STEPS + 1)]
    assert all(
        any(not torch.equal(before[name], after[name]) for name in before)
        for before, after in itertools.pairwise(weights)
    )


@pytest.mark.e2e
def test_bound_zero_equals_synchronous_training_bit_for_bit(
    baseline: Record, task: TaskPaths, tmp_path: Path, short_dir: Path
) -> None:
    ours = run_ours(ONE_STEP_OFF, task, tmp_path, short_dir)
    compare(ours, baseline)
    # The version of every token is the number of updates before it, as in the baseline by construction.
    assert [metrics["fully_async/staleness/oldest_token_max"] for metrics in ours.metrics] == [0] * STEPS
    assert [metrics["fully_async/staleness/token_mean"] for metrics in ours.metrics] == [0] * STEPS


@pytest.mark.e2e
@pytest.mark.slow
def test_lists_with_bound_zero_are_those_of_verls_synchronous_v1_trainer_bit_for_bit(
    untrained_task: TaskPaths, tmp_path: Path, short_dir: Path
) -> None:
    """v1 dumps a batch in the order of random names, and trains it in that of a sampler of this test."""
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    overrides = [
        *with_lists(setting(untrained_task, stock, short_dir), stock),
        "trainer.use_v1=true",
        "trainer.v1.trainer_mode=sync",
        "trainer.v1.sampler.custom_sampler.path=pkg://ordered_sampler",
        "trainer.v1.sampler.custom_sampler.name=OrderedReplayBuffer",
    ]
    theirs = run_stock(overrides, stock)
    mine = run_ours(ONE_STEP_OFF, untrained_task, ours, short_dir, lists=True)
    rows = BATCH * (ANSWERS // 2) * (1 + 3)
    for record in (theirs, mine):
        assert [len(step) for step in record.samples] == [rows] * STEPS
        for step in record.samples:
            step.sort(key=str)
    compare(mine, theirs)
    assert all(step["critic/advantages/max"] > 0 and step["actor/grad_norm"] > 0 for step in mine.metrics)


@pytest.mark.parametrize(
    "loss",
    [
        {"loss_mode": "forward_kl_topk", "topk": 8},
        {"loss_mode": "k1", "use_policy_gradient": True, "use_task_rewards": False},
    ],
)
def test_bound_zero_equals_synchronous_distillation_bit_for_bit(
    loss: dict[str, object],
    baseline: Record,
    untrained_task: TaskPaths,
    task: TaskPaths,
    tmp_path: Path,
    short_dir: Path,
) -> None:
    """The teacher is a model with random weights."""
    alone = [f"{INFERENCE}.max_num_seqs=1", f"{INFERENCE}.enable_prefix_caching=false"]
    more = [*taught_by(untrained_task.model, **loss), *alone]
    folder = tmp_path / "stock"
    stock = run_stock([*setting(task, folder, short_dir), V0, *more], folder)
    compare(run_ours(ONE_STEP_OFF, task, tmp_path / "ours", short_dir, *more), stock)
    assert all("actor/distillation/loss" in metrics for metrics in stock.metrics)
    with pytest.raises(AssertionError, match=r"the weights differ|trained other samples"):
        compare(baseline, stock)


@dataclass(frozen=True)
class OneBitOff(Record):
    """A record with one weight of the last step moved to the next number there is."""

    def weights(self, step: int) -> dict[str, torch.Tensor]:
        weights = super().weights(step)
        if step == STEPS:
            first = next(iter(weights.values())).view(-1)
            first[0] = torch.nextafter(first[0], first[0] + 1)
        return weights


@pytest.mark.e2e
def test_the_comparison_sees_the_last_bit_of_a_weight_and_the_order_of_a_batch(baseline: Record) -> None:
    """A trainer with a fault is compared in the next test, which takes long."""
    compare(baseline, baseline)
    with pytest.raises(AssertionError, match=f"after step {STEPS} the weights differ"):
        compare(OneBitOff(baseline.samples, baseline.metrics, baseline.folder), baseline)
    turned = [*baseline.samples[:-1], baseline.samples[-1][::-1]]
    with pytest.raises(AssertionError, match=f"step {STEPS} trained other samples"):
        compare(Record(turned, baseline.metrics, baseline.folder), baseline)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("WrongVersionLabel", "step 3 trained other samples"),
        ("WrongBatchOrder", "step 2 trained other samples"),
        ("DoubleUpdate", "after step 2 the weights differ"),
    ],
)
def test_the_comparison_finds_a_deliberate_fault(
    fault: str,
    found: str,
    baseline: Record,
    task: TaskPaths,
    tmp_path: Path,
    short_dir: Path,
) -> None:
    ours = run_ours(f"one_step_off:sabotage.{fault}", task, tmp_path, short_dir)
    with pytest.raises(AssertionError, match=found):
        compare(ours, baseline)

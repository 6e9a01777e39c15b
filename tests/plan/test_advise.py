# SPDX-License-Identifier: Apache-2.0
"""The advisor finds the split that a closed form names, refuses bad questions, and prints its advice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from benchmarks.emulation.models import MODELS
from recipe.async_engine.config.plan import derive
from recipe.async_engine.config.validation import judge
from recipe.plan.__main__ import assumed, main
from recipe.plan.advise import Advice, advise, candidates, parts_of_nodes
from recipe.plan.simulation import Scenario
from recipe.plan.times import Times


def test_the_best_split_balances_both_sides() -> None:
    # A replica makes 8 answers of 10 tokens in 10 s; a batch of 96 answers trains in 80 s / ranks.
    times = Times(
        groups=((10, 10),),
        step_s=lambda batch, context: 1.0,
        read_s=lambda tokens: 0.0,
        update_s=lambda lengths, ranks: 80.0 / ranks,
        log_probs_s=lambda lengths, ranks: 0.0,
    )
    base = Scenario(batch_groups=48, answers=2, replicas=1, slots=8, places=8, steps=16, at_swap="keep")
    # On 16 devices generation takes 120 s / replicas and training 80 s / ranks, which are equal at 6.4 ranks.
    found = advise(base, times, 16, "throughput", [0])
    assert found[0].scenario.trainer_ranks == 6
    assert found[0].scenario.max_staleness > 0
    bounded = advise(base, times, 16, "staleness<=0", [0])
    assert {advice.scenario.max_staleness for advice in bounded} >= {0}
    assert all(advice.staleness == 0 for advice in bounded)
    assert found[-1].why_worse(found[0]).startswith("wait_")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen2.5-0.5b"]))
    return tmp_path


def test_an_estimate_is_marked_and_ends_with_a_line_to_paste(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [str(model), "--accelerators", "4", "--lengths", "100,0.5,400", "--batch", "8", "--steps", "6"]
    page = model / "split.html"
    assert main([*asked, "--seeds", "1", "--picture", str(page)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("An estimate")
    assert "async_training.max_staleness=" in said.splitlines()[-1]
    assert "max_staleness" in page.read_text()
    assert main([*asked, "--seeds", "2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["estimate"]
    assert answer["best"][0]["tokens_per_s"] >= answer["best"][-1]["tokens_per_s"]


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (["--accelerators", "1", "--lengths", "9,1,99"], "--accelerators 1"),
        (["--accelerators", "8", "--goal", "fun", "--lengths", "9,1,99"], "--goal 'fun'"),
        (["--accelerators", "8", "--goal", "staleness<=x", "--lengths", "9,1,99"], "--goal"),
        (["--accelerators", "8", "--lengths", "long"], "--lengths 'long'"),
        (["--accelerators", "8", "--lengths", "9,1,99", "--device", "abacus"], "--device 'abacus'"),
        (["--accelerators", "8", "--lengths", "9,1,99", "--seeds", "0"], "--seeds 0"),
        (["--accelerators", "8"], "--lengths"),
        (["--accelerators", "0", "--lengths", "9,1,99"], "--accelerators 0"),
        (["--accelerators", "1000000", "--lengths", "9,1,99"], "--accelerators 1000000"),
        (["--accelerators", "8", "--lengths", "nan,1,99"], "--lengths 'nan,1,99'"),
        (["--accelerators", "8", "--lengths", "9,1,inf"], "--lengths '9,1,inf'"),
        (["--accelerators", "8", "--lengths", "9,500,99"], "--lengths '9,500,99'"),
        (["--accelerators", "8", "--lengths", "9,1,99", "--batch", "0"], "--batch 0"),
        (["--accelerators", "8", "--lengths", "9,1,99", "--replica-size", "0"], "--replica-size 0"),
        (["--accelerators", "8", "--lengths", "9,1,99", "--picture", "/nowhere/at/all.html"], "--picture"),
    ],
)
def test_bad_input_is_refused_by_name(
    model: Path, capsys: pytest.CaptureFixture[str], asked: list[str], named: str
) -> None:
    assert main([str(model), *asked]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{half", "[]"])
def test_a_config_that_is_no_object_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (tmp_path / "config.json").write_text(content)
    assert main([str(tmp_path), "--accelerators", "8", "--lengths", "9,1,99"]) == 2
    assert "config.json is not a JSON object" in capsys.readouterr().err


ESTIMATE = Scenario(batch_groups=64, answers=8, replicas=1, slots=320, places=256)


@pytest.mark.parametrize(("accelerators", "size"), [(2, 1), (8, 1), (17, 16), (10, 4), (64, 1), (64, 4), (1024, 8)])
def test_each_split_can_be_trained_and_placed(accelerators: int, size: int) -> None:
    found = candidates(replace(ESTIMATE, replica_size=size), accelerators, lends=True)
    assert found
    assert any(scenario.lends for scenario in found) == (accelerators >= 2 * size)
    for scenario in found:
        trainer, rollout = scenario.trainer_ranks, scenario.replicas * size
        assert 64 * 8 % trainer == 0 and rollout > 0 and trainer + rollout <= accelerators
        assert not scenario.lends or trainer % size == 0
        parts = parts_of_nodes(trainer, rollout, 8)
        assert max(parts) <= 8 and trainer % parts[0] == rollout % parts[1] == 0


@pytest.mark.parametrize(
    ("trainer", "rollout", "parts"),
    [(2, 6, (2, 6)), (16, 48, (8, 8)), (1, 8, (1, 8)), (10, 6, (2, 6)), (4, 12, (2, 6)), (3, 13, (3, 1))],
)
def test_parts_of_nodes_fit_beside_each_other(trainer: int, rollout: int, parts: tuple[int, int]) -> None:
    assert parts_of_nodes(trainer, rollout, 8) == parts


@pytest.mark.parametrize("accelerators", [5, 64])
def test_the_line_to_paste_is_one_that_the_configuration_accepts(accelerators: int) -> None:
    data = ["data.train_files=/d/train.parquet", "data.val_files=/d/test.parquet", "actor_rollout_ref.model.path=/m"]
    others = ["actor_rollout_ref.rollout.name=vllm", "trainer.total_training_steps=4"]
    others += ["actor_rollout_ref.actor.use_dynamic_bsz=true"]
    deeper = ["async_training.staleness_threshold=3", "async_training.max_staleness=3"]
    with initialize_config_module("recipe.fully_async.config", version_base=None):
        for scenario in candidates(ESTIMATE, accelerators, lends=True)[::3]:
            line = Advice(scenario, accelerators, 1.0, 1.0, 1.0, 0.0, {}, also=assumed(scenario)).overrides.split()
            composed = compose("fully_async_ppo_trainer", [*data, *others, *deeper, *line])
            config = OmegaConf.to_container(composed, resolve=True)
            assert not judge(config)[0], line
            plan = derive(config)
            assert (plan.trainer_ranks, plan.rollout_replicas) == (scenario.trainer_ranks, scenario.replicas)
            assert plan.hybrid_replicas == scenario.trainer_ranks * scenario.lends
            assert (plan.max_staleness, plan.pipeline_depth) == (scenario.max_staleness, scenario.pipeline_depth)
            assert (plan.batch_groups * plan.answers_per_group, plan.engine_places) == (512, 256 * scenario.replicas)


def test_a_folder_without_a_record_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--accelerators", "8"]) == 2
    assert "no record of events" in capsys.readouterr().err

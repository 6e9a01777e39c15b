# SPDX-License-Identifier: Apache-2.0
"""What a resume needs of a checkpoint is there, or is named: weights, optimizer and the rest, of actor and critic."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpointed import plan, snapshot
from omegaconf import OmegaConf
from ray.exceptions import RayError

from recipe.async_engine.core.errors import CheckpointError, SnapshotError
from recipe.async_engine.core.snapshots import changes
from recipe.async_engine.record.contents import MANIFEST, lacking, without_weights
from recipe.async_engine.trainer.checkpoints import RunState
from recipe.async_engine.trainer.save_stage import loading

ALL = ["model", "optimizer", "extra"]
STEMS = {"model": "model", "optimizer": "optim", "extra": "extra_state"}


def config(load: list[str] | None = None, strategy: str = "fsdp2") -> Any:
    section = {"strategy": strategy, "checkpoint": {"load_contents": load or ALL}}
    return OmegaConf.create({"actor_rollout_ref": {"actor": section}, "critic": section})


def write(folder: Path, contents: list[str], ranks: int = 2) -> None:
    """Files of FSDP's, as verl names them."""
    folder.mkdir(parents=True)
    for part in contents:
        for rank in range(ranks if part in STEMS else 0):
            (folder / f"{STEMS[part]}_world_size_{ranks}_rank_{rank}.pt").touch()


def write_megatron(folder: Path, contents: list[str]) -> None:
    keys = {"model": "model", "optimizer": "optimizer", "extra": "rng_state", "hf_model": "hf_model"}
    folder.mkdir(parents=True)
    manifest = {"schema_version": 2, "contents": {keys[part]: {} for part in contents}}
    (folder / MANIFEST).write_text(json.dumps(manifest))


def subsets() -> Iterator[list[str]]:
    for n in range(1 << 4):
        yield [part for place, part in enumerate([*ALL, "hf_model"]) if n >> place & 1]


@pytest.mark.parametrize("contents", [*subsets()], ids="+".join)
@pytest.mark.parametrize("model", ["actor", "critic"])
def test_checkpoint_without_a_part_that_a_resume_needs_is_refused_by_the_name_of_the_part(
    model: str, contents: list[str], tmp_path: Path
) -> None:
    for name in ("actor", "critic"):
        write(tmp_path / "fsdp" / name, contents if name == model else ALL)
        write_megatron(tmp_path / "megatron" / name, contents if name == model else ALL)
    for strategy in ("fsdp2", "megatron"):
        has = {*contents} | ({"model"} if strategy == "megatron" and "hf_model" in contents else set())
        found = lacking(config(strategy=strategy), 2, True, tmp_path / strategy.rstrip("2"))
        assert len(found) == (not has >= {*ALL}), found
        for part in {*ALL} - has:
            assert f"the {model}'s " in found[0] and f"{part} (" in found[0]


def test_checkpoint_of_other_ranks_or_with_a_rank_less_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "actor", ALL, ranks=2)
    assert lacking(config(), 2, False, tmp_path) == []
    assert "model_world_size_4_rank_0.pt" in lacking(config(), 4, False, tmp_path)[0]
    (tmp_path / "actor" / "optim_world_size_2_rank_1.pt").unlink()
    assert "optimizer (optim_world_size_2_rank_1.pt)" in lacking(config(), 2, False, tmp_path)[0]


@pytest.mark.parametrize("load", [["hf_model"], ["model"], ["model", "extra"], ["optimizer", "extra"]])
def test_settings_that_would_load_less_than_a_resume_needs_are_refused(load: list[str], tmp_path: Path) -> None:
    write(tmp_path / "actor", ALL)
    (found,) = lacking(config(load), 2, False, tmp_path)
    assert found.startswith(f"actor_rollout_ref.actor.checkpoint.load_contents = {load} leaves out ")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"contents": 7}', "[" * 9999])
def test_manifest_of_another_kind_is_that_of_a_checkpoint_that_has_nothing(content: str, tmp_path: Path) -> None:
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / MANIFEST).write_text(content)
    (found,) = lacking(config(strategy="megatron"), 2, False, tmp_path)
    assert "model (model in ckpt_contents.json)" in found


def test_run_does_not_resume_from_a_checkpoint_that_lacks_something_and_says_so(tmp_path: Path) -> None:
    trainer = OmegaConf.create({"trainer": {"default_local_dir": str(tmp_path), "save_freq": 1, "resume_mode": "auto"}})
    state = RunState(trainer, plan(), {})
    state.save(2, snapshot(), lambda: write(tmp_path / "global_step_2" / "actor", ["hf_model"]))()
    state = RunState(trainer, plan(), {}, lambda folder: lacking(config(), 2, False, folder))
    with pytest.raises(SnapshotError, match=r"cannot resume from .*global_step_2: it does not have the actor's model"):
        state.find()


def test_weights_to_begin_with_are_there_for_these_ranks_or_the_way_by_the_merger_is_said(tmp_path: Path) -> None:
    assert without_weights(config(), 2, False, tmp_path / "none") == "is no folder"
    write(tmp_path / "actor", ["model"])
    assert without_weights(config(), 2, False, tmp_path) is None
    assert "the critic's weights" in str(without_weights(config(), 2, True, tmp_path))
    said = str(without_weights(config(), 4, False, tmp_path))
    assert "verl.model_merger merge --backend fsdp" in said and "it has model_world_size_2_rank_0.pt" in said


def test_folder_that_verls_workers_cannot_load_is_named_with_what_to_do() -> None:
    with (
        pytest.raises(CheckpointError, match=r"(?s)verl cannot load /run/global_step_2, .*crc.*resume_from_path"),
        loading("/run/global_step_2"),
    ):
        raise RayError("PytorchStreamReader failed: crc mismatch")


def test_change_without_effect_is_said_and_one_of_the_model_is_refused() -> None:
    lr = "actor_rollout_ref.actor.optim.lr"
    (said,) = changes({lr: 1e-6}, {lr: 1e-5}, 0)
    assert said == f"{lr}: 1e-06 -> 1e-05, without effect: the checkpoint's value is used"
    for name in ("LoRA", "sizes of actor_rollout_ref.model.path", "actor_rollout_ref.actor.optim.optimizer"):
        with pytest.raises(SnapshotError, match=f"{name} = b, but the checkpoint was made with a"):
            changes({name: "a"}, {name: "b"}, 0)
        assert changes({}, {name: "b"}, 0) == [], "earlier versions did not say"

# SPDX-License-Identifier: Apache-2.0
"""A checkpoint says what it was made with; a run with other data, another tokenizer or other shapes does not resume."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpointed import plan, snapshot
from omegaconf import OmegaConf

from recipe.async_engine.config.sections import AsyncTraining
from recipe.async_engine.core.errors import SnapshotError
from recipe.async_engine.core.snapshots import RULES
from recipe.async_engine.trainer import made_with as module
from recipe.async_engine.trainer.checkpoints import RunState
from recipe.async_engine.trainer.made_with import files_fingerprint, made_with

LIVE = [4, 40, 0, "0-40", 2, "running", 1, None]


class Tokenizer:
    chat_template = "{{ messages }}"

    def __init__(self, *words: str) -> None:
        self._words = words

    def get_vocab(self) -> dict[str, int]:
        return {word: n for n, word in enumerate(self._words)}


class Data(list[int]):
    def __init__(self, *files: Path) -> None:
        super().__init__(range(10))
        self.data_files = list(files)


def made(data: Data, tokenizer: Any = None, models: dict[str, Any] | None = None, **changed: Any) -> dict[str, Any]:
    config = {
        "data": {"max_prompt_length": 8, "max_response_length": 8, "train_files": [], "seed": 1},
        "actor_rollout_ref": {"actor": {"strategy": "fsdp2"}},
        "trainer": {"total_epochs": 2},
        **(models or {}),
    }
    values = {"answers_per_group": 4, "batch_groups": 2, "batches_per_version": 1, "max_staleness": 1}
    settings = SimpleNamespace(async_training=AsyncTraining())
    derived = SimpleNamespace(**values | {"trainer_ranks": 1, "settings": settings} | changed)
    return made_with(OmegaConf.create(config), derived, data, tokenizer or Tokenizer("a", "b"))


def run_state(root: Path, values: dict[str, Any]) -> RunState:
    trainer = {"default_local_dir": str(root), "save_freq": 1, "resume_mode": "auto"}
    bound = {"max_staleness": values.get("async_training.max_staleness", 1)}
    return RunState(OmegaConf.create({"trainer": trainer}), plan(**bound), values)


def test_every_value_that_a_resume_compares_is_saved(tmp_path: Path) -> None:
    assert set(made(Data(), models=models_in(tmp_path))) == set(RULES)


def models_in(folder: Path, lr: float = 1e-6, **lora: Any) -> dict[str, Any]:
    """The parts of a configuration that are about models, with a critic."""
    sizes = {"model_type": "qwen3", "hidden_size": 64, "vision_config": {}, "eos_token_id": 3}
    (folder / "config.json").write_text(json.dumps(sizes))
    trained = {"strategy": "fsdp2", "optim": {"optimizer": "AdamW", "lr": lr}}
    model = {"path": str(folder), **lora}
    critic = {"enable": True, "model": {"path": str(folder)}, **trained}
    return {"actor_rollout_ref": {"actor": trained, "model": model}, "critic": critic}


def test_models_adapters_and_optimizers_are_among_what_a_checkpoint_is_made_with(tmp_path: Path) -> None:
    plain = made(Data(), models=models_in(tmp_path))
    assert plain["sizes of critic.model.path"] == "model_type qwen3, hidden_size 64"
    assert (plain["LoRA"], plain["critic.optim.lr"]) == ("none", 1e-6)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    found = {
        made(Data(), models=models_in(tmp_path, **lora))["LoRA"]
        for lora in (
            {"lora_rank": 8, "lora_alpha": 16},
            {"lora_rank": 8, "lora_alpha": 32},
            {"lora": {"rank": 8, "alpha": 16}},
            {"lora_rank": 4, "lora_alpha": 16, "target_modules": "all-linear"},
        )
    }
    assert len(found) == 3, "an adapter is known by rank, scale and modules, however they are set"
    assert all("model.safetensors" in text for text in found)
    hub = made(Data(), models={"actor_rollout_ref": {"actor": {"strategy": "fsdp2"}, "model": {"path": "Qwen/Q"}}})
    assert "sizes of actor_rollout_ref.model.path" not in hub, "what cannot be told is not compared"


def test_run_resumes_with_what_its_checkpoint_was_made_with_and_refuses_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    file.write_bytes(b"rows, one")
    root = tmp_path / "run"
    saved = made(Data(file))
    group = {"row": {}, "scored": [None], "payloads": [None], "kept": [None]}
    run_state(root, saved).save(2, snapshot([LIVE], {4: group}), lambda: None)()
    same = run_state(root, made(Data(file)))
    assert same.find() == str(root / "global_step_2")
    assert same.resumed == {"step": 2, "groups_kept": 0, "changed": []}

    wider = run_state(root, made(Data(file), max_staleness=3))
    wider.find()
    assert wider.resumed["changed"] == ["async_training.max_staleness: 1 -> 3"]

    with pytest.raises(SnapshotError, match=r"cannot resume from .*global_step_2: .*rollout\.n = 5, .* made with 4"):
        run_state(root, made(Data(file), answers_per_group=5)).find()
    with pytest.raises(SnapshotError, match=r"n_gpus_per_node = 2, but the checkpoint was made with 1"):
        run_state(root, made(Data(file), trainer_ranks=2)).find()
    with pytest.raises(SnapshotError, match="tokenizer = sha256"):
        run_state(root, made(Data(file), Tokenizer("a", "c"))).find()
    file.write_bytes(b"rows, two")
    with pytest.raises(SnapshotError, match=r"data\.train_files = train\.parquet \(9 bytes"):
        run_state(root, made(Data(file))).find()


def test_large_file_is_known_by_its_size_its_beginning_and_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WHOLE", 10)
    monkeypatch.setattr(module, "PART", 3)
    file = tmp_path / "train.parquet"
    found = set()
    for content in (b"0123456789ab", b"X123456789ab", b"0123456789aX", b"0123456789abc"):
        file.write_bytes(content)
        found.add(files_fingerprint([file]))
    assert len(found) == 4
    assert files_fingerprint(["hdfs://somewhere/train.parquet"]) == "hdfs://somewhere/train.parquet"

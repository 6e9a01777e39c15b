# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The rollout side of a checkpoint is written whole, and read back with payloads as object references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from recipe.async_engine.trainer import rollout_state
from recipe.async_engine.trainer.checkpoints import CheckpointError


class Store:
    """Ray's object store."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.deadlines: list[float] = []

    def put(self, value: Any) -> str:
        self.objects[f"reference-{len(self.objects)}"] = value
        return f"reference-{len(self.objects) - 1}"

    def get(self, references: list[str], timeout: float) -> list[Any]:
        self.deadlines.append(timeout)
        return [self.objects[reference] for reference in references]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    monkeypatch.setattr(rollout_state, "ray", store)
    return store


def snapshot_of(store: Store) -> dict[str, Any]:
    kept = [None, "its answers"]
    ready = [store.put({"tokens": torch.arange(3)}), store.put({"tokens": torch.arange(4)})]
    return {
        "ledger": {"version": 3},
        "source": {"epoch": 1},
        "groups": {
            4: {"row": {"index": 40}, "scored": ["a", "b"], "payloads": ready, "kept": [None, None]},
            5: {"row": {"index": 50}, "scored": ["a", None], "payloads": [ready[0], None], "kept": kept},
        },
        "validation": {"first": 0.5, "last": 0.75},
    }


def test_groups_come_back_with_the_payloads_that_were_there_and_what_is_kept_of_the_others(
    tmp_path: Path, store: Store
) -> None:
    rollout_state.save(str(tmp_path / "global_step_3"), snapshot_of(store), timeout_s=7.0)
    loaded = rollout_state.load(str(tmp_path / "global_step_3"))
    assert {key: loaded[key] for key in ("ledger", "source", "validation")} == {
        "ledger": {"version": 3},
        "source": {"epoch": 1},
        "validation": {"first": 0.5, "last": 0.75},
    }
    ready, running = loaded["groups"][4], loaded["groups"][5]
    payloads = [store.objects[reference] for reference in ready["payloads"]]
    assert [payload["tokens"].tolist() for payload in payloads] == [[0, 1, 2], [0, 1, 2, 3]]
    assert (ready["row"], ready["scored"]) == ({"index": 40}, ["a", "b"])
    assert (running["row"], running["scored"], running["kept"]) == ({"index": 50}, ["a", None], [None, "its answers"])
    assert [None if payload is None else store.objects[payload] for payload in running["payloads"]][1] is None
    assert store.objects[running["payloads"][0]]["tokens"].tolist() == [0, 1, 2]


def test_write_that_breaks_off_leaves_the_file_before_it(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout_state.save(str(tmp_path), snapshot_of(store), timeout_s=1.0)

    def save(value: Any, path: Path) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(rollout_state.torch, "save", save)
    with pytest.raises(OSError, match="no space left"):
        rollout_state.save(str(tmp_path), {**snapshot_of(store), "ledger": {"version": 4}}, timeout_s=1.0)
    assert rollout_state.load(str(tmp_path))["ledger"] == {"version": 3}


def test_checkpoint_of_another_trainer_is_refused_with_what_to_change(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no rollout_state\.pt.*trainer\.resume_mode=disable"):
        rollout_state.load(str(tmp_path))
